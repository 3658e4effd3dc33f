"""What a broker of a cluster must know of its cell: may it answer, and who are the others?"""

from __future__ import annotations

from typing import Any, Protocol


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

    async def describe(self) -> dict[str, Any]:
        """Return the answer to the method `cluster`."""

    async def move(self, to: str | None) -> None:
        """Begin to give the cell to another broker, the named one if there is a name. Raises BadRequest."""
