"""The ledger of what a cluster has acked, and what it says when that is compared with what is stored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

PARTITIONS = 2


class Findings(NamedTuple):
    """What broke a promise, in words; each list is empty if none did."""

    lost: tuple[str, ...]  # acked, and not there
    doubled: tuple[str, ...]  # stored, or committed, twice
    torn: tuple[str, ...]  # transactions that are there in part, or that were never sent
    stale: tuple[str, ...]  # answers without what had been acked before they were asked for


class Ledger:
    """What was acked, and what was seen."""

    def __init__(self) -> None:
        self.stored: dict[tuple[int, int], bytes] = {}  # by partition and offset: an ack said so
        self.newest: dict[int, int] = {}  # by partition: the highest offset that was acked
        self.durabilities: set[str] = set()
        self.committed: set[int] = set()  # numbers of transactions
        self.begun: set[int] = set()
        self.offset = 0  # that a group has committed
        self.pushed: Counter[bytes] = Counter()
        self.consumed: Counter[bytes] = Counter()
        self.by_relay = self.by_lines = self.reads = 0  # acks to basic peers, and as JSON lines; answers to readers
        self.stale: list[str] = []
        self.clocks_differ = False  # only what is asked for consistently has to be current then
        self.outdated: list[str] = []  # what was not, while clocks differed
        self.reused: list[str] = []
        self.longest_gap = 0.0  # seconds between two acks of one publisher
        self.faults: list[BaseException] = []

    @property
    def has_begun(self) -> bool:
        """Has every kind of work been acked once?"""
        parts = self.by_relay, self.by_lines, self.committed, self.pushed, self.consumed, self.reads, self.offset
        return all(parts)

    def note(self, partition: int, offset: int, body: bytes) -> None:
        """A publish was acked."""
        if self.stored.setdefault((partition, offset), body) != body:
            self.reused.append(f"offset {offset} of partition {partition} was acked twice")
        self.newest[partition] = max(offset, self.newest.get(partition, 0))

    def judge(self, plain: Sequence[Sequence[bytes]], staged: Sequence[Sequence[bytes]]) -> Findings:
        """Compare it with the bodies that are stored in the partitions of both topics."""
        found = [{int(body[1:]) for body in bodies} for bodies in staged]
        lost = [
            f"{body!r} at offset {offset} of partition {partition}"
            for (partition, offset), body in sorted(self.stored.items())
            if plain[partition][offset : offset + 1] != [body]
        ]
        lost += [f"transaction {number}" for number in sorted(self.committed - set.union(*found))]
        doubled = [repr(body) for bodies in (*plain, *staged) for body, count in Counter(bodies).items() if count > 1]
        torn = set.union(*found) - set.intersection(*found) | set.union(*found) - self.begun
        return Findings(
            tuple(lost),
            tuple(doubled + self.reused),
            tuple(f"transaction {number}" for number in sorted(torn)),
            tuple(self.stale),
        )

    def check_read(
        self, partition: int, acked: int, code: str, bodies: Mapping[int, bytes], *, consistent: bool = False
    ) -> None:
        """A reader asked for what had been acked before: is it in the answer?"""
        if code not in ("", "OFFSET_OUT_OF_RANGE"):
            return  # refused: the cell has no owner
        self.reads += 1
        if bodies.get(acked) != self.stored[partition, acked]:
            what = bodies.get(acked, code or "nothing")
            self._found_stale(
                f"offset {acked} of partition {partition} was acked, and then read as {what!r}", consistent
            )

    def check_committed(self, acked: int, found: int, *, consistent: bool = False) -> None:
        """A reader asked for an offset of a group: is it what had been committed before, or more?"""
        self.reads += 1
        if found < acked:
            self._found_stale(f"offset {acked} was committed, and then read as {found}", consistent)

    def _found_stale(self, what: str, consistent: bool) -> None:
        (self.outdated if self.clocks_differ and not consistent else self.stale).append(what)
