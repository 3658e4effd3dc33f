"""Where a query is in each partition, and what lies between two such positions: pure arithmetic."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyspark_qb.options.spark_errors import BadOption, DataLost
from pyspark_qb.read.query_offsets import (
    ROWS_PER_TASK,
    OffsetRange,
    Positions,
    TopicPartition,
    begun_in,
    checked,
    from_json,
    limited,
    ranges,
    resolve,
    split,
    to_json,
)
from qb.clients.protocol.fetch_requests import PartitionExtent

partitions = st.builds(TopicPartition, st.sampled_from(["a", "b-c", "Z.9"]), st.integers(0, 12))
positions = st.dictionaries(partitions, st.integers(0, 1000), max_size=6)
A, B = TopicPartition("a", 0), TopicPartition("b", 1)


@given(here=positions, begun=st.none() | positions)
def test_positions_survive_the_way_through_json(here: Positions, begun: Positions | None) -> None:
    listed = json.loads(json.dumps(to_json(here, begun)))
    assert from_json(listed) == here
    assert begun_in(listed) == begun


@given(here=positions)
def test_equal_positions_are_equal_texts(here: Positions) -> None:
    backwards = dict(reversed(here.items()))
    assert json.dumps(to_json(here)) == json.dumps(to_json(backwards))


@given(start=positions, more=st.dictionaries(partitions, st.integers(0, 1000)), most=st.integers(1, 500))
def test_a_limited_batch_has_exactly_as_many_rows_as_it_may(start: Positions, more: Positions, most: int) -> None:
    end = start | {each: start.get(each, 0) + rows for each, rows in more.items()}
    cut = limited(start, end, most)
    assert cut.keys() == end.keys()
    assert all(start.get(each, 0) <= cut[each] <= end[each] for each in end)
    available = sum(end[each] - start.get(each, 0) for each in end)
    assert sum(each.rows for each in ranges(start, cut)) == min(available, most)


def test_a_limit_is_shared_as_the_rows_are() -> None:
    assert limited({A: 0, B: 100}, {A: 900, B: 200}, 100) == {A: 90, B: 110}


@given(
    sizes=st.lists(st.integers(1, 10_000), max_size=5),
    most=st.integers(500, 5000),
    at_least=st.none() | st.integers(1, 9),
)
def test_splitting_neither_loses_nor_repeats_a_row(sizes: list[int], most: int, at_least: int | None) -> None:
    whole = [OffsetRange(TopicPartition("a", number), 7, 7 + size) for number, size in enumerate(sizes)]
    pieces = split(whole, most, at_least)
    found = [(each.partition, at) for each in pieces for at in range(each.start, each.end)]
    assert found == [(each.partition, at) for each in whole for at in range(each.start, each.end)]
    assert all(0 < each.rows <= most for each in pieces)
    assert len(pieces) >= min(at_least or 1, sum(sizes))


def test_a_range_is_split_when_it_is_large_and_not_before() -> None:
    assert split([OffsetRange(A, 0, ROWS_PER_TASK)]) == [OffsetRange(A, 0, ROWS_PER_TASK)]
    assert [each.rows for each in split([OffsetRange(A, 0, 2 * ROWS_PER_TASK + 2)])] == [666_667, 666_667, 666_668]


def test_new_partitions_and_topics_made_anew_are_read_from_their_first_message() -> None:
    assert ranges({A: 5}, {A: 9, B: 2}) == [OffsetRange(A, 5, 9), OffsetRange(B, 0, 2)]
    assert ranges({A: 5}, {A: 3}) == [OffsetRange(A, 0, 3)]
    assert ranges({A: 5}, {A: 5}) == []


def test_options_name_offsets() -> None:
    extents = {A: PartitionExtent(2, 9), B: PartitionExtent(0, 4)}

    def at_time(partition: TopicPartition, time_ms: int) -> int:
        return {A: 3, B: 6}[partition] if time_ms == 77 else 0  # B has got two messages more meanwhile

    assert resolve(extents, None, None, "earliest", at_time) == {A: 2, B: 0}
    assert resolve(extents, None, None, "latest", at_time) == {A: 9, B: 4}
    assert resolve(extents, "earliest", None, "latest", at_time) == {A: 2, B: 0}
    assert resolve(extents, {"a": {0: 5}, "b": {1: -2}}, None, "latest", at_time) == {A: 5, B: 0}
    assert resolve(extents, {"a": {0: -1}}, None, "earliest", at_time) == {A: 9, B: 0}
    assert resolve(extents, None, 77, "earliest", at_time) == {A: 3, B: 4}
    with pytest.raises(BadOption, match="c/0"):
        resolve(extents, {"c": {0: 5}}, None, "latest", at_time)


def test_a_place_outside_of_the_log_is_a_loss_or_moved_into_it() -> None:
    extents = {A: PartitionExtent(2, 9)}
    for place, inside in ((1, 2), (2, 2), (9, 9), (10, 9)):
        assert checked({A: place}, extents, fail_on_data_loss=False) == {A: inside}
        if place != inside:
            with pytest.raises(DataLost, match=f"holds the offsets from 2 up to 9, and {place} was asked for"):
                checked({A: place}, extents, fail_on_data_loss=True)
