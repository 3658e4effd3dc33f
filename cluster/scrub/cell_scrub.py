"""Proves the copies of a cell again and again, slowly, and at once when an operator asks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import trio

from qb.cluster.members import Announcement
from qb.cluster.roles import Role
from qb.cluster.scrub.chain_check import answers_due, chain_verdicts, reader_of_nodes
from qb.cluster.scrub.copy_pass import CopyProof, prove_copy
from qb.cluster.scrub.node_pass import NodePass, NodeProof, NodesProof
from qb.cluster.scrub.scrub_pace import ScrubPace
from qb.core.broker.cell_report import JournalState, NodeState
from qb.replication.jetstream.jetstream_api import JetStreamRefused, call
from qb.replication.journal.journal_store import JournalError
from qb.replication.journal.record_chain import ChainPoint
from qb.replication.nats.nats_client import NatsClient
from qb.replication.nats.nats_protocol import NatsError
from qb.storage.faults import keep_running
from qb.storage.log.segment import Segment
from qb.storage.signals import Signal

log = logging.getLogger("qb.cluster")

BETWEEN = 10.0  # seconds between two passes, at least
REACHED_WITHIN = 15.0  # seconds; a follower takes over 4 to begin again behind a silent NATS node, and 1 to say so


class ProvedCell(Protocol):
    """The copy of this broker."""

    @property
    def point(self) -> ChainPoint:
        """How far it has come."""

    def segments(self) -> list[tuple[Segment, int]]:
        """Return its files with messages."""

    async def chains(self, point: ChainPoint, last: int) -> dict[int, int]:
        """Return the checksums of the chain behind a point. Raises JournalError."""


class CellVerification(msgspec.Struct):
    """What a verification has found; `running` while it goes on."""

    broker: str
    running: bool = True
    copy: CopyProof | None = None
    brokers: dict[str, str] = {}  # has each of them applied the same chain?
    position: int = 0  # up to which they were compared
    nodes: NodesProof | None = None
    trouble: str = ""  # why it could not be finished


class CellScrub:
    """Belongs to the event loop's thread."""

    def __init__(
        self,
        client: NatsClient,
        stream: str,
        broker: str,
        rate: int,
        journal: Callable[[], JournalState],
        others: Callable[[], Sequence[Announcement]],
        role: Callable[[], Role],
    ) -> None:
        """`journal`: how its nodes are now; `others`: what the other brokers that are there have said; `role`: ours."""
        self.cell: ProvedCell | None = None  # once it is open
        self.damaged_nodes: Mapping[str, int] = {}  # by the newest pass of this broker
        self.damaged_files = 0
        self._client, self._stream, self._broker, self._rate = client, stream, broker, rate
        self._journal, self._others, self._role = journal, others, role
        self._asked = Signal()
        self._wants_nodes = False
        self._verification = CellVerification(broker, running=False)

    # In the background

    async def run(self) -> None:
        """Prove, for ever."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keep_running, "verifying the cell", self._verify_when_asked)
            if self._rate:
                nursery.start_soon(keep_running, "the scrub of this copy", self._scrub_copy)
                nursery.start_soon(keep_running, "the scrub of the NATS nodes", self._scrub_nodes)

    async def _scrub_copy(self) -> None:
        while True:
            await trio.sleep(BETWEEN)
            if self.cell is not None:
                self._take_copy(await prove_copy(self.cell.segments(), ScrubPace(self._rate)))

    async def _scrub_nodes(self) -> None:
        while True:
            await trio.sleep(BETWEEN)
            if self.cell is not None and self._is_my_turn():
                try:
                    self._take_nodes(await self._prove_nodes(ScrubPace(self._rate)))
                except (NatsError, JetStreamRefused, trio.TooSlowError) as error:
                    log.info("a pass over the NATS nodes was not finished: %s", error)

    def _is_my_turn(self) -> bool:
        """One broker reads all nodes: of those that are there the first by name that does not own the cell."""
        return self._broker == reader_of_nodes(self._role(), self._broker, self._others())

    def _take_copy(self, proof: CopyProof) -> None:
        for finding in proof.findings if proof.damaged > self.damaged_files else ():
            log.error("this broker's copy is damaged: %s; see: qb cluster repair %s", finding, self._broker)
        self.damaged_files = proof.damaged

    def _take_nodes(self, proof: NodesProof) -> None:
        before = self.damaged_nodes
        for each in proof.nodes:
            if each.damaged > before.get(each.node, 0):
                log.error("NATS node %s: %s; see: qb cluster repair %s", each.node, each.findings[0], each.node)
        self.damaged_nodes = {**before, **{each.node: each.damaged for each in proof.nodes if each.proves}}

    # At once

    def verify(self, *, start: bool, nodes: bool) -> dict[str, Any]:
        """Begin a verification if none goes on and `start` is set; return how it stands. `nodes`: those of NATS too."""
        if start and not self._verification.running:
            self._verification, self._wants_nodes = CellVerification(self._broker), nodes
            self._asked.set()
        found: dict[str, Any] = msgspec.to_builtins(self._verification)
        return found

    async def _verify_when_asked(self) -> None:
        while True:
            while not self._verification.running:
                await self._asked.wait()
            try:
                await self._verify(self._verification)
            except (NatsError, JetStreamRefused, JournalError, trio.TooSlowError) as error:
                self._verification.trouble = str(error) or "NATS does not answer"
            except Exception:
                self._verification.trouble = "internal error; the broker's log has the details"
                raise
            finally:
                self._verification.running = False

    async def _verify(self, verification: CellVerification) -> None:
        if self.cell is None:
            verification.trouble = "the copy of this broker is not open yet"
            return
        verification.copy = await prove_copy(self.cell.segments(), ScrubPace())
        self._take_copy(verification.copy)
        if self._wants_nodes:
            await self._compare_brokers(verification, self.cell)
            verification.nodes = await self._prove_nodes(ScrubPace())
            self._take_nodes(verification.nodes)

    async def _compare_brokers(self, verification: CellVerification, cell: ProvedCell) -> None:
        """Have all brokers applied the same records? Each says its checksum at its own position."""
        point = cell.point
        others, silent = await heard_behind(point, self._others)
        verification.position = max([point.position, *(each.applied for each in others)])
        chains = await cell.chains(point, verification.position)
        verification.brokers = {self._broker: "same", **chain_verdicts(point, chains, others, silent)}

    async def _prove_nodes(self, pace: ScrubPace) -> NodesProof:
        assert self.cell is not None
        state = (await call(self._client, f"STREAM.INFO.{self._stream}"))["state"]
        nodes = [each.name for each in self._journal().nodes if each.state is not NodeState.AWAY]
        last = min(state["last_seq"], self.cell.point.position)
        proof = await NodePass(self._client, self._stream, pace, self._is_current).run(nodes, state["first_seq"], last)
        for each in self._journal().nodes:
            if each.name not in nodes:
                proof.nodes.append(NodeProof(each.name, note=each.why))
        return proof

    async def _is_current(self, node: str) -> bool:
        return any(each.name == node and each.state is not NodeState.LAGS for each in self._journal().nodes)


async def heard_behind(
    point: ChainPoint, others: Callable[[], Sequence[Announcement]]
) -> tuple[Sequence[Announcement], Sequence[str]]:
    """Return what the others say when all have come to a point, and who has fallen silent: followers lag in use.

    One that does not come to it in time says where it stays.
    """
    names = {each.name for each in others()}
    with trio.move_on_after(REACHED_WITHIN):
        while answers_due(point, names, others()):
            await trio.sleep(0.1)  # each says so once a second
            names |= {each.name for each in others()}
    heard = others()
    return heard, sorted(names - {each.name for each in heard})
