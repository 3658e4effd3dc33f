"""Users that a broker keeps in its metadata: an entry for each user and each address, with its line of a users file."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from qb.core.rights.address_quotas import AddressQuotas
from qb.core.rights.principals import Principal
from qb.core.rights.users_file import (
    BadWord,
    UsersFile,
    line_of,
    line_of_address,
    parse_address_quotas,
    parse_user,
)

log = logging.getLogger("qb.users")

PREFIX = "access/"
USER, ADDRESS = f"{PREFIX}user/", f"{PREFIX}address/"
MOST_USERS = 10_000  # users and addresses that the metadata holds
MOST_LINE = 4_096  # characters of what is allowed to one of them


def key_of(name: str) -> str:
    """Return where a user is kept."""
    return USER + name


def key_of_address(address: AddressQuotas) -> str:
    """Return where the quotas of an address are kept."""
    return f"{ADDRESS}{address.parsed or '*'}"


def entries_of(known: UsersFile) -> dict[str, str]:
    """Return the entries that make these users."""
    users = {key_of(user.name): line_of(user) for user in known.users.values()}
    return users | {key_of_address(address): line_of_address(address) for address in known.addresses}


class StoredUsers:
    """The users that the entries make, brought on change by change."""

    def __init__(self, replace: Callable[[UsersFile], None]) -> None:
        """`replace` is called with all users after each change."""
        self._replace = replace
        self._users: dict[str, Principal] = {}
        self._addresses: dict[str, AddressQuotas] = {}

    def take(self, changed: Mapping[str, Any | None]) -> None:
        """Have these entries be as they are now; None: gone. One that cannot be read allows nothing."""
        for key, line in changed.items():
            self._users.pop(key.removeprefix(USER), None)
            self._addresses.pop(key, None)
            if line is not None:
                try:
                    self._take_line(key, str(line))
                except BadWord as error:  # such as a word that a later version has written
                    log.error("%s cannot be read, so nothing is allowed by it: %s", key, error)
        self._replace(UsersFile(dict(self._users), tuple(self._addresses.values())))

    def _take_line(self, key: str, line: str) -> None:
        if key.startswith(USER):
            user = parse_user(line.split())
            self._users[user.name] = user
        else:
            self._addresses[key] = parse_address_quotas(line.split())
