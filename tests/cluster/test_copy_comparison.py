"""What several nodes have at each position is compared, whatever they give at a time."""

from __future__ import annotations

import random

from qb.cluster.scrub.copy_comparison import CopyComparison, NodeFinding, without_gap
from qb.cluster.scrub.scrub_pace import ScrubPace
from qb.replication.journal.journal_records import JournalRecord, JournalRecordKind, encode
from qb.replication.journal.journal_store import StoredRecord

NODES = ("a", "b", "c")


def record(position: int) -> StoredRecord:
    data = encode(JournalRecord(JournalRecordKind.WHOLE, 1, 7, position - 1, b"payload %d" % position))
    return StoredRecord(position, data)


def flipped(stored: StoredRecord) -> StoredRecord:
    return StoredRecord(stored.position, stored.data[:-1] + bytes((stored.data[-1] ^ 1,)))


def compare(copies: dict[str, list[StoredRecord]], first: int, last: int, seed: int = 0) -> list[NodeFinding]:
    """Let the nodes give what they have, in pieces of any length; one that gives nothing is skipped."""
    draw, comparison = random.Random(seed), CopyComparison(copies, first, last)
    found: list[NodeFinding] = []
    while not comparison.is_done:
        for node in comparison.hungry():
            following = [each for each in copies[node] if each.position >= comparison.next_of(node)]
            if following and following[0].position == comparison.next_of(node):
                found += comparison.take(node, following[: draw.randint(1, 5)])
            else:
                found += comparison.skip(node)
    return found


def test_equal_copies_have_no_findings_however_they_are_read() -> None:
    for seed in range(20):
        assert compare({node: [record(number) for number in range(5, 40)] for node in NODES}, 5, 39, seed) == []


def test_a_damaged_a_missing_and_another_record_are_found_where_they_are() -> None:
    copies = {node: [record(number) for number in range(1, 31)] for node in NODES}
    copies["a"][4] = flipped(copies["a"][4])
    del copies["b"][9]
    copies["c"][19] = StoredRecord(20, record(99).data)
    for seed in range(20):
        assert compare(copies, 1, 30, seed) == [
            NodeFinding("a", 5, "does not fit its checksum"),
            NodeFinding("b", 10, "is missing or cannot be read"),
            NodeFinding("c", 20, "differs from what the other nodes have"),
        ]


def test_of_two_nodes_the_one_whose_record_fits_its_checksum_is_right() -> None:
    copies = {"a": [record(1), flipped(record(2))], "b": [record(1), record(2)]}
    assert compare(copies, 1, 2) == [NodeFinding("a", 2, "does not fit its checksum")]


def test_one_node_alone_is_proved_by_the_checksums() -> None:
    assert compare({"a": [record(1), flipped(record(2))]}, 1, 2) == [NodeFinding("a", 2, "does not fit its checksum")]


def test_a_foreign_record_that_all_nodes_have_is_no_damage() -> None:
    assert compare({node: [StoredRecord(1, b"not ours")] for node in NODES}, 1, 1) == []


def test_the_others_are_compared_without_a_node_that_is_left_out() -> None:
    comparison = CopyComparison(NODES, 1, 2)
    for node in ("a", "b"):
        assert comparison.take(node, [record(1), record(2)]) == []
    assert not comparison.is_done
    assert comparison.leave_out("c") == []
    assert comparison.is_done


def test_what_is_trimmed_during_a_pass_is_not_missing_at_the_nodes_that_had_not_come_there() -> None:
    comparison = CopyComparison(NODES, 1, 9)
    assert comparison.take("a", [record(number) for number in range(1, 7)]) == []
    assert comparison.take("b", [record(1)]) == []
    assert comparison.begin_at(5) == []
    assert comparison.hungry() == ["b", "c"]
    for node in NODES:
        assert comparison.take(node, [record(number) for number in range(5, 10)]) == []
    assert comparison.is_done


def test_only_what_comes_without_a_gap_is_taken_at_once() -> None:
    records = [record(number) for number in (3, 4, 5, 7, 8)]
    assert without_gap(records, 4) == records[1:3]
    assert without_gap(records, 6) == []
    assert without_gap([], 1) == []


def test_the_pace_keeps_to_its_rate_and_without_one_to_half_of_the_time() -> None:
    assert ScrubPace(1_000).pause(500, 0.1) == 0.4
    assert ScrubPace(1_000).pause(500, 2.0) == 0.0
    assert ScrubPace().pause(500, 0.3) == 0.3
