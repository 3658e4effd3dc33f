"""Which partitions are read in which round."""

from __future__ import annotations

from itertools import islice

from qb.core.push.partition_turns import PARTITIONS_A_ROUND, WITHIN, PartitionTurns


def turns_of(count: int) -> PartitionTurns:
    turns = PartitionTurns()
    turns.add(range(count))
    return turns


def read_in_round(turns: PartitionTurns, now: float) -> list[int]:
    return list(islice(turns, turns.begin_round(now)))


def test_rounds_in_quick_succession_stay_with_one_partition() -> None:
    turns = turns_of(16)
    rounds = [read_in_round(turns, 100 + at * WITHIN / 160) for at in range(9)]
    assert len(rounds[0]) == 1
    assert rounds == [rounds[0]] * 9


def test_each_partition_has_its_turn_in_time_while_rounds_follow_each_other() -> None:
    turns = turns_of(16)
    seen = [read_in_round(turns, 100 + at * WITHIN / 160) for at in range(180)]
    assert {partition for each in seen for partition in each} == set(range(16))


def test_all_share_a_round_if_rounds_are_seldom() -> None:
    turns = turns_of(4)
    read_in_round(turns, 100)
    assert sorted(read_in_round(turns, 101)) == [0, 1, 2, 3]


def test_a_round_right_after_a_late_one_is_shared_by_the_same() -> None:
    turns = turns_of(4)
    read_in_round(turns, 100)
    assert read_in_round(turns, 101) == read_in_round(turns, 101.001)


def test_seldom_rounds_of_many_partitions_take_turns() -> None:
    turns = turns_of(3 * PARTITIONS_A_ROUND)
    read_in_round(turns, 100)
    seen = [partition for now in (101, 102, 103) for partition in read_in_round(turns, now)]
    assert sorted(seen) == list(range(3 * PARTITIONS_A_ROUND))


def test_partitions_without_more_are_passed_over_in_the_same_round() -> None:
    turns = turns_of(3 * PARTITIONS_A_ROUND)
    turns.begin_round(100)
    read = []
    for partition in turns:
        if partition < 2 * PARTITIONS_A_ROUND:
            turns.discard(partition)
        else:
            read.append(partition)
    assert read == list(range(2 * PARTITIONS_A_ROUND, 3 * PARTITIONS_A_ROUND))
