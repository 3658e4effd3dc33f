"""What a STAGE frame may carry: exactly the DATA frames that the format's one definition describes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qb.core.wire.errors import BadRequest
from qb.core.wire.frames import HEAD, MAX_PROPERTIES, RESERVED, MessageType, decode_frame, definition, encode_frame
from qb.core.wire.runs.staged_frames import check_messages, number_messages, skip_messages

ALL = 1 << 30
FORMAT = definition()
texts = st.text(st.characters(exclude_characters="\0=", exclude_categories=("Cs",)), min_size=1, max_size=8)
names = texts.filter(lambda name: name not in RESERVED)
properties = st.dictionaries(names, texts, max_size=3).map(lambda own: {"topic": "t", **own})
numbers = st.integers(0, 2**64 - 1)
different = st.lists(st.tuples(numbers, properties, st.binary(max_size=30)), min_size=1, max_size=8)
uniform = st.tuples(
    properties, st.lists(st.tuples(numbers, st.binary(min_size=4, max_size=4)), min_size=1, max_size=8)
).map(lambda drawn: [(number, drawn[0], body) for number, body in drawn[1]])
messages = (
    different | uniform | st.tuples(uniform, different, uniform).map(lambda parts: [*parts[0], *parts[1], *parts[2]])
)


@pytest.fixture(autouse=True, scope="module")
def few_are_enough():
    """Two frames of one length are handled as a table, so that short runs test it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qb.core.wire.runs.uniform_frames.LEAST", 2)
        yield


def frame(own: dict[str, str] | bytes = b"topic=t\0", body: bytes = b"x", kind: int = MessageType.DATA) -> bytes:
    return encode_frame(kind, 7, 8, own, body)


def check(data: bytes, most: int = ALL, max_body: int = 1000) -> int:
    """Return how many messages stand in `data`, looked at in portions of `most` bytes."""
    count = at = 0
    while at < len(data):
        more, at = check_messages(data, at, "t", max_body, most)
        count += more
    return count


@given(messages, st.integers(1, 200))
def test_whatever_the_definition_builds_is_counted_in_portions_of_any_size(sent, most):
    built = [
        FORMAT.build(
            {
                "message_type": 1,
                "sequence_number": number,
                "timestamp": 5,
                "properties": "".join(f"{key}={value}\0" for key, value in own.items()).encode(),
                "body": body,
            }
        )
        for number, own, body in sent
    ]
    assert check(b"".join(built), most) == len(sent)


@given(messages, st.data())
def test_a_mutilated_run_is_refused_or_is_still_a_row_of_data_frames_for_the_topic(sent, data):
    whole = bytearray(b"".join(encode_frame(1, number, 5, own, body) for number, own, body in sent))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(whole) - 1))
        whole[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(whole)))
    mutilated = bytes(whole[:cut])
    try:
        count = check(mutilated)
    except BadRequest:
        return
    at = 0
    for _ in range(count):
        parsed = FORMAT.parse(mutilated[at:])
        assert parsed.message_type == 1
        assert decode_frame(mutilated, at).properties["topic"] == "t"
        at += parsed.total_length
    assert at == len(mutilated)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (frame(kind=MessageType.PUBLISH), "type 9"),
        (frame(kind=MessageType.SEAL), "type 32"),
        (frame(b""), "do not begin with 'topic=t'"),
        (frame(b"topic=tt\0"), "do not begin with 'topic=t'"),
        (frame(b"key=1\0topic=t\0"), "do not begin with 'topic=t'"),
        (frame(b"topic=t\0key"), "key=value"),
        (frame(b"topic=t\0key\0"), "key=value"),
        (frame(b"topic=t\0=1\0"), "key=value"),
        (frame(b"topic=t\0\0"), "key=value"),
        (frame(b"topic=t\0key=\xff\0"), "not UTF-8"),
        (frame(body=b"x" * 1001), "limit of 1000"),
        (frame(b"topic=t\0k=" + b"v" * MAX_PROPERTIES + b"\0"), "properties_length 65547 is too large"),
        (frame()[:-1], "of which only"),
        (frame()[:20], "too few for a frame"),
        (b"\0\0\0\x1f" + frame()[4:], "total_length 31 is not"),
        (b"\xff\xff\xff\xff" + frame()[4:], "total_length 4294967295 is not"),
        (frame()[:24] + b"\xff\xff\xff\xff" + frame()[28:], "properties_length 4294967295 is too large"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("before", [b"", frame(), frame(b"topic=t\0key=k\0") * 2], ids=["alone", "second", "third"])
def test_the_refusal_says_which_message_is_wrong_and_why(wrong, says, before):
    with pytest.raises(BadRequest, match=f"at byte {len(before)} of this STAGE frame.*{says}"):
        check(before + wrong)


@given(messages, st.integers(0, 2**63), st.integers(1, 200))
def test_numbering_changes_nothing_but_the_sequence_numbers(sent, first_offset, most):
    whole = bytearray(b"".join(encode_frame(1, number, 5, own, body) for number, own, body in sent))
    original, at, found = bytes(whole), 0, []
    while at < len(whole):
        numbered = number_messages(whole, at, first_offset + len(found), most)
        assert numbered.positions
        assert len(numbered.positions) == 1 or len(numbered.data) <= most
        found += [decode_frame(numbered.data, position) for position in numbered.positions]
        at = numbered.end
    expected, at = [], 0
    for index in range(len(sent)):
        assert skip_messages(original, index) == at
        expected.append(decode_frame(original, at)._replace(sequence_number=first_offset + index))
        at += len(original) if index == len(sent) - 1 else int.from_bytes(original[at : at + 4], "big")
    assert found == expected


@pytest.mark.parametrize("first_offset", [0, 200, 65_000, 65_536, 2**24 - 7, 2**40 - 1])
def test_many_messages_of_one_length_are_numbered_across_every_carry(first_offset):
    whole, at, found = bytearray(encode_frame(1, 2**64 - 1, 5, b"topic=t\0", b"abc") * 70_000), 0, []
    while at < len(whole):
        numbered = number_messages(whole, at, first_offset + len(found), len(whole))
        assert isinstance(numbered.positions, range)
        found += [HEAD.unpack_from(numbered.data, position)[2] for position in numbered.positions]
        at = numbered.end
    assert found == [*range(first_offset, first_offset + 70_000)]
