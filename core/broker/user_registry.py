"""The users that are metadata, and their changes by command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import trio

from qb.core.pacing import portions
from qb.core.rights.address_quotas import AddressQuotas
from qb.core.rights.known_users import KnownUsers
from qb.core.rights.principals import Principal
from qb.core.rights.stored_users import (
    MOST_LINE,
    MOST_USERS,
    PREFIX,
    StoredUsers,
    entries_of,
    key_of,
    key_of_address,
)
from qb.core.rights.user_changes import added, check_admin_remains, found, rotated
from qb.core.rights.users_file import (
    BadWord,
    UsersFile,
    described,
    line_of,
    line_of_address,
    parse_address_quotas,
    read_users,
)
from qb.core.wire.errors import BadRequest
from qb.storage.engine import Metadata

FROM_FILE = "the users of this broker are in a file on its machine: qb users … --file FILE there, then kill -HUP PID"


def watch_users(metadata: Metadata, users: KnownUsers) -> None:
    """Have the users that the metadata keeps be in force, from now on."""
    metadata.watch(PREFIX, StoredUsers(users.replace).take)


class UserRegistry:
    """Changes the users in the metadata; watch_users() has them be in force before a change is answered.

    All changes are for admins. One is made after another.
    """

    def __init__(self, metadata: Metadata, users: KnownUsers) -> None:
        self._metadata, self._users = metadata, users
        self._changing = trio.Lock()

    async def begin(self, path: str) -> None:
        """Make the users of a file the first ones, if there are none. Raises UsersFileError."""
        if path and not self._users.known.users:
            await self._metadata.put_all(entries_of(read_users(path)))

    async def list_all(self) -> list[dict[str, str]]:
        """Return the users and the quotas of addresses, without their credentials."""
        known = self._users.known
        each_of: list[Principal | AddressQuotas] = [known.users[name] for name in sorted(known.users)]
        each_of += known.addresses
        parts = portions(each_of)
        return [described(each) async for part in parts for each in part]

    async def add(self, name: str, words: list[str]) -> None:
        """Make a user of words as in a users file. Raises BadRequest."""
        async with self._changing:
            with self._refusing() as known:
                user = added(known, name, words)
                check_admin_remains([*known.users.values(), user])
                _check_count(known)
                entry = _short(line_of(user))
            await self._metadata.put(key_of(name), entry)

    async def rotate(self, name: str, sha256: str, keep_old: bool = False) -> None:
        """Give a user the token with this hash. Raises BadRequest."""
        async with self._changing:
            with self._refusing() as known:
                user = rotated(known, name, sha256, keep_old=keep_old)
            await self._metadata.put(key_of(name), line_of(user))

    async def remove(self, name: str) -> None:
        """Let there be no such user any more. Raises BadRequest, also for the last admin."""
        async with self._changing:
            with self._refusing() as known:
                gone = found(known, name)
                check_admin_remains([user for user in known.users.values() if user != gone])
            await self._metadata.delete(key_of(name))

    async def limit_address(self, network: str, limits: list[str]) -> None:
        """Give each address of a network these quotas; none: no line of its own. Raises BadRequest."""
        async with self._changing:
            with self._refusing() as known:
                check_admin_remains([*known.users.values()])
                _check_count(known)
                parsed = parse_address_quotas(["address", network, *(limits or ["connections:1"])])
                values: dict[str, Any] = {
                    key_of_address(parsed): _short(line_of_address(parsed)) if limits else None,
                }
            await self._metadata.put_all(values)

    @contextmanager
    def _refusing(self) -> Iterator[UsersFile]:
        """Give the users that there are, and have a word that cannot be taken refuse the request."""
        if self._users.are_from_file:
            raise BadRequest(FROM_FILE)
        try:
            yield self._users.known
        except BadWord as error:
            raise BadRequest(str(error)) from None


def _check_count(known: UsersFile) -> None:
    if len(known.users) + len(known.addresses) >= MOST_USERS:
        raise BadWord(f"there are {MOST_USERS} users and addresses already, which is the most")


def _short(line: str) -> str:
    if len(line) > MOST_LINE:
        raise BadWord(f"its rights and quotas have {len(line)} characters, and at most {MOST_LINE} are taken")
    return line
