"""Compares what several NATS nodes have in their own copies of the journal, position by position. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from qb.replication.journal.journal_records import decode
from qb.replication.journal.journal_store import StoredRecord

MOST_FINDINGS = 100  # of one node; more are counted, but not listed


class NodeFinding(NamedTuple):
    """A record of one node's copy that is not what it should be."""

    node: str
    position: int
    what: str


class CopyComparison:
    """One pass over positions `first` to `last`."""

    def __init__(self, nodes: Iterable[str], first: int, last: int) -> None:
        self.first, self.last = first, last
        self.compared = first - 1  # up to here all nodes were compared
        self._next = dict.fromkeys(nodes, first)  # which position each node is to give
        self._held: dict[str, dict[int, bytes]] = {node: {} for node in self._next}

    @property
    def is_done(self) -> bool:
        return self.compared >= self.last or not self._next

    def next_of(self, node: str) -> int:
        """Return the position that a node is to give next."""
        return self._next[node]

    def hungry(self) -> list[str]:
        """Return the nodes that hold up the others, and have not come to the end."""
        least = min(self._next.values(), default=self.last + 1)
        return [node for node, position in self._next.items() if position == least <= self.last]

    def take(self, node: str, records: Sequence[StoredRecord]) -> list[NodeFinding]:
        """Take what a node has given, in order; returns what is found by that."""
        for each in records:
            if self._next[node] <= each.position <= self.last:
                self._held[node][each.position] = bytes(each.data)
            self._next[node] = max(self._next[node], min(each.position, self.last) + 1)
        return self._compare()

    def skip(self, node: str) -> list[NodeFinding]:
        """The node gives nothing at its next position, which counts as missing."""
        self._next[node] += 1
        return self._compare()

    def begin_at(self, first: int) -> list[NodeFinding]:
        """What lies before a position was trimmed: it is compared no more."""
        self.compared = max(self.compared, first - 1)
        for node, held in self._held.items():
            self._held[node] = {position: data for position, data in held.items() if position >= first}
            self._next[node] = max(self._next[node], first)
        return self._compare()

    def leave_out(self, node: str) -> list[NodeFinding]:
        """Go on without a node."""
        del self._next[node], self._held[node]
        return self._compare()

    def _compare(self) -> list[NodeFinding]:
        """Compare up to where all nodes have come."""
        found: list[NodeFinding] = []
        until = min(min(self._next.values(), default=self.compared + 1) - 1, self.last)
        for position in range(self.compared + 1, until + 1):
            here = {node: held.pop(position, None) for node, held in self._held.items()}
            found += _differences(position, here)
        self.compared = max(self.compared, until)
        return found


def without_gap(records: Sequence[StoredRecord], first: int) -> list[StoredRecord]:
    """Return the records from a position on, as far as none is missing."""
    found: list[StoredRecord] = []
    for each in records:
        if each.position == first + len(found):
            found.append(each)
        elif each.position > first:
            break
    return found


def _differences(position: int, here: Mapping[str, bytes | None]) -> list[NodeFinding]:
    """Return which nodes have not what they should."""
    values = set(here.values())
    if len(here) > 1 and len(values) == 1 and None not in values:
        return []  # all have the same, be it a record of ours or not
    right = _right(list(here.values()))
    findings = []
    for node, data in here.items():
        if data is None:
            findings.append(NodeFinding(node, position, "is missing or cannot be read"))
        elif data != right or (len(here) == 1 and decode(data) is None):
            what = "differs from what the other nodes have" if decode(data) else "does not fit its checksum"
            findings.append(NodeFinding(node, position, what))
    return findings


def _right(values: Sequence[bytes | None]) -> bytes | None:
    """Return what most nodes have; if that is not clear, what alone fits its checksum."""
    counted = Counter(value for value in values if value is not None).most_common()
    if not counted:
        return None
    if counted[0][1] > len(values) // 2:
        return counted[0][0]
    whole = [value for value, _ in counted if decode(value) is not None]
    return whole[0] if len(whole) == 1 else None
