"""Stored frames become Arrow rows in bulk, and say the same as qb.core.wire.frames does one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.pandas.types import to_arrow_schema

from pyspark_qb.arrow.bounds import Bounds
from pyspark_qb.arrow.decoding import EVER, HEADS, LAST_MS, Decoder, FrameChunk, NotStored
from pyspark_qb.arrow.frame_columns import uniform_messages
from pyspark_qb.read.source_columns import COLUMNS, full_schema
from qb.core.wire.errors import PeerMisbehaved
from qb.core.wire.frames import HEAD, RESERVED, Frame, MessageType, decode_frame, encode_frame

FIRST = 40
SEAL = encode_frame(MessageType.SEAL, FIRST, 1, b"", b"a seal as far as readers of frames care")

names = st.text(st.characters(exclude_characters="=\0", codec="utf-8"), min_size=1, max_size=5)
texts = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=8)
properties = st.dictionaries(names | st.sampled_from(sorted(RESERVED)), texts, max_size=4)
messages = st.tuples(st.integers(0, 4_000_000_000_000), properties, st.binary(max_size=40))


def stored(rows: Sequence[tuple[int, dict[str, str] | bytes, bytes]], seal_after: Sequence[bool] = ()) -> FrameChunk:
    """Return the rows as they lie in a log, with seals behind some of them."""
    data, positions = b"", []
    for number, (timestamp, described, body) in enumerate(rows):
        positions.append(len(data))
        data += encode_frame(MessageType.DATA, FIRST + number, timestamp, described, body)
        if number < len(seal_after) and seal_after[number]:
            data += SEAL
    return FrameChunk(np.frombuffer(data, np.uint8), np.array(positions, np.int64), FIRST)


def decode(chunk: FrameChunk, columns: Sequence[str] = tuple(COLUMNS), times: Bounds = EVER) -> pa.RecordBatch:
    batch = Decoder("events", 3, columns, times).decode(chunk)
    batch.validate(full=True)
    return batch


def expected(frame: Frame) -> dict[str, Any]:
    """Return a row as the plain decoder of frames returns it."""
    return {
        "key": frame.properties.get("key"),
        "value": frame.body,
        "topic": "events",
        "partition": 3,
        "offset": frame.sequence_number,
        "timestamp": frame.timestamp * 1000,
        "properties": [(name, value) for name, value in frame.properties.items() if name not in RESERVED],
    }


def rows_of(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Return rows with plain numbers for times, which may be beyond what datetime can hold."""
    at = batch.schema.get_field_index("timestamp")
    if at >= 0:
        batch = batch.set_column(at, "timestamp", batch.column(at).view(pa.int64()))
    return batch.to_pylist()


@given(rows=st.lists(messages, max_size=12), seals=st.lists(st.booleans(), max_size=12))
def test_rows_say_what_the_frames_say(rows: list[Any], seals: list[bool]) -> None:
    chunk = stored(rows, seals)
    frames = [decode_frame(chunk.data.tobytes(), int(position)) for position in chunk.positions]
    assert rows_of(decode(chunk)) == [expected(frame) for frame in frames]


@given(
    same=properties,
    size=st.integers(0, 9),
    count=st.integers(1, 40),
    seals=st.sets(st.integers(0, 40), max_size=4),
    cut=st.tuples(st.integers(0, 20), st.integers(0, 60)),
    flaw=st.none() | st.tuples(st.integers(0, 60), st.integers(0, 255)),
)
def test_uniform_messages_are_the_same_rows_and_the_same_failures(
    same: dict[str, str], size: int, count: int, seals: set[int], cut: tuple[int, int], flaw: tuple[int, int] | None
) -> None:
    rows = [(number, same, bytes([number] * size)) for number in range(count)]
    chunk = stored(rows, [number in seals for number in range(count)])
    if flaw is not None:
        spoilt = chunk.data.copy()
        spoilt[(int(chunk.positions[count // 2]) + flaw[0]) % len(spoilt)] = flaw[1]
        chunk = chunk._replace(data=spoilt)
    chunk = chunk.between(FIRST + cut[0], FIRST + cut[1])
    with mock.patch("pyspark_qb.arrow.frame_columns.LEAST", 2):
        fast = outcome(chunk)
    with mock.patch("pyspark_qb.arrow.decoding.uniform_messages", return_value=None):
        assert fast == outcome(chunk)


def outcome(chunk: FrameChunk) -> Any:
    try:
        return rows_of(decode(chunk))
    except (NotStored, PeerMisbehaved, ValueError, pa.ArrowInvalid) as error:
        return type(error) if isinstance(error, NotStored) else ValueError


@pytest.mark.parametrize("size", [0, 100])
def test_uniform_messages_are_read_as_tables(size: int) -> None:
    chunk = stored([(7, {"topic": "events", "key": "k"}, b"x" * size)] * 500, [number == 300 for number in range(500)])
    assert uniform_messages(chunk.data, chunk.positions, FIRST) is not None
    assert uniform_messages(chunk.data, chunk.positions, FIRST + 1) is None
    rows = rows_of(decode(chunk))
    assert [row["offset"] for row in rows] == [*range(FIRST, FIRST + 500)]
    assert {(row["value"], row["key"], row["timestamp"]) for row in rows} == {(b"x" * size, "k", 7000)}


@given(same=properties, count=st.integers(1, 9), body=st.binary(max_size=9))
def test_messages_with_the_same_properties_are_rows_with_the_same_ones(
    same: dict[str, str], count: int, body: bytes
) -> None:
    chunk = stored([(7, same, body)] * count)
    rows = rows_of(decode(chunk))
    assert len(rows) == count
    assert [row["properties"] for row in rows] == [expected(Frame(1, 0, 7, same, body))["properties"]] * count
    assert {row["key"] for row in rows} == {same.get("key")}


def test_of_a_repeated_property_the_first_counts() -> None:
    twice = b"topic=events\0key=a\0x=1\0key=b\0x=2\0"
    other = b"topic=events\0x=3\0"
    rows = rows_of(decode(stored([(0, twice, b""), (0, other, b""), (0, twice, b"")])))
    assert [(row["key"], row["properties"]) for row in rows] == [
        ("a", [("x", "1")]),
        (None, [("x", "3")]),
        ("a", [("x", "1")]),
    ]


def test_names_that_no_other_row_has_need_no_memory_of_their_own() -> None:
    rows = [(0, {f"name{number}": "", "again": "", "key": str(number)}, b"") for number in range(20_000)]
    found = decode(stored(rows), ("properties", "key")).to_pylist()
    assert found[19_999] == {"properties": [("name19999", ""), ("again", "")], "key": "19999"}


def test_heads_are_laid_out_as_core_frames_says() -> None:
    assert HEADS.itemsize == HEAD.size
    packed = np.frombuffer(HEAD.pack(1, 2, 3, 4, 5), HEADS)[0]
    assert tuple(int(value) for value in packed) == (1, 2, 3, 4, 5)


@pytest.mark.parametrize("with_properties", [True, False])
def test_the_types_are_exactly_those_that_spark_declares(with_properties: bool) -> None:
    schema = full_schema(with_properties)
    for rows in (
        [],
        [(5, {"topic": "events"}, b"x")],
        [(5, {"topic": "events", "key": str(n)}, b"x") for n in range(3)],
    ):
        batch = decode(stored(rows), schema.fieldNames())
        assert batch.schema.equals(to_arrow_schema(schema, timezone="UTC"))


@given(
    times=st.lists(st.integers(0, 30), max_size=9), first=st.integers(-5, 35_000), length=st.integers(-5_000, 35_000)
)
def test_only_rows_of_the_wanted_times_are_given_out(times: list[int], first: int, length: int) -> None:
    batch = decode(stored([(time, {"n": str(time)}, b"") for time in times]), times=Bounds(first, first + length))
    wanted = [(FIRST + at, str(time)) for at, time in enumerate(times) if first <= time * 1000 < first + length]
    assert [(row["offset"], row["properties"][0][1]) for row in rows_of(batch)] == wanted


def test_a_time_too_far_in_the_future_for_spark_becomes_its_last_one() -> None:
    rows = rows_of(decode(stored([(2**64 - 1, {}, b""), (LAST_MS, {}, b""), (0, {}, b"")])))
    assert [row["timestamp"] for row in rows] == [LAST_MS * 1000, LAST_MS * 1000, 0]


@given(start=st.integers(35, 50), end=st.integers(35, 50))
def test_a_chunk_is_cut_to_a_range_of_offsets(start: int, end: int) -> None:
    chunk = stored([(0, {}, str(number).encode()) for number in range(FIRST, FIRST + 6)])
    wanted = [number for number in range(FIRST, FIRST + 6) if start <= number < end]
    assert [row["offset"] for row in decode(chunk.between(start, end)).to_pylist()] == wanted


def test_frames_that_are_not_where_they_should_be_are_refused() -> None:
    good = stored([(0, {"a": "b"}, b"123"), (0, {}, b"")], [True])
    for positions in ([0, 1], [0, int(good.positions[1]) - len(SEAL)], [0, 10**6], [-1, 0]):
        with pytest.raises(NotStored) as refused:
            decode(good._replace(positions=np.array(positions, np.int64)))
        assert refused.value.index == (0 if positions[0] else 1)
    with pytest.raises(NotStored):
        decode(good._replace(first_offset=FIRST + 1))
    with pytest.raises(NotStored):
        decode(good._replace(data=good.data[:-1]))
