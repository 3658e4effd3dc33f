"""What a cell writes into its journal, read back from whatever pieces its records have."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qb.replication.engine.payloads import BatchPayload, ChangesPayload, decode_payload, encode_batch, encode_metadata
from qb.replication.jetstream.stream_follower import _unbroken
from qb.replication.journal.journal_store import StoredRecord
from qb.storage.commit.batch_commit import assemble
from tests.support.stores import NOON, make_run

BODIES = st.lists(st.binary(max_size=40), min_size=1, max_size=20)


def in_pieces(data: bytes, borders: Sequence[int]) -> list[bytes | memoryview]:
    """Cut data; every other piece is a view of something that can be written, as large messages are."""
    at = [0, *sorted({min(border, len(data) - 1) for border in borders} - {0}), len(data)]
    cut: list[bytes | memoryview] = [data[start:end] for start, end in itertools.pairwise(at)]
    cut[1::2] = [memoryview(bytearray(piece)).toreadonly() for piece in cut[1::2]]
    return cut


@given(bodies=BODIES, producer=st.sampled_from([0, 7]), borders=st.lists(st.integers(2, 2000), max_size=6))
def test_a_batch_is_the_same_however_records_cut_it(bodies: list[bytes], producer: int, borders: list[int]) -> None:
    batch, ranges = assemble([make_run(5, bodies, producer_id=producer, first_number=3)], NOON)
    found = decode_payload(*in_pieces(encode_batch(9, 2, batch, ranges), borders))
    assert isinstance(found, BatchPayload)
    assert (found.uid, found.partition, list(found.ranges)) == (9, 2, list(ranges))
    assert (found.batch.first_offset, found.batch.append_ms, found.batch.size) == (5, NOON, batch.size)
    assert list(found.batch.positions) == list(batch.positions)
    assert found.batch.data == batch.data


@pytest.mark.parametrize("border", [2, 3, 8])
def test_changes_are_the_same_however_records_cut_them(border: int) -> None:
    assert decode_payload(*in_pieces(encode_metadata(b"the changes"), [border])) == ChangesPayload(b"the changes")


@pytest.mark.parametrize(("positions", "whole"), [([5, 6, 7], 3), ([5, 7], 1), ([6, 7], 0), ([5], 1)])
def test_records_are_taken_up_to_where_one_is_missing(positions: list[int], whole: int) -> None:
    records = [StoredRecord(position, b"") for position in positions]
    assert _unbroken(records, 5) == records[:whole]
