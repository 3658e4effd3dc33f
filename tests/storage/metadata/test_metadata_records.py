"""The byte layout of the metadata log."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qb.storage.metadata import metadata_records
from qb.storage.metadata.metadata_records import (
    BadRecord,
    ChainEnd,
    RecordKind,
    StoredValue,
    apply_changes,
    check_order,
    decode_changes,
    decode_record,
    encode_changes,
    encode_record,
    encode_snapshot,
    holds_later_record,
)

values = st.builds(StoredValue, st.binary(max_size=30), st.integers(1, 2**64 - 1))
changes = st.lists(st.tuples(st.text(max_size=20), st.none() | values), max_size=10)


@given(changes)
def test_changes_are_what_they_were_encoded_from(made):
    assert list(decode_changes(encode_changes(made))) == made


def test_a_record_looks_as_the_specification_says():
    body = encode_changes([("topic/a", StoredValue(b'{"n":1}', 3)), ("b", None)])
    record, end = encode_record(RecordKind.CHANGES, 7, 0x01020304, body)
    assert body.hex() == (
        "00000007" "00000007" "0000000000000003" + b"topic/a".hex() + b'{"n":1}'.hex()
        + "00000001" "ffffffff" "0000000000000000" + b"b".hex()
    )  # fmt: skip
    assert record.hex() == "00000047" + b"QBMc".hex() + "000000000000000701020304ea305507" + body.hex()
    assert end == ChainEnd(7, 0xEA305507)


@given(changes, st.data())
def test_a_flip_of_any_bit_of_a_record_is_found(made, data):
    record, _ = encode_record(RecordKind.CHANGES, 1, 2, encode_changes(made))
    bit = data.draw(st.integers(0, len(record) * 8 - 1))
    flipped = bytearray(record)
    flipped[bit // 8] ^= 1 << bit % 8
    with pytest.raises(BadRecord):
        decode_record(flipped)


@pytest.mark.parametrize("cut", [1, 15, 17, 20, 24])
def test_changes_that_end_too_soon_are_refused(cut):
    body = encode_changes([("key", StoredValue(b"value", 1))])
    with pytest.raises(BadRecord):
        list(decode_changes(body[:-cut] if cut < len(body) else body[:1]))


@given(st.lists(changes, max_size=8))
def test_the_state_is_a_function_of_the_records_also_through_a_snapshot_of_any_of_them(batches):
    entries, end = {}, ChainEnd()
    for batch in batches:
        apply_changes(entries, batch)
        end = ChainEnd(end.number + 1, 0)
        again: dict[str, StoredValue] = {}
        for record, _ in encode_snapshot(entries, end):
            apply_changes(again, decode_changes(decode_record(record).body))
        assert list(again.items()) == list(entries.items())


def test_a_long_snapshot_has_parts_that_continue_each_other(monkeypatch):
    monkeypatch.setattr(metadata_records, "PART_BYTES", 50)
    entries = {f"key{number}": StoredValue(b"x" * 20, 1) for number in range(10)}
    records = [decode_record(record) for record, _ in encode_snapshot(entries, ChainEnd(5, 9))]
    assert [record.kind for record in records] == [RecordKind.SNAPSHOT_PART] * 3 + [RecordKind.SNAPSHOT]
    assert [record.number for record in records] == [5] * 4
    assert [record.previous for record in records] == [9, *(record.crc for record in records[:-1])]
    check_order(None, records[0], 5)
    for before, record in pairwise(records):
        check_order(before, record, 5)


def record_of(kind, number, previous=0):
    return decode_record(encode_record(kind, number, previous, b"")[0])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, (RecordKind.CHANGES, 5)),
        (None, (RecordKind.SNAPSHOT, 4)),
        ((RecordKind.SNAPSHOT_PART, 5), (RecordKind.CHANGES, 6)),
        ((RecordKind.SNAPSHOT_PART, 5), (RecordKind.SNAPSHOT, 6)),
        ((RecordKind.SNAPSHOT, 5), (RecordKind.SNAPSHOT, 5)),
        ((RecordKind.SNAPSHOT, 5), (RecordKind.CHANGES, 5)),
        ((RecordKind.CHANGES, 6), (RecordKind.CHANGES, 8)),
    ],
)
def test_a_record_that_does_not_follow_is_refused(before, after):
    first = before and record_of(*before)
    with pytest.raises(BadRecord, match="does not belong here"):
        check_order(first, record_of(*after, first.crc if first else 0), 5)


def test_a_record_of_another_chain_is_refused():
    with pytest.raises(BadRecord, match="does not continue"):
        check_order(record_of(RecordKind.CHANGES, 6), record_of(RecordKind.CHANGES, 7, 1), 5)


def test_a_later_record_is_found_behind_any_rubbish_and_an_older_one_is_not():
    record, _ = encode_record(RecordKind.CHANGES, 8, 0, b"")
    assert holds_later_record(b"QBMcQBM\0" + record + b"rest", 7)
    assert not holds_later_record(b"QBMcQBM\0" + record + b"rest", 8)
    assert not holds_later_record(record[:-1], 7)
    assert not holds_later_record(b"", 7)
