"""The users in force: who a token or a certificate belongs to, and what users and addresses may use together."""

from __future__ import annotations

import hmac
from collections import OrderedDict
from collections.abc import Callable
from weakref import WeakSet, WeakValueDictionary

from qb.core.rights.address_quotas import UNLIMITED, quotas_of, source_of
from qb.core.rights.principals import ANONYMOUS, STRANGER, UNRESTRICTED, Principal, Quotas
from qb.core.rights.quotas import Allowance
from qb.core.rights.users_file import UsersFile, hash_of, read_users
from qb.core.wire.errors import Unauthenticated

RECENT = 10_000  # users and addresses whose use is remembered without a connection of theirs
HOW_TO_LOG_IN = "frames: token in HELLO; JSON lines: a first line of type auth; HTTP: Authorization: Bearer"


class LoggedIn:
    """The identity of one connection. `changed` is called when its user is not the same any more."""

    def __init__(self, principal: Principal) -> None:
        self.principal = principal
        self.changed: Callable[[], None] = lambda: None

    @property
    def is_over(self) -> bool:
        """Has the connection ended?"""
        return False


class KnownUsers:
    """The users of a broker. Without any, each peer is UNRESTRICTED; once there are users, that never comes back.

    They come from a file, or from the metadata: then replace() is called with them.
    """

    def __init__(self, path: str = "", known: UsersFile | None = None, *, is_closed: bool = False) -> None:
        """`is_closed`: no peer is UNRESTRICTED, even while no users are known.

        Raises UsersFileError if there is a file and it cannot be used.
        """
        self._path = path
        self.enabled = bool(path) or known is not None or is_closed  # are there users at all?
        self._known = UsersFile({})
        self.limits_storage = False  # is there a user with a limit on what its topics hold?
        self._connections: WeakSet[LoggedIn] = WeakSet()
        self._allowances: WeakValueDictionary[str, Allowance] = WeakValueDictionary()
        self._recent: OrderedDict[str, Allowance] = OrderedDict()  # so that a new connection is no new allowance
        self.replace(read_users(path) if path else known or UsersFile({}))

    @property
    def known(self) -> UsersFile:
        """The users in force."""
        return self._known

    @property
    def are_from_file(self) -> bool:
        """Does a file say who they are?"""
        return bool(self._path)

    @property
    def admits_no_peer(self) -> bool:
        """Must peers be users, and none are known?"""
        return self.enabled and not self._known.users

    def reload(self) -> int:
        """Read the file again, as replace() does, and return how many users there are.

        Raises UsersFileError; then the users stay as they were.
        """
        if self._path:
            self.replace(read_users(self._path))
        return len(self._known.users)

    def replace(self, known: UsersFile) -> None:
        """Have these users from now on. Connections of users that have changed are notified."""
        self._known = known
        self.enabled = self.enabled or bool(known.users)
        self.limits_storage = any(user.quotas.storage is not None for user in known.users.values())
        for key, allowance in list(self._allowances.items()):
            allowance.change(self._quotas(key))
        for connection in list(self._connections):
            if not connection.is_over and self._current(connection.principal) != connection.principal:
                connection.changed()

    def _current(self, principal: Principal) -> Principal:
        return self._known.users.get(principal.name, STRANGER) if self.enabled else principal

    def watch(self, connection: LoggedIn) -> None:
        """Call its `changed` when its user changes, for as long as it is referred to elsewhere."""
        self._connections.add(connection)

    # Who it is

    def without_token(self, common_name: str | None = None) -> Principal:
        """Return who a peer is before it logs in: the user of its certificate, else `anonymous`."""
        if not self.enabled:
            return UNRESTRICTED
        if common_name is not None:
            for user in self._known.users.values():
                if user.certificate == common_name:
                    return user
        return self._known.users.get(ANONYMOUS, STRANGER)

    def with_token(self, token: str) -> Principal:
        """Return the user of a token, found in a time that does not depend on it. Raises Unauthenticated."""
        if not self.enabled:
            return UNRESTRICTED
        given, found = hash_of(token), None
        for user in self._known.users.values():
            for stored in user.tokens:
                if hmac.compare_digest(stored, given):
                    found = user
        if found is None:
            raise Unauthenticated("this token is of no user; the operator makes one: qb users add, qb users rotate")
        return found

    # How much it may use

    def of_user(self, name: str) -> Allowance:
        """Return what all connections of a user share. One that is not known has no limits."""
        return self._allowance(f"user {name!r}")

    def of_address(self, host: str) -> Allowance:
        """Return what all connections from an address share."""
        return self._allowance(f"address {source_of(host)[0]}")

    def _allowance(self, whose: str) -> Allowance:
        found = self._allowances.get(whose)
        if found is None:
            found = self._allowances[whose] = Allowance(whose, self._quotas(whose))
        self._recent[whose] = found
        self._recent.move_to_end(whose)
        if len(self._recent) > RECENT:
            self._recent.popitem(last=False)
        return found

    def _quotas(self, whose: str) -> Quotas:
        kind, _, name = whose.partition(" ")
        if kind == "address":
            return quotas_of(self._known.addresses, name)
        user = self._known.users.get(name[1:-1])
        return UNLIMITED if user is None else user.quotas
