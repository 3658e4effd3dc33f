"""A cell of real brokers as its brokers describe it, however they were started."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from qb.cli.cluster.cell_questions import ask
from qb.clients.credentials import Credentials
from qb.clients.protocol.client_errors import RequestRefused
from qb.core.wire.addresses import parse_address
from qb.core.wire.errors import BrokerError
from tests.support.waiting import LIMIT, wait_until


class RunningCell(Protocol):
    """What is asked of the brokers of a cell; the processes are the business of who implements it."""

    credentials = Credentials()

    @property
    def servers(self) -> Sequence[str]:
        """The addresses of all brokers."""

    def pids(self) -> Sequence[int]:
        """The process ids of all that run."""

    def answers(self) -> list[dict[str, Any]]:
        """Return what each broker says that answers."""
        found: list[dict[str, Any]] = []
        for server in self.servers:
            try:
                found.append(ask(parse_address(server), self.credentials))
            except (OSError, BrokerError, RequestRefused):  # such as one that does not know its users yet
                continue
        return found

    def status(self) -> dict[str, Any]:
        """Return what the broker says that knows the newest epoch."""
        return max(self.answers(), key=lambda each: (each["epoch"], each["owner"] is not None), default=NO_ANSWER)

    def owner(self) -> str:
        """Return the name of the owner, once there is one."""
        return str(self.wait_for_owner(0)["owner"])

    def wait_for_owner(self, epoch: int, seconds: float = LIMIT) -> dict[str, Any]:
        """Return the status when the cell has an owner with at least this epoch."""
        found: dict[str, Any] = {}

        def is_there() -> bool:
            nonlocal found
            found = self.status()
            return found["owner"] is not None and found["epoch"] >= epoch

        wait_until(is_there, seconds)
        return found

    def wait_until_whole(self, seconds: float = 45.0) -> None:
        """Return when all brokers follow closely, and NATS has all nodes, which have everything."""

        def whole() -> bool:
            found = self.answers()
            if len(found) < len(self.servers) or any(each["owner"] is None for each in found):
                return False
            pids = self.pids()
            seen = [broker for each in found for broker in each["brokers"]]
            return (
                all(broker["pid"] in pids and broker["lag"] is not None and broker["applied"] for broker in seen)
                and len(seen) == len(found) ** 2
                and all(each["journal"]["nodes"] for each in found)
                and all(node["current"] for each in found for node in each["journal"]["nodes"])
            )

        wait_until(whole, seconds)


NO_ANSWER: dict[str, Any] = {"owner": None, "epoch": 0}
