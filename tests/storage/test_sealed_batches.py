"""The byte layout of a log."""

from __future__ import annotations

import struct
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qb.core.wire.frames import MessageType, decode_frame
from qb.storage.engine import ProducerRange
from qb.storage.log.sealed_batches import (
    BadBatch,
    IncompleteBatch,
    SealedBatch,
    around,
    find_seal,
    next_batch,
    seal,
    walk,
)
from tests.support.stores import NOON, frames


def sealed(first_offset: int, bodies: list[bytes], ranges: list[ProducerRange] | None = None, ms: int = NOON) -> bytes:
    data = b"".join(frames(first_offset, bodies))
    return data + seal([data], first_offset, len(bodies), ms, ranges or [])


def walk_bytes(data: bytes, offset: int = 0, window: int = 100) -> list[SealedBatch]:
    return list(walk(lambda at, length: data[at : at + length], 0, len(data), offset, window))


LOG = (
    sealed(0, [])
    + sealed(0, [b"one", b""])
    + sealed(2, [b"three" * 50], [ProducerRange(7, 1, 2, 1)])
    + sealed(3, [b"4"])
)


def test_a_seal_is_laid_out_as_the_documentation_says() -> None:
    data = b"".join(frames(10, [b"a", b"b"]))
    frame = seal([data[:5], data[5:]], 10, 2, NOON, [ProducerRange(1, 2, 10, 1), ProducerRange(3, 4, 11, 1)])
    head = decode_frame(frame)
    assert head[:4] == (MessageType.SEAL, 10, NOON, {})
    assert struct.unpack_from(">III", head.body) == (crc32(data + frame[:32] + frame[36:]), 2, len(data))
    assert list(struct.iter_unpack(">QQQI", head.body[12:])) == [(1, 2, 10, 1), (3, 4, 11, 1)]


@given(st.integers(1, 400))
def test_a_walk_finds_the_same_batches_whatever_is_read_at_a_time(window: int) -> None:
    found = walk_bytes(LOG, window=window)
    assert [(batch.first_offset, len(batch.positions), batch.next_offset) for batch in found] == [
        (0, 0, 0), (0, 2, 2), (2, 1, 3), (3, 1, 4)
    ]  # fmt: skip
    assert found[2].ranges == [ProducerRange(7, 1, 2, 1)]
    assert b"".join(bytes(batch.raw) for batch in found) == LOG
    bodies = [decode_frame(batch.raw, position).body for batch in found for position in batch.positions]
    assert bodies == [b"one", b"", b"three" * 50, b"4"]


@pytest.mark.parametrize("bit", [0, 3, 7])
def test_a_flip_of_any_bit_is_noticed_where_its_batch_begins(bit: int) -> None:
    starts = [batch.position for batch in walk_bytes(LOG)]
    for at in range(len(LOG)):
        flipped = bytearray(LOG)
        flipped[at] ^= 1 << bit
        with pytest.raises(BadBatch) as caught:
            walk_bytes(bytes(flipped))
        assert caught.value.position == max(start for start in starts if start <= at)


def test_a_walk_from_the_wrong_offset_finds_nothing() -> None:
    with pytest.raises(BadBatch):
        walk_bytes(LOG, offset=1)


def test_a_batch_cut_anywhere_is_incomplete_and_never_half_there() -> None:
    batch = sealed(5, [b"x" * 30, b"y"])
    for length in range(len(batch)):
        with pytest.raises(IncompleteBatch):
            next_batch(memoryview(batch)[:length], 0, 5)
    assert len(next_batch(memoryview(batch + b"more"), 0, 5).raw) == len(batch)


def test_the_seal_behind_a_record_says_where_its_batch_begins() -> None:
    batch = sealed(5, [b"x" * 30, b"y", b"z"])
    for number, position in enumerate(next_batch(memoryview(batch), 0, 5).positions):
        assert around(memoryview(batch)[position:], 5 + number) == (position, 5)


def test_a_later_seal_is_found_behind_a_bad_spot() -> None:
    assert find_seal(b"garbage" + LOG, 0) is not None
    assert find_seal(b"garbage" + sealed(3, [b"4"]), 3) is not None


def test_nothing_but_a_later_seal_counts_as_one() -> None:
    batch = sealed(3, [b"4"])
    assert find_seal(batch[:-1], 3) is None
    assert find_seal(batch, 4) is None  # it is of earlier messages
    assert find_seal(sealed(9, []), 3) is None  # an empty batch only begins a segment
    assert find_seal(b"\0\0\0\x20" * 1000, 0) is None
    assert find_seal(batch[1:], 3) is None
