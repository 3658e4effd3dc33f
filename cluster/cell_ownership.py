"""The time in which this broker owns the cell, and the one check that no stale owner answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import trio

from qb.cluster.cell_view import CellView
from qb.core.broker.cell_report import CellReport
from qb.core.wire.errors import BadRequest
from qb.replication.lease.lease_keeper import LeaseKeeper


class CellOwnership:
    """Implements qb.core.broker.ownership.Ownership; what its methods promise stands there."""

    def __init__(
        self,
        view: CellView,
        keeper: LeaseKeeper,
        epoch: int,
        lease_ttl: float,
        stop: trio.Event,
        end: Callable[[str], NoReturn],
    ) -> None:
        """`end` ends the process as if it had been killed; `stop` is set when the cell is to be given away."""
        self.cell, self.broker, self.epoch, self.lease_ttl = view.cell, view.name, epoch, lease_ttl
        self.successor = self.successor_name = ""
        self.is_moving = False
        self._view, self._keeper, self._stop, self._end = view, keeper, stop, end

    def check(self) -> None:
        if not self._keeper.may_answer():
            self._end("the lease has run out")

    async def watch(self) -> None:
        """Check now and then, for ever: an owner without peers must notice too."""
        while True:
            self.check()
            await trio.sleep(self.lease_ttl / 20)

    def report(self) -> CellReport:
        return self._view.report()

    async def describe(self) -> dict[str, Any]:
        return await self._view.describe()

    async def move(self, to: str | None) -> None:
        if to is not None:
            other = self._view.named(to)
            if other is None:
                raise BadRequest(f"there is no broker {to!r} in the cell {self.cell}; see: qb cluster status")
            if to == self.broker:
                raise BadRequest(f"{to} owns the cell already")
            self.successor, self.successor_name = other.address, to
        self.is_moving = True
        self._stop.set()

    def verify(self, *, start: bool, nodes: bool) -> dict[str, Any]:
        return self._view.scrub.verify(start=start, nodes=nodes)
