"""A record of the journal is read back as it was written, or not at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qb.replication.journal.journal_records import (
    HEAD_BYTES,
    MOST_WINDOW,
    FenceRecord,
    JournalRecord,
    JournalRecordKind,
    PayloadAssembly,
    decode,
    decode_fence,
    encode,
    encode_fence,
    fragments,
)
from tests.support.journal_world import of_a_version

NUMBERS = st.integers(0, 2**64 - 1)
KINDS = st.sampled_from(JournalRecordKind)
RECORDS = st.builds(JournalRecord, KINDS, NUMBERS, NUMBERS, NUMBERS, st.binary(max_size=50))
ONE = JournalRecord(JournalRecordKind.WHOLE, 3, 77, 41, b"a sealed batch")


@given(RECORDS)
def test_a_record_comes_back_as_it_was_written(record: JournalRecord) -> None:
    assert decode(encode(record)) == record


def test_a_flipped_bit_anywhere_makes_it_no_record() -> None:
    data = encode(ONE)
    for at in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[at // 8] ^= 1 << at % 8
        assert decode(bytes(damaged)) is None


def test_a_record_that_is_cut_anywhere_is_none() -> None:
    data = encode(ONE)
    assert [end for end in range(len(data)) if decode(data[:end]) is not None] == []


@pytest.mark.parametrize(("version", "kind"), [(1, 9), (2, 2)])
def test_of_a_record_of_a_later_version_the_head_is_understood(version: int, kind: int) -> None:
    assert decode(of_a_version(version, kind, ONE)) == ONE._replace(kind=JournalRecordKind.UNKNOWN)


@given(st.integers(0, MOST_WINDOW), st.integers(1, MOST_WINDOW), st.text(max_size=20))
def test_a_fence_says_its_place_its_length_its_window_and_its_owner(index: int, window: int, owner: str) -> None:
    fence = FenceRecord(index, MOST_WINDOW + 1, window, owner)
    assert decode_fence(encode_fence(fence)) == fence


def test_a_fence_that_makes_no_sense_is_none() -> None:
    good = FenceRecord(0, 3, 2, "a")
    strange = [good._replace(index=3), good._replace(window=0), good._replace(count=MOST_WINDOW + 2)]
    assert [decode_fence(encode_fence(each)) for each in strange] == [None, None, None]
    assert decode_fence(b"\0") is None


@given(st.binary(max_size=200), st.integers(1, 40))
def test_a_payload_is_put_together_from_pieces_that_fit_into_records(payload: bytes, room: int) -> None:
    assembly = PayloadAssembly()
    pieces = list(fragments(payload, HEAD_BYTES + room))
    records = [JournalRecord(piece.kind, 1, 1, 0, piece.data) for piece in pieces]
    assert all(len(encode(record)) <= HEAD_BYTES + room for record in records)
    outcomes = [assembly.take(record) for record in records]
    assert outcomes[:-1] == [None] * (len(records) - 1)
    assert b"".join(outcomes[-1] or ()) == payload


def test_a_fence_drops_the_pieces_before_it() -> None:
    assembly = PayloadAssembly()
    part, last = fragments(b"ab", HEAD_BYTES + 1)
    for kind, data, whole in (
        (part.kind, part.data, None),
        (JournalRecordKind.FENCE, b"", None),
        (part.kind, part.data, None),
        (last.kind, last.data, (b"a", b"b")),
    ):
        assert assembly.take(JournalRecord(kind, 1, 1, 0, data)) == whole
