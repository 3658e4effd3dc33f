"""Rows become stored frames byte for byte as the protocol has them, whatever columns they come in."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from decimal import Decimal
from typing import Any
from zlib import crc32

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyspark_qb.arrow import encoding
from pyspark_qb.arrow.encoding import encode
from pyspark_qb.arrow.row_columns import Columns
from pyspark_qb.arrow.rows import read_rows
from pyspark_qb.options.spark_errors import BadColumns
from pyspark_qb.write import routing
from pyspark_qb.write.routing import FrameRun, Gatherer, Router
from qb.clients.protocol.client_errors import MessageTooLarge, UnknownPartition
from qb.core.wire.frames import HEAD, Frame
from tests.support.peers import stored_messages

NOW = 1_767_268_800_000
PARTITIONS = {"a": 1, "b": 3, "c": 8}
TYPES = {
    "value": pa.binary(),
    "key": pa.string(),
    "partition": pa.int32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "properties": pa.map_(pa.string(), pa.string()),
    "topic": pa.string(),
}


def a_batch(rows: Sequence[dict[str, Any]], types: dict[str, pa.DataType] | None = None) -> pa.RecordBatch:
    names = [name for name in TYPES if name in rows[0]]
    kinds = TYPES | (types or {})
    return pa.record_batch([pa.array([row[name] for row in rows], kinds[name]) for name in names], names=names)


def columns_in(batch: pa.RecordBatch) -> Columns:
    return Columns(**{name: place for place, name in enumerate(batch.schema.names)})


def runs_of(batch: pa.RecordBatch, topic: str | None = "b", turn: int = 0, limit: int = 2**24) -> list[FrameRun]:
    rows = read_rows(batch, columns_in(batch), topic)
    return list(routing.runs_of(rows, Router(PARTITIONS.__getitem__, turn).partitions(rows), encode(rows, NOW, limit)))


def published(batch: pa.RecordBatch, topic: str | None = "b") -> dict[tuple[str, int], list[Frame]]:
    found: dict[tuple[str, int], list[Frame]] = defaultdict(list)
    for run in runs_of(batch, topic):
        messages = stored_messages(bytes(run.frames))
        assert len(messages) == run.rows
        found[run.topic, run.partition] += messages
    return found


def test_numpy_and_struct_agree_on_the_head_of_a_frame() -> None:
    one = np.zeros(1, encoding.HEAD)
    one["total"], one["type"], one["sequence"], one["timestamp"], one["properties"] = 1, 2, 3, 4, 5
    assert one.tobytes() == HEAD.pack(1, 2, 3, 4, 5)


words = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8)
names = st.text("abcdefghijklm", min_size=1, max_size=3)
some_rows = st.sets(st.sampled_from(["key", "partition", "timestamp", "properties", "topic"])).flatmap(
    lambda present: st.lists(
        st.fixed_dictionaries(
            {"value": st.binary(max_size=40)}
            | {
                name: strategy
                for name, strategy in {
                    "key": st.none() | words,
                    "partition": st.none() | st.just(0),
                    "timestamp": st.none() | st.integers(0, 2**52),
                    "properties": st.none() | st.dictionaries(names, st.none() | words, max_size=3),
                    "topic": st.none() | st.sampled_from(list(PARTITIONS)),
                }.items()
                if name in present
            }
        ),
        min_size=1,
        max_size=30,
    )
)


def expected_frame(row: dict[str, Any], topic: str) -> Frame:
    properties = {"topic": topic}
    if row.get("key") is not None:
        properties["key"] = row["key"]
    own = row.get("properties") or {}
    properties |= {name: value for name, value in own.items() if value is not None}
    microseconds = row.get("timestamp")
    return Frame(1, 0, NOW if microseconds is None else microseconds // 1000, properties, row["value"])


@given(rows=some_rows)
def test_every_row_is_one_frame_in_its_place_and_in_order(rows: list[dict[str, Any]]) -> None:
    of_topics: dict[str, list[Frame]] = defaultdict(list)
    for row in rows:
        topic = row.get("topic") or "b"
        of_topics[topic].append(expected_frame(row, topic))
    found = published(a_batch([row | _pairs(row) for row in rows]))
    assert {topic for topic, _ in found} == set(of_topics)
    for topic, expected in of_topics.items():
        frames = [frame for place, run in found.items() if place[0] == topic for frame in run]
        assert sorted(frames, key=repr) == sorted(expected, key=repr)
    for (topic, partition), run in found.items():
        order = iter(of_topics[topic])
        assert all(frame in order for frame in run), "as they came"
        for frame in run if "partition" not in rows[0] else ():
            if (key := frame.properties.get("key")) is not None:
                assert partition == crc32(key.encode()) % PARTITIONS[topic]


@given(
    values=st.integers(0, 9).flatmap(lambda size: st.lists(st.binary(min_size=size, max_size=size), min_size=1)),
    times=st.none() | st.lists(st.none() | st.integers(0, 2**40), min_size=1),
    skipped=st.integers(0, 3),
)
def test_rows_of_one_length_are_frames_like_any_other(
    values: list[bytes], times: list[int | None] | None, skipped: int
) -> None:
    rows = [{"value": value} for value in values]
    if times is not None:
        rows = [row | {"timestamp": times[at % len(times)]} for at, row in enumerate(rows)]
    batch = a_batch(rows).slice(min(skipped, len(rows) - 1))
    frames = [frame for (_, _), run in sorted(published(batch).items()) for frame in run]
    wanted = [expected_frame(row, "b") for row in rows[min(skipped, len(rows) - 1) :]]
    assert sorted(frames, key=repr) == sorted(wanted, key=repr)


def _pairs(row: dict[str, Any]) -> dict[str, Any]:
    own = row.get("properties")
    return {} if own is None else {"properties": list(own.items())}


@pytest.mark.parametrize(
    "kind", [pa.binary(), pa.large_binary(), pa.binary_view(), pa.string(), pa.large_string(), pa.string_view()]
)
def test_a_value_may_have_any_type_of_text_or_bytes(kind: pa.DataType) -> None:
    batch = pa.record_batch([pa.array(["tea", "", "süß"], pa.string()).cast(kind)], names=["value"])
    (run,) = runs_of(batch, "a")
    assert [frame.body for frame in stored_messages(bytes(run.frames))] == [b"tea", b"", "süß".encode()]


def test_a_slice_of_a_batch_is_read_from_where_it_begins() -> None:
    rows = [{"value": f"{n}", "key": f"k{n}", "properties": [("n", f"{n}")]} for n in range(10)]
    (run,) = runs_of(a_batch(rows, {"value": pa.string()}).slice(4, 3), "a")
    frames = stored_messages(bytes(run.frames))
    assert [frame.body for frame in frames] == [b"4", b"5", b"6"]
    assert frames[0].properties == {"topic": "a", "key": "k4", "n": "4"}


def test_rows_without_key_take_turns_in_blocks_that_are_equally_long() -> None:
    batch = pa.record_batch([pa.array([b"x" * 900] * 3000)], names=["value"])
    assert [(run.partition, run.rows) for run in runs_of(batch, "b", turn=2)] == [(2, 1000), (0, 1000), (1, 1000)]
    few = pa.record_batch([pa.array([b"x"] * 5)], names=["value"])
    rows = read_rows(few, Columns(value=0), "b")
    router = Router(PARTITIONS.__getitem__, 0)
    assert [set(router.partitions(rows).tolist()) for _ in range(4)] == [{0}, {1}, {2}, {0}]


def test_no_run_is_longer_than_one_frame_of_the_wire_may_be() -> None:
    sizes = [10, 400_000, 700_000, 1_500_000, 3, 999_000, 5, 5, 200_000]
    batch = pa.record_batch([pa.array([bytes(size) for size in sizes])], names=["value"])
    runs = runs_of(batch, "a")
    assert all(len(run.frames) <= routing.RUN or run.rows == 1 for run in runs)
    assert [len(frame.body) for run in runs for frame in stored_messages(bytes(run.frames))] == sizes


def test_short_runs_are_gathered_and_long_ones_pass_in_order() -> None:
    gatherer, size = Gatherer(), routing.RUN
    given = [("a", size // 4), ("b", 10), ("a", size // 4), ("a", size * 3 // 4), ("b", 20), ("a", 7)]
    runs = [FrameRun(topic, 0, memoryview(bytes([n]) * length), 1) for n, (topic, length) in enumerate(given)]
    out = [made for run in runs for made in gatherer.add(run)]
    assert [(run.topic, run.rows, len(run.frames)) for run in out] == [
        ("a", 2, size // 4 * 2),
        ("a", 1, size * 3 // 4),
    ]
    out += gatherer.rest()
    assert list(gatherer.rest()) == []
    for topic in "ab":
        assert b"".join(run.frames for run in out if run.topic == topic) == b"".join(
            run.frames for run in runs if run.topic == topic
        )
        assert sum(run.rows for run in out if run.topic == topic) == [topic for topic, _ in given].count(topic)


def test_what_waits_to_be_gathered_is_bounded() -> None:
    gatherer, length = Gatherer(), 1000
    waiting, most = 0, 0
    for partition in range(2 * routing.HELD // length):
        ready = gatherer.add(FrameRun("a", partition, memoryview(b"x" * length), 1))
        waiting += length - sum(len(run.frames) for run in ready)
        most = max(most, waiting)
    assert most <= routing.HELD
    assert sum(len(run.frames) for run in gatherer.rest()) == waiting


def test_a_whole_row_is_one_json_object() -> None:
    batch = pa.record_batch(
        {
            "id": pa.array([1, None], pa.int64()),
            "price": pa.array([Decimal("1.50"), None], pa.decimal128(10, 2)),
            "at": pa.array([NOW * 1000, None], pa.timestamp("us", "UTC")),
            "tags": pa.array([["a", "b"], None]),
            "of": pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int32())),
            "raw": pa.array([b"\0\1", None]),
            "key": pa.array(["not a key here", None]),
        }
    )
    rows = read_rows(batch, Columns(), "a")
    assert rows.keys is None
    assert rows.bodies.to_pylist() == [
        b'{"id":1,"price":1.50,"at":"2026-01-01T12:00:00Z","tags":["a","b"],"of":{"k":1},"raw":"AAE=",'
        b'"key":"not a key here"}',
        b'{"id":null,"price":null,"at":null,"tags":null,"of":null,"raw":null,"key":null}',
    ]


@pytest.mark.parametrize(
    ("row", "types", "words"),
    [
        ({"value": None}, {}, "column value is null"),
        ({"value": b"x", "key": "a\0b"}, {}, "column key holds a NUL"),
        ({"value": b"x", "key": b"\xff"}, {"key": pa.binary()}, "column key holds bytes that are not UTF-8"),
        ({"value": b"x", "timestamp": -1000}, {}, "before 1970"),
        ({"value": b"x", "properties": [("", "v")]}, {}, "property name ''"),
        ({"value": b"x", "properties": [("a=b", "v")]}, {}, "property name 'a=b'"),
        ({"value": b"x", "properties": [("key", "v")]}, {}, "'key' is reserved"),
        ({"value": b"x", "properties": [("a", "v\0")]}, {}, "column properties holds a NUL"),
        ({"value": b"x", "topic": None}, {}, "column topic is null"),
    ],
)
def test_what_cannot_be_published_is_said_by_column(row: dict[str, Any], types: dict[str, Any], words: str) -> None:
    with pytest.raises(BadColumns, match=words):
        runs_of(a_batch([row], types), None if "topic" in row else "a")


@pytest.mark.parametrize("partition", [-1, 3, 2**31 - 1])
def test_a_partition_that_there_is_not_is_refused_in_the_words_of_the_broker(partition: int) -> None:
    with pytest.raises(UnknownPartition, match=f"topic 'b' has no partition {partition}; it has 0 to 2"):
        runs_of(a_batch([{"value": b"x", "partition": partition}]))


def test_a_body_or_properties_over_the_limit_are_refused() -> None:
    with pytest.raises(MessageTooLarge, match="a body of 11 bytes is over this broker's limit of 10"):
        runs_of(a_batch([{"value": b"x"}, {"value": b"x" * 11}]), limit=10)
    with pytest.raises(MessageTooLarge, match="properties of 70013 bytes are over the limit of 64 KiB"):
        runs_of(a_batch([{"value": b"x", "key": "k" * 70_000}]))
