"""The users in force: who a token or a certificate belongs to, read again on request."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping
from weakref import WeakSet

from qb.core.rights.principals import ANONYMOUS, STRANGER, UNRESTRICTED, Principal
from qb.core.rights.users_file import hash_of, read_users
from qb.core.wire.errors import Unauthenticated

HOW_TO_LOG_IN = "frames: token in HELLO; JSON lines: a first line of type auth; HTTP: Authorization: Bearer"


class LoggedIn:
    """The identity of one connection. `changed` is called when its user is not the same any more."""

    def __init__(self, principal: Principal) -> None:
        self.principal = principal
        self.changed: Callable[[], None] = lambda: None


class KnownUsers:
    """The users of a broker. Without a file, each peer is UNRESTRICTED."""

    def __init__(self, path: str = "") -> None:
        """Raises UsersFileError."""
        self._path = path
        self._users: Mapping[str, Principal] = read_users(path) if path else {}
        self._connections: WeakSet[LoggedIn] = WeakSet()

    @property
    def enabled(self) -> bool:
        """Is there a users file?"""
        return bool(self._path)

    def reload(self) -> int:
        """Read the file again and return how many users there are.

        Connections of users that have changed are notified. Raises UsersFileError; then the users stay as they were.
        """
        self._users = read_users(self._path) if self._path else {}
        for connection in list(self._connections):
            now = self._current(connection.principal)
            if now != connection.principal:
                connection.changed()
        return len(self._users)

    def _current(self, principal: Principal) -> Principal:
        return self._users.get(principal.name, STRANGER) if self.enabled else principal

    def watch(self, connection: LoggedIn) -> None:
        """Call its `changed` when its user changes, for as long as it is referred to elsewhere."""
        if self.enabled:
            self._connections.add(connection)

    def without_token(self, common_name: str | None = None) -> Principal:
        """Return who a peer is before it logs in: the user of its certificate, else `anonymous`."""
        if not self.enabled:
            return UNRESTRICTED
        if common_name is not None:
            for user in self._users.values():
                if user.certificate == common_name:
                    return user
        return self._users.get(ANONYMOUS, STRANGER)

    def with_token(self, token: str) -> Principal:
        """Return the user of a token, found in a time that does not depend on it. Raises Unauthenticated."""
        if not self.enabled:
            return UNRESTRICTED
        given, found = hash_of(token), None
        for user in self._users.values():
            for stored in user.tokens:
                if hmac.compare_digest(stored, given):
                    found = user
        if found is None:
            raise Unauthenticated("this token is of no user; the operator makes one: qb users add, qb users rotate")
        return found
