"""Pulling messages: what FETCH returns, and when."""

from __future__ import annotations

import struct

import pytest
import trio

from qb.core.wire.clock import now_ms
from qb.core.wire.frames import MessageType, decode_frame, frame_length


def stored(frame):
    """Return the messages in the body of a FETCH answer as (offset, body)."""
    found, at = [], 0
    while at < len(frame.body):
        inner = decode_frame(frame.body, at)
        if inner.type == MessageType.DATA:
            found.append((inner.sequence_number, inner.body))
        at += frame_length(frame.body, at)
    assert len(found) == int(frame.properties["count"])
    return found


async def fetch(peer, offset, **properties):
    return await peer.ask(MessageType.FETCH, 9, topic="a", offset=str(offset), **properties)


async def filled(connect, count=10, **topic):
    peer = await connect()
    await peer.ask(MessageType.CREATE_TOPIC, 1, topic="a", **topic)
    for number in range(count):
        await peer.publish("a", b"%d" % number)
    return peer


async def test_messages_come_as_stored_from_the_offset_on(a_broker):
    async with a_broker() as connect:
        peer = await filled(connect)
        assert stored(await fetch(peer, 0)) == [(n, b"%d" % n) for n in range(10)]
        assert stored(await fetch(peer, 7)) == [(7, b"7"), (8, b"8"), (9, b"9")]
        assert stored(await fetch(peer, 3, max_messages="2")) == [(3, b"3"), (4, b"4")]
        assert [offset for offset, _ in stored(await fetch(peer, 3, max_bytes="1"))] == [3]


async def test_an_index_says_where_each_message_starts(a_broker):
    async with a_broker() as connect:
        peer = await filled(connect)
        for offset in (0, 7, 10):
            answer = await fetch(peer, offset, index="1")
            count = int(answer.properties["count"])
            index = struct.unpack_from(f">{count}I", answer.body)
            frames = answer.body[4 * count :]
            found = [decode_frame(frames, position) for position in index]
            assert [(frame.sequence_number, frame.body) for frame in found] == [
                (n, b"%d" % n) for n in range(offset, 10)
            ]


@pytest.mark.parametrize("tail_bytes", [0, 1 << 20])
async def test_in_bulk_whole_batches_come_with_marks_to_be_counted_from_the_first(a_broker, tail_bytes):
    async with a_broker(storage={"tail_bytes": tail_bytes}) as connect:
        peer = await filled(connect, 0)
        for number in range(10):
            published = await peer.publish("a", b"%d" % number)
            while now_ms() == published.timestamp:  # batches of the same millisecond may come together
                pass
        for offset in (0, 7, 10):
            answer = await fetch(peer, offset, bulk="1", max_messages="1")
            count, first = int(answer.properties["count"]), int(answer.properties["offset"])
            assert first + count == 10
            marks = struct.unpack_from(f">{count}I", answer.body)
            frames = answer.body[4 * count :]
            found = [decode_frame(frames, (mark - marks[0]) % 2**32) for mark in marks]
            assert [(frame.sequence_number, frame.body) for frame in found] == [
                (n, b"%d" % n) for n in range(first, 10)
            ]
        assert int((await fetch(peer, 3, bulk="1", max_bytes="1")).properties["count"]) == 1


async def test_minus_two_is_the_earliest_and_minus_one_the_end(a_broker):
    async with a_broker() as connect:
        peer = await filled(connect)
        assert stored(await fetch(peer, -2, max_messages="1")) == [(0, b"0")]
        end = await fetch(peer, -1)
        assert (end.properties["offset"], end.properties["count"]) == ("10", "0")
        assert (await fetch(peer, -3)).properties["code"] == "BAD_REQUEST"


async def test_past_the_end_is_empty_and_before_the_first_is_an_error_that_names_the_first(a_broker):
    async with a_broker(storage={"segment_bytes": 4096, "retention_bytes": 1, "retention_interval": 0.01}) as connect:
        peer = await filled(connect, 0)
        for _ in range(10):
            await peer.publish("a", b"x" * 2_000)
        with trio.fail_after(20):
            while (first := (await peer.call("offsets", topic="a"))["first"]) < 8:  # the newest segment begins there
                pass  # each look is a round trip; retention looks every 10 ms
        refusal = await fetch(peer, 0)
        assert refusal.properties["code"] == "OFFSET_OUT_OF_RANGE"
        assert str(first) in refusal.properties["error"]
        assert stored(await fetch(peer, 1_000)) == []


async def test_a_fetch_waits_for_the_first_message_and_holds_up_no_other_request(a_broker):
    async with a_broker() as connect:
        peer, publisher = await filled(connect, 0), await connect()
        await peer.send(MessageType.FETCH, 9, topic="a", offset="0", max_wait="30")
        assert (await peer.ask(MessageType.HEARTBEAT, 3)).type == MessageType.HEARTBEAT
        await publisher.publish("a", b"at last")
        assert stored(await peer.receive()) == [(0, b"at last")]


async def test_a_fetch_gives_up_waiting_in_time(a_broker):
    async with a_broker() as connect:
        peer = await filled(connect, 0)
        start = trio.current_time()
        assert stored(await fetch(peer, 0, max_wait="0.3")) == []
        assert trio.current_time() - start >= 0.3


async def test_a_fetch_waits_for_min_bytes(a_broker):
    async with a_broker() as connect:
        peer, publisher = await filled(connect, 0), await connect()
        await peer.send(MessageType.FETCH, 9, topic="a", offset="0", max_wait="30", min_bytes="3000")
        for _ in range(3):
            await publisher.publish("a", b"x" * 1_000)
        assert len(stored(await peer.receive())) == 3


@pytest.mark.parametrize(
    ("properties", "code"),
    [
        ({"topic": "b"}, "UNKNOWN_TOPIC"),
        ({"partition": "1"}, "UNKNOWN_PARTITION"),
        ({"offset": "x"}, "BAD_REQUEST"),
        ({"max_messages": "0"}, "BAD_REQUEST"),
        ({"max_wait": "1e9"}, "BAD_REQUEST"),
    ],
)
async def test_a_bad_fetch_is_refused_by_code(a_broker, properties, code):
    async with a_broker() as connect:
        peer = await filled(connect, 1)
        wanted = {"topic": "a", "offset": "0"} | properties
        assert (await peer.ask(MessageType.FETCH, 9, **wanted)).properties["code"] == code


async def test_offsets_are_answered_and_found_by_time(a_broker):
    async with a_broker() as connect:
        peer = await filled(connect, 3)
        assert await peer.call("offsets", topic="a") == {"first": 0, "next": 3}
        assert (await peer.call("offsets", topic="a", time_ms=0))["offset_for_time"] == 0
        assert (await peer.call("offsets", topic="a", time_ms=2**50))["offset_for_time"] == 3
