"""One pass over the copies that the NATS nodes have of the journal: all of them are read and compared."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence

import msgspec
import trio

from qb.cluster.scrub.copy_comparison import MOST_FINDINGS, CopyComparison, NodeFinding, without_gap
from qb.cluster.scrub.scrub_pace import ScrubPace
from qb.replication.jetstream.jetstream_api import call
from qb.replication.jetstream.node_reader import NodeReader, open_readers
from qb.replication.journal.journal_store import StoredRecord
from qb.replication.nats.nats_client import NatsClient

BATCH = 256  # records that are asked for at a time
BATCH_BYTES = 2 << 20  # more than the largest record
LOOKS = 3  # that do not find a position before it counts as missing


class NodeProof(msgspec.Struct):
    """What a pass has found about one node."""

    node: str
    records: int = 0  # that were compared
    findings: list[str] = []  # the first hundred
    damaged: int = 0
    note: str = ""  # why not all of it was compared

    @property
    def proves(self) -> bool:
        """Does it say more than the pass before?"""
        return bool(self.damaged) or not self.note


class NodesProof(msgspec.Struct):
    """What a pass has found."""

    first: int
    last: int
    bytes: int = 0
    nodes: list[NodeProof] = []


class NodePass:
    """Belongs to the event loop's thread."""

    def __init__(
        self, client: NatsClient, stream: str, pace: ScrubPace, is_current: Callable[[str], Awaitable[bool]]
    ) -> None:
        """`is_current`: has a node everything, as its leader says? One that has not is not compared further."""
        self._client, self._stream, self._pace, self._is_current = client, stream, pace, is_current
        self._readers: dict[str, NodeReader] = {}
        self._silent: dict[str, int] = {}
        self._proofs: dict[str, NodeProof] = {}

    async def run(self, nodes: Collection[str], first: int, last: int) -> NodesProof:
        """Compare positions `first` to `last` of all nodes."""
        self._proofs = {node: NodeProof(node) for node in nodes}
        proof = NodesProof(first, last, nodes=list(self._proofs.values()))
        comparison = CopyComparison(nodes, first, last)
        try:
            self._readers = await open_readers(self._client, self._stream, nodes, first)
            for node in [each for each in nodes if each not in self._readers]:
                self._leave_out(comparison, node, "it gives no answer")
            while not comparison.is_done:
                await self._advance(comparison, proof)
        finally:
            with trio.CancelScope(shield=True), trio.move_on_after(2):
                for reader in self._readers.values():
                    await reader.close()
        for each in self._proofs.values():
            each.records = max(0, (comparison.compared if not each.note else each.records) - first + 1)
        return proof

    async def _advance(self, comparison: CopyComparison, proof: NodesProof) -> None:
        """Read on where a node holds up the others."""
        for node in comparison.hungry():
            began = trio.current_time()
            expected = comparison.next_of(node)
            records = await self._readers[node].read(min(BATCH, comparison.last - expected + 1), BATCH_BYTES)
            following = without_gap(records, expected)
            if following:
                self._silent[node] = 0
                self._note(comparison.take(node, following))
            else:
                await self._heard_nothing(comparison, node, [each for each in records if each.position > expected])
            if not self._proofs[node].note and (not following or len(following) < len(records)):
                await self._reopen(comparison, node)
            size = sum(len(each.data) for each in records)
            proof.bytes += size
            await trio.sleep(self._pace.pause(size, trio.current_time() - began))

    async def _heard_nothing(self, comparison: CopyComparison, node: str, behind: Sequence[StoredRecord]) -> None:
        """The next position of a node did not come, perhaps others `behind` it. If it never comes it is missing.

        Answers may be lost on their way, so other readers are asked. What was trimmed during the pass is no part of it.
        """
        self._silent[node] = self._silent.get(node, 0) + 1
        if self._silent[node] < LOOKS:
            return
        position = comparison.next_of(node)
        if not await self._is_current(node):
            self._leave_out(comparison, node, f"it is not current, and was compared up to {position - 1}")
            return
        first = await self._first_position()
        if first > position:
            self._note(comparison.begin_at(first))
        else:
            self._note(comparison.take(node, behind) if behind else comparison.skip(node))
        self._silent[node] = LOOKS - 2  # what follows may be missing too: it is asked for twice
        if self._proofs[node].damaged >= MOST_FINDINGS:
            self._leave_out(comparison, node, "it has more damaged records than are listed")

    async def _reopen(self, comparison: CopyComparison, node: str) -> None:
        """Read on with another reader."""
        await self._readers.pop(node).close()
        opened = await open_readers(self._client, self._stream, [node], comparison.next_of(node))
        if node in opened:
            self._readers[node] = opened[node]
        else:
            self._leave_out(comparison, node, "it answers no more")

    async def _first_position(self) -> int:
        """Return where the journal begins now: it may be trimmed during a pass."""
        info = await call(self._client, f"STREAM.INFO.{self._stream}")
        return int(info["state"]["first_seq"])

    def _leave_out(self, comparison: CopyComparison, node: str, note: str) -> None:
        self._proofs[node].note = note
        self._proofs[node].records = comparison.compared
        self._note(comparison.leave_out(node))

    def _note(self, findings: list[NodeFinding]) -> None:
        for each in findings:
            proof = self._proofs[each.node]
            proof.damaged += 1
            if len(proof.findings) < MOST_FINDINGS:
                proof.findings.append(f"position {each.position} {each.what}")
