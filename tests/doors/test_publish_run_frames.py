"""PUBLISH_RUN: what it stands for is stored and refused as the PUBLISH frames would be, by columns and one by one."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qb.clients.protocol.publish_frames import MixedPublishForm, PublishForm
from qb.core.wire.errors import PeerMisbehaved
from qb.core.wire.frames import HEAD, LENGTH, OVERHEAD, MessageType, encode_frame, encode_properties
from qb.core.wire.message_rules import LATEST_MS
from qb.core.wire.runs.publish_table import LEAST, MOST_BYTES, MOST_MESSAGES, as_publishes
from qb.doors.binary import publish_columns
from qb.doors.binary.publish_columns import PublishColumns
from qb.doors.binary.publish_routes import Route
from qb.doors.binary.server_connection import PublishRun, RefusedFrame, ServerConnection
from tests.support.publish_runs import Message, run_of

LIMIT = 400  # bytes of a body


def frame_of(number: int, message: Message) -> bytes:
    properties, body, time = message
    return encode_frame(MessageType.PUBLISH, number, time, properties, body)


def limited(max_body: int = LIMIT) -> ServerConnection:
    """Return a connection that takes such bodies, and frames as long as a run may be."""
    connection = ServerConnection(MOST_BYTES)
    connection._max_body = max_body
    return connection


def outcome(connection: ServerConnection, stream: bytes, step: int = 0, **how: Any) -> list[Any]:
    """Return what becomes of all messages: where each goes and what is stored of it, or why it is not."""
    found: list[Any] = []
    offset = 1_000
    try:
        for at in range(0, len(stream), step or len(stream)):
            connection.receive(stream[at : at + (step or len(stream))])
            while (event := connection.next_event()) is not None:
                if isinstance(event, RefusedFrame):
                    found.append((event.number, type(event.error), str(event.error)))
                    continue
                assert isinstance(event, PublishRun)
                run = connection.take_run(event.route, offset, 77, **how)
                assert (run.first_offset, run.first_number) == (offset, event.first_number)
                ends = [*run.positions[1:], len(run.data)]
                for number, (start, end) in enumerate(zip(run.positions, ends, strict=True), event.first_number):
                    found.append((number, event.route[:2], bytes(run.data[start:end])))
                offset += len(run.positions)
    except PeerMisbehaved as error:
        found.append(str(error))
    return found


properties = st.sampled_from(
    [
        {"topic": "a", "partition": "1", "key": "k"},
        {"topic": "a", "partition": "1", "key": "another key"},
        {"topic": "a", "partition": "1"},
        {"topic": "a", "partition": "1", "key": "k", "colour": "grün"},
    ]
).map(encode_properties)
odd = st.sampled_from(
    [
        b"",
        b"topic=b\0partition=1\0",
        b"topic=a\0partition=2\0",
        b"topic=a\0partition=x\0",
        b"topic=a\0partition=1\0subscription_id=s\0",
        b"topic=a\0partition=1",
        b"topic=a\0partition=1\0\xff=\0",
        b"partition=1\0",
        b"topic=a\0partition=1\0long=" + b"x" * 2_000 + b"\0",
        b"topic=a\0partition=1\0longer=" + b"x" * 70_000 + b"\0",
    ]
)
times = st.sampled_from([0, 5, LATEST_MS])
lawful = st.lists(st.tuples(properties, st.binary(max_size=20), times), min_size=1, max_size=8)
unlawful = st.one_of(
    st.tuples(odd, st.binary(max_size=20), times),
    st.tuples(properties, st.just(b"x" * (LIMIT + 1)), times),
    st.tuples(properties, st.binary(max_size=20), st.sampled_from([LATEST_MS + 1, 2**64 - 1])),
)


@given(lawful, st.integers(LEAST, 200), st.integers(0, 255), st.sampled_from([0, 997]))
def test_a_run_is_stored_as_its_publishes_would_be(pattern, count, noise, step):
    messages = (pattern * count)[:count]
    single = b"".join(frame_of(number, message) for number, message in enumerate(messages, 7))
    run = run_of(7, messages, noise)
    expected = outcome(limited(), single)
    assert [number for number, *_ in expected] == list(range(7, 7 + count))
    assert outcome(limited(), run, step) == expected
    with mock.patch.object(publish_columns, "LEAST", MOST_BYTES):
        assert outcome(limited(), run, step) == expected


@given(lawful, unlawful, st.data())
def test_what_is_odd_in_a_run_is_refused_in_the_same_words_and_the_others_are_stored(pattern, bad, data):
    messages = pattern * (LEAST // len(pattern) + 1)
    messages.insert(data.draw(st.integers(0, len(messages))), bad)
    single = b"".join(frame_of(number, message) for number, message in enumerate(messages, 1))
    assert outcome(limited(), run_of(1, messages)) == outcome(limited(), single)


@given(lawful, st.binary(min_size=1, max_size=4), st.data())
def test_a_mutilated_run_is_refused_or_taken_the_same_by_columns_and_one_by_one(pattern, damage, data):
    run = bytearray(run_of(1, pattern * (LEAST // len(pattern) + 1)))
    at = data.draw(st.integers(LENGTH.size, len(run) - len(damage)))
    run[at : at + len(damage)] = damage
    if HEAD.unpack_from(run)[1] != MessageType.PUBLISH_RUN:
        return
    by_columns = outcome(limited(), bytes(run))
    with mock.patch.object(publish_columns, "LEAST", MOST_BYTES):
        assert outcome(limited(), bytes(run)) == by_columns


def test_messages_that_go_one_way_are_taken_by_columns_and_others_are_not():
    messages = [(b"topic=a\0partition=1\0key=%d\0" % (number % 9), b"x" * number, 0) for number in range(LEAST)]
    taken: list[int] = []
    numbered = PublishColumns.numbered

    def noted(self, *arguments):
        taken.append(self.count)
        return numbered(self, *arguments)

    with mock.patch.object(PublishColumns, "numbered", noted):
        assert len(outcome(limited(), run_of(1, messages))) == LEAST
        assert taken == [LEAST]
        for other in (
            messages[1:],  # too few
            [*messages, (b"topic=a\0partition=2\0", b"", 0)],
            [*messages, (b"topic=a\0partition=1\0long=" + b"x" * 2_000 + b"\0", b"", 0)],
            [(b"topic=a\0partition=1\0key=%b\0" % (b"k" * n), b"", 0) for n in range(publish_columns.MOST_LENGTHS + 1)],
        ):
            assert len(outcome(limited(), run_of(1, other))) == len(other)
        assert taken == [LEAST]


def test_a_run_is_cut_where_its_log_takes_no_more_of_it_and_where_the_key_changes():
    messages = [(b"topic=a\0key=%d\0" % (number // 50), b"%d" % number, 0) for number in range(200)]
    single = b"".join(frame_of(number, message) for number, message in enumerate(messages, 1))
    run = run_of(1, messages)
    for how in ({"limit": 70}, {"limit": 200}, {"by_key": True}, {"by_key": True, "limit": 30}):
        assert outcome(limited(), run, **how) == outcome(limited(), single, **how)
    connection = limited()
    connection.receive(run)
    event = connection.next_event()
    assert isinstance(event, PublishRun)
    assert event.route == Route("a", None, "0")
    assert len(connection.take_run(event.route, 0, 0, by_key=True).positions) == 50
    assert connection.skip_run(event.route) == 150
    assert connection.unread == 0


def test_a_run_that_comes_again_as_an_event_is_taken_once():
    connection = limited()
    connection.receive(run_of(1, [(b"topic=a\0", b"x" * n, 0) for n in range(LEAST)]))
    assert connection.next_event() == connection.next_event()
    assert connection.skip_run(Route("a", None, None)) == LEAST
    assert connection.next_event() is None


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (encode_frame(MessageType.PUBLISH_RUN, 1, 0, {}, b""), "'count' from 1"),
        (encode_frame(MessageType.PUBLISH_RUN, 1, 0, {"count": "0"}, b""), "'count' from 1"),
        (encode_frame(MessageType.PUBLISH_RUN, 1, 0, {"count": str(MOST_MESSAGES + 1)}, b""), "'count' from 1"),
        (encode_frame(MessageType.PUBLISH_RUN, 1, 0, {"count": "2"}, bytes(16)), "how long its 2 frames are"),
        (encode_frame(MessageType.PUBLISH_RUN, 1, 0, {"count": "1"}, bytes(3)), "how long its 1 frames are"),
        (encode_frame(MessageType.PUBLISH_RUN, 1, 0, {"count": "1"}, b"\xff" * 8 + bytes(32)), "how long its 1"),
        (encode_frame(MessageType.PUBLISH_RUN, 1, 0, {"count": "1"}, bytes(8 + OVERHEAD + 1)), "how long its 1"),
        (encode_frame(MessageType.PUBLISH_RUN, 1, 0, {"count": "1"}, bytes(MOST_BYTES)), "at most are allowed"),
        (encode_frame(MessageType.PUBLISH_RUN, 2**64 - 1, 0, {"count": "2"}, bytes(80)), "are too large"),
        (HEAD.pack(40, MessageType.PUBLISH_RUN, 1, 0, 30) + bytes(12), "do not add up"),
    ],
)
def test_a_run_whose_lengths_do_not_add_up_ends_the_connection_in_words(frame, words):
    connection = limited()
    connection.receive(frame)
    with pytest.raises(PeerMisbehaved, match=words):
        connection.next_event()
    assert connection.next_event() is None


def test_a_form_makes_a_run_of_what_its_frames_are():
    plain, keyed = PublishForm("a", 1, timestamp_ms=5), PublishForm("a", 1, "key", {"colour": "red"})
    bodies = [b"x" * number for number in range(100)]
    parts = [(plain, keyed)[number % 2].parts for number in range(100)]
    for form in (plain, MixedPublishForm(parts)):
        run = form.publishes(9, bodies, MOST_BYTES)
        assert HEAD.unpack_from(run)[1] == MessageType.PUBLISH_RUN
        assert as_publishes(run) == form.frames(9, bodies)
        assert form.publishes(9, bodies, len(run)) == run
        assert form.publishes(9, bodies, len(run) - 1) == form.frames(9, bodies)
    few = bodies[1:LEAST]
    assert plain.publishes(9, few, MOST_BYTES) == plain.frames(9, few)
    assert MixedPublishForm(parts[1:LEAST]).publishes(9, few, MOST_BYTES) == MixedPublishForm(parts[1:LEAST]).frames(
        9, few
    )
    uniform = [b"x" * 100] * 100
    assert plain.publishes(1, uniform, MOST_BYTES) == plain.frames(1, uniform)  # a table of their own
    many = [b"x" * (number % 2) for number in range(MOST_MESSAGES + 1)]
    assert plain.publishes(1, many, MOST_BYTES) == plain.frames(1, many)
