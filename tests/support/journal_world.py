"""Owners of a journal in a world of faults: lost, late and doubled answers, stale reads, pauses, partitions, kills.

No clock and no I/O: one heap of events, drawn from a seed. The rules of the journal that run here are the real ones.
"""

from __future__ import annotations

import heapq
import itertools
import random
import struct
from collections import Counter
from collections.abc import Callable
from functools import partial
from zlib import crc32

import trio

from qb.replication.journal.journal_records import JournalRecord, JournalRecordKind, decode, decode_fence
from qb.replication.journal.journal_store import JournalError, StoredRecord
from qb.replication.journal.journal_writer import JournalWriter
from qb.replication.journal.memory_store import NO_FAULTS, MemoryStore, MemoryStream, NetworkFaults
from qb.replication.journal.record_chain import ChainPoint, ChainReader, ValidRecord
from qb.replication.journal.takeover import TakenOver
from qb.storage.signals import Signal

STORM = 12.0  # seconds of faults
CALM = 20.0  # seconds without, in which everything must be settled


class World:
    """The clock of everything that is not inside a process."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), call))

    def run(self, until: float) -> None:
        """Let everything happen that is due by then."""
        while self._events and self._events[0][0] <= until:
            self.now, _, call = heapq.heappop(self._events)
            call()
        self.now = until


class EagerWorld(World):
    """A world whose time passes as quickly as the tasks beside it let it."""

    def __init__(self) -> None:
        super().__init__()
        self._more = Signal()

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        super().call_later(seconds, call)
        self._more.set()

    async def pass_time(self) -> None:
        """Let one event after the other happen, until it is cancelled."""
        while True:
            await trio.lowlevel.checkpoint()
            if self._events:
                self.run(self._events[0][0])
            else:
                await self._more.wait()


class Process:
    """The timers of one process: they wait while it is stopped, and end with it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._due: list[Callable[[], None]] = []
        self.is_stopped = False
        self.is_dead = False

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        self._world.call_later(seconds, partial(self._run, call))

    def _run(self, call: Callable[[], None]) -> None:
        if self.is_stopped:
            self._due.append(call)
        elif not self.is_dead:
            call()

    def go_on(self) -> None:
        """As SIGCONT: everything that fell due meanwhile happens now."""
        self.is_stopped = False
        due, self._due = self._due, []
        for call in due:
            self._run(call)


class Owner:
    """A process that appends as long as it may."""

    def __init__(self, story: JournalStory, number: int) -> None:
        self.name = f"owner-{number}"
        self._story = story
        self.process = Process(story.world)
        draw = random.Random(story.draw.random())
        self.window = draw.choice((1, 3, story.window, story.window))
        self.store = MemoryStore(
            story.stream, self.process, network=story.world, faults=story.faults, draw=draw, most_bytes=200
        )
        self.writer = JournalWriter(self.store, self.process, self.name, window=self.window, draw=draw)
        self.outcome: TakenOver | JournalError | None = None
        self.appended: list[bytes] = []
        self.acked: dict[bytes, int] = {}

    def take_over(self) -> None:
        self.process.call_later(0, partial(self.writer.take_over, ChainPoint(), self._taken))

    def _taken(self, outcome: TakenOver | JournalError) -> None:
        self.outcome = outcome
        if isinstance(outcome, TakenOver):
            self._work()

    def _work(self) -> None:
        """Keep the window full, with a large payload now and then."""
        if self.writer.failure is not None or not self._story.is_busy:
            return
        while self.writer.in_flight < self.window + 2:
            self.append()
        self.process.call_later(self._story.draw.uniform(0.001, 0.3 if self._story.is_stormy else 3), self._work)

    def append(self) -> None:
        number = len(self.appended)
        payload = f"{self.name}:{number}:".encode() + b"x" * (self._story.draw.choice((5, 5, 5, 400)))
        self.appended.append(payload)
        self.writer.append(payload, partial(self._committed, payload))

    def _committed(self, payload: bytes, outcome: int | JournalError) -> None:
        if isinstance(outcome, int):
            assert payload not in self.acked
            self.acked[payload] = outcome


class JournalStory:
    """One seed: owners come and go in a storm, then one takes over in calm weather."""

    def __init__(
        self, seed: int, *, window: int = 8, faults: NetworkFaults | None = None, foreign: bool = False
    ) -> None:
        self.draw = random.Random(seed)
        self.world, self.stream = World(), MemoryStream()
        self.window = window
        self.faults = self._drawn_faults() if faults is None else faults
        self.is_busy = self.is_stormy = True
        self.owners: list[Owner] = []
        self.takeovers = 0
        self._foreign, self._torn = foreign, self.faults.torn_batch > 0

    def _drawn_faults(self) -> NetworkFaults:
        def some(most: float) -> float:
            return self.draw.choice((0.0, self.draw.uniform(0, most)))

        return NetworkFaults(
            lost_request=some(0.1),
            lost_answer=some(0.1),
            late=some(0.2),
            doubled=some(0.2),
            stale_read=some(0.3),
            stale_refusal=some(0.1),
        )

    def run(self) -> JournalStory:
        """Play it, and check everything that must hold."""
        self._start_owner()
        for _ in range(self.draw.randrange(4, 12)):
            self.world.run(self.world.now + self.draw.expovariate(10 / STORM))
            self.draw.choice((self._start_owner, self._stop_owner, self._cut_off, self._kill, self._interfere))()
        self.world.run(self.world.now + self.draw.uniform(0.5, 4))
        self._calm_down()
        return self

    def _start_owner(self) -> None:
        self.owners.append(Owner(self, len(self.owners)))
        self.takeovers += 1
        self.owners[-1].take_over()

    def _stop_owner(self) -> None:
        """As SIGSTOP and later SIGCONT; a takeover is likely meanwhile."""
        process = self.draw.choice(self.owners).process
        process.is_stopped = True
        self.world.call_later(self.draw.uniform(0.1, 8), process.go_on)
        if self.draw.random() < 0.7:
            self._start_owner()

    def _cut_off(self) -> None:
        store = self.draw.choice(self.owners).store
        store.is_cut_off = True
        self.world.call_later(self.draw.uniform(0.1, 8), store.reconnect)

    def _kill(self) -> None:
        self.draw.choice(self.owners).process.is_dead = True

    def _interfere(self) -> None:
        """A program that is no broker of ours writes into the stream."""
        if self._foreign:
            self.stream.add(b"not a record of the journal")

    def _calm_down(self) -> None:
        self.is_stormy = False
        for owner in self.owners:
            owner.store.faults = NO_FAULTS
            owner.store.reconnect()
            owner.process.go_on()
        self.faults = NO_FAULTS
        self.world.run(self.world.now + CALM / 2)
        self.is_busy = False
        self._start_owner()
        last = self.owners[-1]
        self.world.run(self.world.now + 2)
        assert isinstance(last.outcome, TakenOver), f"the last takeover ended with {last.outcome!r}"
        for _ in range(20):
            last.append()
        self.world.run(self.world.now + CALM / 2)
        assert list(last.acked) == last.appended, "an owner in calm weather does not get on"
        self.check()

    def check(self) -> None:
        """The invariants of docs/CLUSTER.md that a journal alone can break."""
        valid = self.valid_records()
        whole = payloads(valid)
        twice = [payload for payload, count in Counter(payload for _, payload in whole).items() if count > 1]
        assert not twice, f"stored twice: {twice}"
        where = {payload: position for position, payload in whole}
        for owner in self.owners:
            lost = {payload: at for payload, at in owner.acked.items() if where.get(payload) != at}
            assert not lost, f"acknowledged and not there: {lost}"
            mine = [payload for _, payload in whole if payload in set(owner.appended)]
            assert mine == [payload for payload in owner.appended if payload in where], "out of order"
        if not self._foreign:
            epoch = check_fences(self.stream)
            assert self._torn or epoch <= self.takeovers, "an owner had to fence itself anew"

    def valid_records(self) -> list[ValidRecord]:
        """Read the journal as a reader does that comes early and reads in pieces, and as one that comes late."""
        records = [StoredRecord(position, data) for position, data in self.stream.records.items()]
        late, early = ChainReader(ChainPoint()), ChainReader(ChainPoint())
        valid = late.take(records)
        found: list[ValidRecord] = []
        for each in records:
            found += early.take((each,))
            if self.draw.random() < 0.01:
                resumed = ChainReader(early.point)
                resumed.take((each,))
                early = resumed
        assert found == valid
        assert early.point == late.point
        return valid


def check_fences(stream: MemoryStream) -> int:
    """No record of an older epoch is stored behind a whole fence; returns the epoch of the last one."""
    epoch = 0
    for position, data in stream.records.items():
        record = decode(data)
        assert record is not None
        assert record.epoch >= epoch, f"a record of epoch {record.epoch} at {position}, behind the fence of {epoch}"
        fence = decode_fence(record.payload) if record.kind is JournalRecordKind.FENCE else None
        if fence is not None and fence.index == fence.count - 1:
            epoch = record.epoch
    return epoch


def of_a_version(version: int, kind: int, record: JournalRecord) -> bytes:
    """Return a record as that version would have written it: the head and its checksum are the same in all."""
    head = b"QJ" + struct.pack(">BBQQQ", version, kind, record.epoch, record.writer, record.previous)
    return head + struct.pack(">I", crc32(head + record.payload)) + record.payload


def payloads(valid: list[ValidRecord]) -> list[tuple[int, bytes]]:
    """Return every whole payload with the position of its last piece."""
    found, pieces = [], b""
    for position, record in valid:
        if record.kind is JournalRecordKind.FENCE:
            pieces = b""
            continue
        pieces += record.payload
        if record.kind is not JournalRecordKind.PART:
            found.append((position, pieces))
            pieces = b""
    return found
