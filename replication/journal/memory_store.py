"""A journal's store in memory, with the faults of a network: for tests and simulations.

`MemoryStream` is what all brokers share. `MemoryStore` is the connection of one broker to it.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import trio

from qb.replication.journal.journal_store import Answer, Answered, Found, StoredRecord, Timers

TIME_OUT = 2.0  # seconds after which a write or a read is answered with "unknown"


class NetworkFaults(msgspec.Struct, frozen=True, kw_only=True):
    """How likely each fault is, from 0 to 1."""

    lost_request: float = 0.0
    lost_answer: float = 0.0
    late: float = 0.0  # a request or answer takes up to `latest` seconds
    latest: float = 6.0
    doubled: float = 0.0  # a request arrives twice
    stale_read: float = 0.0  # a read is answered by a server that is behind
    stale_refusal: float = 0.0  # a write is refused by a leader that has been replaced
    torn_batch: float = 0.0  # an atomic batch is stored only in part, against the contract


NO_FAULTS = NetworkFaults()


class MemoryStream:
    """The stored records. A write is judged when it arrives, in one step."""

    def __init__(self) -> None:
        self.records: dict[int, bytes] = {}
        self.last = 0
        self._changed = trio.Event()

    def write(self, after: int, records: Sequence[bytes]) -> bool:
        """Store the records behind `after` if that is the end; returns whether it was."""
        if after != self.last:
            return False
        for data in records:
            self.add(data)
        return True

    def add(self, data: bytes) -> None:
        """Store a record without any expectation, as a foreign program would."""
        self.last += 1
        self.records[self.last] = data
        self._changed.set()
        self._changed = trio.Event()

    def read(self, first: int, most: int, last: int) -> list[StoredRecord]:
        """Return up to `most` records from the first that is kept, none of them behind `last`."""
        first = max(first, min(self.records, default=1))
        return [StoredRecord(each, self.records[each]) for each in range(first, min(last, first + most - 1) + 1)]

    def trim(self, before: int) -> None:
        """Remove the records below a position."""
        for position in [each for each in self.records if each < before]:
            del self.records[position]

    async def change(self) -> None:
        """Return when a record has been added."""
        await self._changed.wait()


class MemoryStore:
    """One broker's way to the stream.

    `network` runs what happens outside of the broker, `timers` what happens inside: a broker that is paused gets its
    answers when it goes on, and what it had sent arrives meanwhile.
    """

    def __init__(
        self,
        stream: MemoryStream,
        timers: Timers,
        *,
        network: Timers | None = None,
        faults: NetworkFaults = NO_FAULTS,
        draw: random.Random | None = None,
        most_bytes: int = 1 << 20,
    ) -> None:
        self.most_bytes = most_bytes
        self.faults = faults
        self.is_cut_off = False
        self._stream, self._timers, self._network = stream, timers, network or timers
        self._draw = draw or random.Random(0)
        self._sent: deque[Callable[[], None]] = deque()  # on their way, in order
        self._held: list[Callable[[], None]] = []  # sent while the connection was cut; TCP may deliver it yet

    def write(self, after: int, records: Sequence[bytes], answered: Answered) -> None:
        answer = self._once(answered, Answer.UNKNOWN)

        def arrive() -> None:
            self._reply(partial(answer, self._judge(after, records)))

        for _ in range(1 + self._happens(self.faults.doubled)):
            self._request(arrive)

    def _judge(self, after: int, records: Sequence[bytes]) -> Answer:
        if self._happens(self.faults.stale_refusal):
            return Answer.REFUSED
        if len(records) > 1 and after == self._stream.last and self._happens(self.faults.torn_batch):
            self._stream.write(after, records[: self._draw.randrange(1, len(records))])
            return Answer.UNKNOWN
        return Answer.STORED if self._stream.write(after, records) else Answer.REFUSED

    def look(self, first: int, most: int, found: Found) -> None:
        answer = self._once(found, None)

        def arrive() -> None:
            behind = self._draw.randrange(1, 30) if self._happens(self.faults.stale_read) else 0
            self._reply(partial(answer, self._stream.read(first, most, self._stream.last - behind)))

        self._request(arrive)

    async def follow(self, first: int, gather: float = 0.0) -> AsyncGenerator[Sequence[StoredRecord], None]:
        while True:
            if records := self._stream.read(first, 1000, self._stream.last):
                first = records[-1].position + 1
                yield records
                await trio.sleep(gather)
            else:
                await self._stream.change()

    async def trim(self, before: int) -> None:
        self._stream.trim(before)

    def reconnect(self) -> None:
        """The connection is whole again; of what was sent meanwhile, TCP delivers some."""
        self.is_cut_off = False
        held, self._held = self._held, []
        for arrive in held:
            self._network.call_later(self._delay(), arrive)

    def _happens(self, probability: float) -> bool:
        return probability > 0 and self._draw.random() < probability

    def _delay(self) -> float:
        usual = self._draw.uniform(0.0005, 0.004)
        return self._draw.uniform(0, self.faults.latest) if self._happens(self.faults.late) else usual

    def _request(self, arrive: Callable[[], None]) -> None:
        if self.is_cut_off:
            if self._draw.random() < 0.5:
                self._held.append(arrive)
        elif not self._happens(self.faults.lost_request):
            self._in_order(arrive)

    def _in_order(self, arrive: Callable[[], None]) -> None:
        """A connection keeps the order of what is sent on it; what comes late was sent on another one."""
        if self._happens(self.faults.late):
            self._network.call_later(self._draw.uniform(0, self.faults.latest), arrive)
            return
        self._sent.append(arrive)
        self._network.call_later(self._draw.uniform(0.0005, 0.004), lambda: self._sent.popleft()())

    def _reply(self, answer: Callable[[], None]) -> None:
        if not self.is_cut_off and not self._happens(self.faults.lost_answer):
            self._timers.call_later(self._delay(), answer)

    def _once(self, answered: Callable[[Any], None], unknown: Any) -> Callable[[Any], None]:
        """The first answer counts: the network's, or "unknown" when it has taken too long."""
        is_open = True

        def answer(outcome: Any) -> None:
            nonlocal is_open
            if is_open:
                is_open = False
                answered(outcome)

        self._timers.call_later(TIME_OUT, partial(answer, unknown))
        return answer
