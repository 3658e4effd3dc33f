"""What this broker knows of its cell: its own state, and what the others announce."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import trio

from qb.cluster.health.journal_watch import JournalWatch
from qb.cluster.health.nats_monitor import NatsMonitor
from qb.cluster.health.node_health import spare_nodes, verdict
from qb.cluster.members import Announcement, Members
from qb.cluster.roles import Role, RoleEvent, next_role
from qb.cluster.scrub.cell_scrub import CellScrub
from qb.core.broker.cell_report import CellBroker, CellReport
from qb.core.wire.errors import JournalLost, NotOwner
from qb.core.wire.version import __version__
from qb.replication.journal.record_chain import ChainPoint
from qb.replication.nats.nats_client import NatsClient
from qb.replication.nats.nats_protocol import NatsMessage
from qb.storage.signals import Signal

INTERVAL = 1.0  # seconds between two announcements


class FollowedCell(Protocol):
    """The copy of the cell that this broker keeps."""

    @property
    def point(self) -> ChainPoint:
        """How far it goes."""


class CellView:
    """The members of one cell. Belongs to the event loop's thread; `run()` announces and listens."""

    def __init__(
        self,
        client: NatsClient,
        cell: str,
        stream: str,
        name: str,
        address: str,
        cluster_address: str,
        patience: float,
        monitors: Sequence[NatsMonitor] = (),
        scrub_rate: int = 0,
    ) -> None:
        """`patience`: seconds for which a silent owner is named; `scrub_rate`: bytes a second, 0: none."""
        self.cell, self.name, self.address, self.cluster_address = cell, name, address, cluster_address
        self.role = Role.FOLLOWER
        self.copy: FollowedCell | None = None  # once it is open
        self.changed = Signal()  # another owner, or none
        self.lost = ""  # why nothing can be answered before an operator has restored the journal
        self.journal = JournalWatch(client, stream, monitors)
        self.scrub = CellScrub(
            client, stream, name, scrub_rate, lambda: self.journal.state, self.others, lambda: self.role
        )
        self._client, self._subject = client, f"qb-brokers.{cell}"
        self._members = Members(patience)
        self._news = Signal()

    # Telling and hearing

    async def run(self) -> None:
        """Announce this broker, and hear the others, for ever."""
        self._client.subscribe(self._subject, self._heard)
        while True:
            self._announce()
            with trio.move_on_after(INTERVAL):
                await self._news.wait()

    def advance(self, event: RoleEvent) -> None:
        """This broker has another role now."""
        self.role = next_role(self.role, event)
        self._announce()
        self._news.set()

    def _announce(self) -> None:
        point = self.copy.point if self.copy is not None else ChainPoint()
        said = Announcement(
            self.name,
            self.address,
            self.cluster_address,
            self.role,
            point.epoch,
            point.position,
            __version__,
            os.getpid(),
            point.chain,
            self.scrub.damaged_files,
            dict(self.scrub.damaged_nodes),
        )
        self._take(said)
        self._client.publish(self._subject, msgspec.json.encode(said))

    def _heard(self, message: NatsMessage) -> None:
        try:
            said = msgspec.json.decode(message.payload, type=Announcement)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return
        if said.name != self.name:
            self._take(said)

    def _take(self, said: Announcement) -> None:
        if self._members.hear(trio.current_time(), said):
            self.changed.set()
        present = self._members.present(trio.current_time())
        self.journal.damaged = _highest(each.damaged_nodes for each in present)

    # Asking

    def others(self) -> list[Announcement]:
        """Return what the other brokers say that are there."""
        return [each for each in self._members.present(trio.current_time()) if each.name != self.name]

    def owner(self) -> Announcement | None:
        """Return who says that it owns the cell. It may be mistaken: then it refuses."""
        return self._members.owner(trio.current_time())

    @property
    def epoch(self) -> int:
        """The highest epoch that is known."""
        return self._members.epoch()

    def gone(self, cluster_address: str) -> None:
        """The process with this cluster port has ended."""
        self._members.gone(trio.current_time(), cluster_address)

    def named(self, name: str) -> Announcement | None:
        """Return what the broker of this name has said last."""
        return self._members.named(name)

    async def wait_for(self, found: Callable[[], Announcement | None], seconds: float) -> Announcement | None:
        """Return what is found now, or within so many seconds; else None."""
        with trio.move_on_after(seconds):
            while (each := found()) is None:
                await self.changed.wait()
            return each
        return None

    def report(self) -> CellReport:
        """Return what is known of the cell; of the NATS nodes what the last look has found."""
        owner, journal = self.owner(), self.journal.state
        return CellReport(
            cell=self.cell,
            broker=self.name,
            role=self.role,
            lost=self.lost,
            owner=owner.name if owner is not None else None,
            epoch=self.epoch,
            brokers=msgspec.convert(self._members.listed(trio.current_time()), list[CellBroker]),
            journal=journal,
            verdict=verdict(journal),
            spare_nodes=spare_nodes(journal),
        )

    def lose(self, why: str) -> None:
        """The journal has lost records: this broker says so, and does nothing else any more."""
        self.lost = why
        self.advance(RoleEvent.LOST)

    def refusal(self) -> NotOwner | JournalLost:
        """Return why this broker does not answer a request itself."""
        if self.lost:
            return JournalLost(self.cell, self.lost)
        owner = self.owner()
        return NotOwner(self.cell, owner.address if owner is not None else "", self.epoch)

    def unready(self) -> str:
        """Return why this follower cannot pass peers on to the owner; empty if it can."""
        if self.lost:
            return f"JOURNAL_LOST: {self.lost}"
        return "" if self.owner() is not None else "no broker owns the cell just now"

    async def describe(self) -> dict[str, Any]:
        """Return the answer to the method `cluster`: the report, after a new look at the NATS nodes."""
        await self.journal.look()
        found: dict[str, Any] = msgspec.to_builtins(self.report())
        return found


def _highest(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the highest number by name."""
    found: dict[str, int] = {}
    for each in counts:
        for name, number in each.items():
            found[name] = max(number, found.get(name, 0))
    return found
