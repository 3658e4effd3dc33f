"""What a broker of a cluster must know of its cell: may it answer, and who are the others?"""

from __future__ import annotations

from typing import Any, Protocol

from qb.core.broker.cell_report import CellReport


class Ownership(Protocol):
    """The time in which this broker owns its cell. A broker that is alone has none."""

    cell: str
    epoch: int
    broker: str  # its name
    lease_ttl: float  # seconds
    successor: str  # host:port of the broker that follows, where it is known; else empty

    def check(self) -> None:
        """Return only if this broker may answer now; else the process ends as if it had been killed. Does not block.

        Called at the one place where all doors send, and where a step of the event loop begins.
        """

    def report(self) -> CellReport:
        """Return what is known of the cell. Does not block."""

    async def describe(self) -> dict[str, Any]:
        """Return the answer to the method `cluster`: the report, after a new look."""

    async def move(self, to: str | None) -> None:
        """Begin to give the cell to another broker, the named one if there is a name. Raises BadRequest."""

    def verify(self, *, start: bool, nodes: bool) -> dict[str, Any]:
        """Begin to prove the copies of the cell if none of it goes on, or return how far that is. Does not block."""
