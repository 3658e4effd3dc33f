"""Frames of one length, handled by columns: the same as frame by frame, only faster."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qb.clients.protocol import publish_frames as publishing
from qb.clients.protocol.prepared_frames import PreparedFrames
from qb.clients.protocol.publish_frames import PublishForm, portions
from qb.core.wire.errors import PeerMisbehaved
from qb.core.wire.frames import MessageType, encode_frame
from qb.core.wire.runs.uniform_frames import LEAST, UniformFrames
from qb.doors.binary.server_connection import PublishRun, ServerConnection
from qb.storage.engine import AppendRun

LIMIT = 5_000
PERIOD = 1 << 16  # numbers after which their last two bytes begin anew


def publishes(count: int, first_number: int = 1, size: int = 20, timestamp: int = 0) -> bytearray:
    frames = [
        encode_frame(
            MessageType.PUBLISH, first_number + number, timestamp, {"topic": "t"}, b"%04d" % number * (size // 4)
        )
        for number in range(count)
    ]
    return bytearray(b"".join(frames))


def runs(data: bytes | bytearray, first_offset: int, limit: int | None = None) -> list[AppendRun | str]:
    """Return what a server makes of these bytes."""
    peer, found, offset = ServerConnection(LIMIT), list[AppendRun | str](), first_offset
    peer.receive(data)
    try:
        while (event := peer.next_event()) is not None:
            if not isinstance(event, PublishRun):
                found.append(repr(event))
                continue
            run = peer.take_run(event.route, offset, 99, limit=limit)
            found.append(run._replace(data=bytes(run.data), positions=list(run.positions)))
            offset += len(run.positions)
    except PeerMisbehaved as error:
        found.append(str(error))
    return found


def one_by_one(data: bytes | bytearray, first_offset: int, limit: int | None = None) -> list[AppendRun | str]:
    """The same, without columns."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UniformFrames, "__bool__", lambda rows: False)
        return runs(data, first_offset, limit)


# Close to where the last two bytes of a number begin anew, and where they do not
NUMBERS = st.sampled_from([0, 1, 200, PERIOD - 100, PERIOD - LEAST, PERIOD - 1, PERIOD, 2**32 - 80, 2**64 - 500])


@given(st.integers(1, 300), NUMBERS, NUMBERS, st.sampled_from([0, 7]), st.sampled_from([None, 1, 70, 200]), st.data())
def test_columns_give_what_a_loop_gives_whatever_byte_is_wrong(count, number, offset, timestamp, limit, data):
    sent = publishes(count, number, timestamp=timestamp)
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(sent) - 1))
        sent[at] ^= data.draw(st.integers(1, 255))
    if data.draw(st.booleans()):
        del sent[data.draw(st.integers(0, len(sent) - 1)) :]
    if data.draw(st.booleans()):
        sent += publishes(3, number + count, size=24) + publishes(100, number + count + 3)
    assert runs(sent, offset, limit) == one_by_one(sent, offset, limit)


def test_a_table_is_found_and_its_positions_are_a_range():
    peer = ServerConnection(LIMIT)
    sent = publishes(1_000)
    peer.receive(sent)
    event = peer.next_event()
    assert isinstance(event, PublishRun)
    run = peer.take_run(event.route, 5, 99)
    assert run.positions == range(0, len(sent), len(sent) // 1_000)


def test_a_table_needs_enough_frames_and_the_same_bytes_in_each():
    few, many = publishes(LEAST - 1), publishes(LEAST)
    head_size = 32 + len(b"topic=t\0")
    assert not UniformFrames.at(few, 0, len(few))
    assert UniformFrames.at(many, 0, len(many)).sharing_head(head_size).count == LEAST
    assert not UniformFrames.at(many, 0, len(many), LEAST - 1)
    many[-1 - 20] ^= 1  # the last byte of the last head
    assert UniformFrames.at(many, 0, len(many)).sharing_head(head_size).count == LEAST - 1


@given(st.integers(1, 300), NUMBERS, st.integers(0, 300), st.sampled_from([(0, 4), (0, 8), (24, 40)]))
def test_the_rows_that_share_columns_are_those_that_a_loop_finds(count, number, different, span):
    rows = publishes(count, number)
    length = len(rows) // count
    if different < count:
        rows[different * length + span[0]] ^= 1
    found = UniformFrames(rows, 0, length, count).sharing(span)
    firsts = [rows[at + span[0] : at + span[1]] == rows[span[0] : span[1]] for at in range(0, len(rows), length)]
    assert found.count == (firsts.index(False) if False in firsts else count)


@given(st.integers(1, 300), NUMBERS, st.binary(min_size=20, max_size=20))
def test_rows_get_numbers_that_follow_by_one_across_every_carry(count, first, body):
    first = min(first, 2**64 - count)
    rows = bytearray(encode_frame(MessageType.DATA, 2**64 - 1, 3, {"topic": "t"}, body) * count)
    UniformFrames(rows, 0, len(rows) // count, count).number(first)
    expected = [encode_frame(MessageType.DATA, first + each, 3, {"topic": "t"}, body) for each in range(count)]
    assert rows == b"".join(expected)


@given(st.integers(1, 200), NUMBERS.filter(lambda number: number < 2**63), st.integers(0, 50), st.booleans())
def test_a_form_makes_the_same_frames_of_bodies_of_one_length(count, first_number, size, last_differs):
    form = PublishForm("t", 3, "key", {"colour": "red"}, 5)
    bodies = [bytes([number % 256]) * size for number in range(count)]
    if last_differs:
        bodies[-1] += b"!"
    made = form.frames(first_number, bodies)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publishing, "LEAST", 10**9)
        assert bytes(made) == form.frames(first_number, bodies)


@given(st.integers(0, 200), NUMBERS.filter(lambda number: number < 2**63), st.booleans())
def test_prepared_frames_get_their_type_and_numbers(count, first_number, last_differs):
    bodies = [b"%04d" % number for number in range(count)]
    if bodies and last_differs:
        bodies[-1] += b"!"

    def made(type: int, first: int, step: int) -> bytes:
        frames = [encode_frame(type, first + step * i, 7 + i, {"topic": "t"}, body) for i, body in enumerate(bodies)]
        return b"".join(frames)

    prepared = PreparedFrames(made(MessageType.DATA, 0, 0))
    assert prepared.frames(first_number, bodies) == made(MessageType.PUBLISH, first_number, 1)


@given(st.lists(st.integers(0, 60), max_size=80), st.integers(1, 300))
def test_a_list_is_cut_into_portions_that_hold_every_body_once(sizes, enough):
    bodies = [bytes(size) for size in sizes]
    found = list(portions(bodies, 10, 100, enough))
    assert [body for portion in found for body in portion] == bodies
    assert all(portion and sum(map(len, portion)) <= 2 * enough + 100 for portion in found)


def test_a_table_ends_where_the_next_partition_begins():
    peer, forms = ServerConnection(LIMIT), [PublishForm("t", partition) for partition in (9, 10, 11)]
    frames = [form.frames(1 + 200 * number, [b"x" * 50] * 200) for number, form in enumerate(forms)]
    peer.receive(b"".join(frames))
    for frame in frames:
        event = peer.next_event()
        assert isinstance(event, PublishRun)
        run = peer.take_run(event.route, 7, 99)
        assert run.positions == range(0, len(frame), len(frame) // 200)
