"""Where brokers are: `qb://host:port`, `qbs://user@host:port` with TLS, and their shorter forms."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 9999
_FORM = re.compile(
    r"(?:qb://|(?P<tls>qbs://)(?:(?P<user>[A-Za-z0-9._-]{1,100})@)?)?(?:\[(?P<v6>[0-9A-Fa-f:.]+(?:%\w+)?)\]|(?P<host>[^\[\]/:@\s]+))(?::(?P<port>\d{1,5}))?/?"
)


class BrokerAddress(NamedTuple):
    """One broker."""

    host: str
    port: int

    @property
    def is_secure(self) -> bool:
        """Is the connection to it encrypted?"""
        return False

    @property
    def user(self) -> str:
        """The user whose token is looked up in a file with several of them; empty: the only one."""
        return ""

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class SecureAddress(BrokerAddress):
    """One broker that speaks TLS."""

    _user = ""

    @property
    def is_secure(self) -> bool:
        return True

    @property
    def user(self) -> str:
        return self._user

    def of_user(self, user: str) -> SecureAddress:
        """Return the same address with a user."""
        self._user = user
        return self

    def __str__(self) -> str:
        return f"qbs://{self._user}@{super().__str__()}" if self._user else f"qbs://{super().__str__()}"


def parse_address(text: str, port: int | None = None) -> BrokerAddress:
    """Read `qb://host:port`, `host:port`, `host`, or an IPv6 address; with a `port` the text must have none.

    Raises ValueError.
    """
    if text.count(":") > 1 and re.fullmatch(r"[0-9A-Fa-f:.]+(%\w+)?", text):  # a bare IPv6 address
        return BrokerAddress(text, DEFAULT_PORT if port is None else port)
    found = _FORM.fullmatch(text)
    if found is None:
        raise ValueError(
            f"{text!r} is no address of a broker: write host, host:port, qb://host:port or qbs://host:port"
        )
    if found["port"] is not None and port is not None:
        raise ValueError(f"{text!r} has a port already: leave the argument port away")
    given = port if found["port"] is None else int(found["port"])
    where = found["v6"] or found["host"], DEFAULT_PORT if given is None else given
    return SecureAddress(*where).of_user(found["user"] or "") if found["tls"] else BrokerAddress(*where)


def addresses_of(host: str, port: int | None, servers: Sequence[str]) -> tuple[BrokerAddress, ...]:
    """Return the brokers that the arguments of a client name. Raises ValueError, TypeError."""
    if isinstance(servers, str):
        raise TypeError("the argument servers is a list of addresses, not one text")
    if servers and (host, port) != (DEFAULT_HOST, None):
        raise ValueError("the argument servers is in place of host and port: give one of them")
    return tuple(parse_address(each) for each in servers) or (parse_address(host, port),)


def like(other: BrokerAddress, text: str) -> BrokerAddress:
    """Read the address of another broker of the same cluster: with TLS and the user of this one. Raises ValueError."""
    host, port = parse_address(text)
    return SecureAddress(host, port).of_user(other.user) if other.is_secure else BrokerAddress(host, port)
