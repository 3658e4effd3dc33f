"""The conversation with one peer: bytes in, events out."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from qb.core.wire.errors import BadRequest, MessageTooLarge, PeerMisbehaved, UnknownType
from qb.core.wire.frames import HEAD, MAX_PROPERTIES, Frame, MessageType, decode_frame, encode_frame
from qb.doors.binary.publish_routes import MOST_KNOWN, Route
from qb.doors.binary.server_connection import PublishRun, RefusedFrame, ServerConnection, StageFrame

LIMIT = 1_000


def publish(number, body=b"body", timestamp=7, **properties):
    return encode_frame(MessageType.PUBLISH, number, timestamp, properties, body)


def read_all(connection, now_ms=99):
    """Return what a server would make of everything received: frames, refusals, and each message with its route."""
    seen, offset = [], 0
    while (event := connection.next_event()) is not None:
        if isinstance(event, PublishRun):
            run = connection.take_run(event.route, offset, now_ms)
            offset += len(run.positions)
            seen += [(event.route[:2], decode_frame(run.data, at)) for at in run.positions]
        elif isinstance(event, RefusedFrame):
            seen.append((event.number, type(event.error)))
        else:
            seen.append(event)
    return seen


requests = st.builds(
    lambda kind, number, body: encode_frame(kind, number, 0, {"method": "x"}, body),
    st.sampled_from([3, 4, 16, 17, 22, 1, 77]),
    st.integers(0, 9),
    st.binary(max_size=40),
)
publishes = st.builds(
    lambda number, body, topic, key, time: publish(number, body, time, topic=topic, **({"key": key} if key else {})),
    st.integers(0, 9),
    st.binary(max_size=40),
    st.sampled_from(["a", "b", "longer"]),
    st.sampled_from(["", "k", "key"]),
    st.sampled_from([0, 5]),
)


@given(st.lists(requests | publishes, max_size=12), st.integers(1, 9))
def test_events_do_not_depend_on_how_tcp_cuts_the_bytes(sent, step):
    stream = b"".join(sent)
    whole, cut = ServerConnection(LIMIT), ServerConnection(LIMIT)
    whole.receive(stream)
    expected, found = read_all(whole), []
    for at in range(0, len(stream), step):
        cut.receive(stream[at : at + step])
        found += read_all(cut)
    strip = [event[1]._replace(sequence_number=0) if isinstance(event[-1], Frame) else event for event in expected]
    assert strip == [event[1]._replace(sequence_number=0) if isinstance(event[-1], Frame) else event for event in found]
    assert len(found) == len(sent)


@given(st.lists(publishes, min_size=1, max_size=20))
def test_every_publish_becomes_a_data_frame_with_the_next_offset_and_nothing_else_changed(sent):
    connection = ServerConnection(LIMIT)
    connection.receive(b"".join(sent))
    for offset, (before, (_, after)) in enumerate(zip(sent, read_all(connection), strict=True)):
        before = decode_frame(before)
        assert after == Frame(1, offset, before.timestamp or 99, before.properties, before.body)


@given(st.binary(max_size=300), st.lists(publishes, max_size=3))
@example(b"\0\0\0\x1f", [])
@example(b"\xff" * 40, [])
def test_any_bytes_give_events_or_one_clear_refusal(garbage, before):
    connection = ServerConnection(LIMIT)
    connection.receive(b"".join(before) + garbage)
    try:
        read_all(connection)
    except PeerMisbehaved as error:
        assert str(error)
        connection.receive(publish(1, topic="a"))
        assert connection.next_event() is None, "after a broken frame nothing can be trusted"


@given(publishes, st.data())
def test_a_frame_with_any_byte_changed_never_crashes_the_parser(frame, data):
    at = data.draw(st.integers(0, len(frame) - 1))
    changed = bytearray(frame)
    changed[at] = data.draw(st.integers(0, 255))
    connection = ServerConnection(LIMIT)
    connection.receive(publish(3, topic="a") + bytes(changed) + publish(5, topic="a"))
    try:
        read_all(connection)
    except PeerMisbehaved:
        pass


def test_a_stage_frame_comes_out_byte_for_byte_however_long_its_body_may_be():
    connection = ServerConnection(LIMIT)
    frame = encode_frame(MessageType.STAGE, 5, 6, {"stage": "s"}, b"x" * (LIMIT + 100))
    connection.receive(frame + encode_frame(MessageType.STAGE, 7, 0, b"k=" + b"v" * MAX_PROPERTIES + b"\0"))
    assert connection.next_event() == StageFrame(5, {"stage": "s"}, frame, len(frame) - LIMIT - 100)
    refused = connection.next_event()
    assert (refused.number, type(refused.error)) == (7, MessageTooLarge)


def test_a_run_ends_where_the_numbers_skip():
    connection = ServerConnection(LIMIT)
    connection.receive(publish(1, topic="a") + publish(2, topic="a") + publish(4, topic="a"))
    run = connection.take_run(connection.next_event().route, 0, 0)
    assert (run.first_number, len(run.positions)) == (1, 2)
    assert connection.next_event().first_number == 4


def test_a_run_goes_on_over_other_keys_unless_keys_decide_the_partition():
    stream = publish(1, topic="a", key="k1") + publish(2, topic="a", key="key2") + publish(3, topic="a", key="key2")
    for by_key, expected in ((False, 3), (True, 1)):
        connection = ServerConnection(LIMIT)
        connection.receive(stream)
        event = connection.next_event()
        assert event.route == Route("a", None, "k1")
        assert len(connection.take_run(event.route, 0, 0, by_key=by_key).positions) == expected


def test_a_run_stops_at_its_limit_and_can_be_skipped():
    connection = ServerConnection(LIMIT)
    connection.receive(b"".join(publish(n, topic="a") for n in range(5)))
    route = connection.next_event().route
    assert len(connection.take_run(route, 0, 0, limit=2).positions) == 2
    assert connection.skip_run(connection.next_event().route) == 3


def test_a_broken_frame_behind_good_ones_does_not_take_them_along():
    connection = ServerConnection(LIMIT)
    broken = HEAD.pack(50, 9, 3, 0, 1_000) + b"\0" * 22
    connection.receive(publish(1, topic="a") + publish(2, topic="a") + broken)
    assert len(connection.take_run(connection.next_event().route, 0, 0).positions) == 2
    with pytest.raises(PeerMisbehaved):
        connection.next_event()


@pytest.mark.parametrize("length", [0, 31, LIMIT + MAX_PROPERTIES + 33, 2**32 - 1])
def test_an_impossible_length_is_refused_before_its_bytes_are_awaited(length):
    connection = ServerConnection(LIMIT)
    connection.receive(length.to_bytes(4, "big"))
    with pytest.raises(PeerMisbehaved, match=str(length)):
        connection.next_event()


@pytest.mark.parametrize(
    ("frame", "error"),
    [
        (publish(5, b"x" * (LIMIT + 1), topic="a"), MessageTooLarge),
        (publish(5, topic="a", big="x" * (MAX_PROPERTIES - 8)), MessageTooLarge),
        (publish(5, note="no topic"), BadRequest),
        (publish(5, topic="a", partition="-1"), BadRequest),
        (publish(5, topic="a", partition="one"), BadRequest),
        (encode_frame(1, 5), UnknownType),
        (encode_frame(32, 5), UnknownType),
        (encode_frame(999, 5), UnknownType),
    ],
)
def test_what_is_wrong_with_one_frame_is_said_and_the_conversation_goes_on(frame, error):
    connection = ServerConnection(LIMIT)
    connection.receive(frame + encode_frame(MessageType.HEARTBEAT, 6))
    refused = connection.next_event()
    assert (refused.number, type(refused.error)) == (5, error)
    assert connection.next_event().sequence_number == 6


def test_memory_of_routes_is_bounded():
    connection = ServerConnection(LIMIT)
    for number in range(5_000):
        connection.receive(publish(number, topic="a", key=str(number)))
        connection.take_run(connection.next_event().route, 0, 0)
    assert len(connection._routes) <= MOST_KNOWN
    assert connection.unread == 0
