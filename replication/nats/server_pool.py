"""Which NATS server is tried next: those that were given, and those that the cluster has named."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from qb.replication.nats.nats_protocol import NatsCredentials

PAUSES = (0.0, 0.05, 0.1, 0.2, 0.5, 1.0)  # seconds before a round through all servers
PORT = 4222


class NatsAddress(NamedTuple):
    """Where a server listens."""

    host: str
    port: int
    tls: bool = False

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'tls' if self.tls else 'nats'}://{host}:{self.port}"


def parse_address(text: str) -> tuple[NatsAddress, NatsCredentials]:
    """Return the address and the credentials of `nats://user:password@host:4222`, `tls://token@host` or `host:4222`.

    Raises ValueError.
    """
    parts = urlsplit(text if "://" in text else f"nats://{text}")
    if parts.scheme not in ("nats", "tls") or not parts.hostname or parts.path.strip("/"):
        raise ValueError(f"{text!r} is not the address of a NATS server; write nats://host:4222 or tls://host:4222")
    user, password = unquote(parts.username or ""), unquote(parts.password or "")
    credentials = NatsCredentials(user, password) if password else NatsCredentials(token=user)
    return NatsAddress(parts.hostname, parts.port or PORT, parts.scheme == "tls"), credentials


class ServerPool:
    """All servers, in the order in which they are tried. The one that is connected comes last when it is lost."""

    def __init__(self, given: Iterable[NatsAddress]) -> None:
        self._given = tuple(given)
        if not self._given:
            raise ValueError("name at least one NATS server, as in nats://127.0.0.1:4222")
        self._order = list(self._given)
        self._failures = 0  # in a row

    def next(self) -> tuple[NatsAddress, float]:
        """Return the server to try now, and how many seconds to wait before."""
        rounds, within = divmod(self._failures, len(self._order))
        pause = PAUSES[min(rounds, len(PAUSES) - 1)] if within == 0 else 0.0
        address = self._order.pop(0)
        self._order.append(address)
        self._failures += 1
        return address, pause

    def connected(self) -> None:
        """The server that was tried last works."""
        self._failures = 0

    def discovered(self, urls: Iterable[str]) -> None:
        """The cluster names its servers. Those that were given stay, others come and go with what it says."""
        tls = any(each.tls for each in self._given)
        named = [parse_address(url)[0]._replace(tls=tls) for url in urls]
        known = {*named, *self._given}
        self._order = [each for each in self._order if each in known]
        self._order[:0] = [each for each in dict.fromkeys(named) if each not in self._order]
