"""The frame layout: one definition, executed by struct."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qb.core.wire.errors import BadRequest, PeerMisbehaved
from qb.core.wire.frames import (
    HEAD,
    OVERHEAD,
    decode_frame,
    decode_properties,
    definition,
    encode_frame,
    encode_properties,
)

text = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
names = st.text(st.characters(exclude_characters="\0=", exclude_categories=["Cs"]), min_size=1)
numbers = st.integers(0, 2**64 - 1)
frames = st.tuples(st.integers(0, 2**32 - 1), numbers, numbers, st.dictionaries(names, text), st.binary())


@given(frames)
def test_the_struct_layout_equals_the_construct_definition(fields):
    kind, number, timestamp, properties, body = fields
    built = definition().build(
        {
            "message_type": kind,
            "sequence_number": number,
            "timestamp": timestamp,
            "properties": encode_properties(properties),
            "body": body,
        }
    )
    assert built == encode_frame(kind, number, timestamp, properties, body)


@given(frames, st.binary(max_size=9))
def test_a_frame_comes_back_as_it_was_sent_wherever_it_lies(fields, before):
    assert decode_frame(before + encode_frame(*fields) + b"after", len(before)) == fields


def test_the_smallest_frame_has_32_bytes():
    assert len(encode_frame(3)) == OVERHEAD == 32


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_inner_lengths_that_do_not_add_up_are_refused(properties_length, body_length):
    if properties_length + body_length == 8:
        return
    broken = HEAD.pack(40, 9, 1, 0, properties_length) + b"\0" * 8 + body_length.to_bytes(4, "big")
    with pytest.raises(PeerMisbehaved):
        decode_frame(broken)


@pytest.mark.parametrize("encoded", [b"a=b", b"a\0", b"=b\0", b"a=b\0\0", b"\0", b"\xff=b\0"])
def test_malformed_properties_are_refused(encoded):
    with pytest.raises(PeerMisbehaved):
        decode_properties(encoded)


@pytest.mark.parametrize("properties", [{"": "x"}, {"a=b": "x"}, {"a\0": "x"}, {"a": "x\0"}, {"a": "\ud800"}])
def test_properties_that_the_format_cannot_carry_are_refused(properties):
    with pytest.raises(BadRequest):
        encode_properties(properties)


def test_a_value_may_hold_equals_signs_and_the_first_of_a_repeated_name_counts():
    assert decode_properties(b"a=b=c\0a=d\0") == {"a": "b=c"}
