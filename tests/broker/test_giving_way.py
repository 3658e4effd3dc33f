"""Streams of tiny publishes do not hold the event loop: they are handled, and answered, in portions."""

from __future__ import annotations

import os
import threading

import pytest
import trio
import trio.lowlevel

from qb.core import pacing
from qb.core.broker.numbered_publishes import MOST_OWED
from qb.core.loop_watch import LoopWatch
from qb.core.wire.frames import MessageType as T
from qb.core.wire.frames import encode_frame
from qb.doors.binary import session
from qb.doors.binary.publish_runs import ANSWERED_EACH
from tests.support.disk import patch_sync
from tests.support.push_peers import a_fast_peer, a_topic
from tests.support.waiting import until

COUNT = 1_000


async def test_what_can_go_on_later_gives_way_when_a_pass_of_the_event_loop_has_lasted_long():
    assert not pacing.must_give_way(), "nothing is measured"
    with LoopWatch().watching():
        await trio.lowlevel.checkpoint()
        assert not pacing.must_give_way()
        pacing.current.pass_began -= pacing.TURN
        assert pacing.must_give_way()
        await trio.lowlevel.checkpoint()
        assert not pacing.must_give_way(), "a new pass"
    assert not pacing.must_give_way()


CASES = {
    "by turn": ({"topic": "a"}, COUNT),
    "to nowhere": ({"topic": "nowhere"}, COUNT / ANSWERED_EACH),
    "without a topic": ({"colour": "red"}, COUNT),
}


@pytest.mark.parametrize(("properties", "portions"), CASES.values(), ids=CASES)
async def test_publishes_give_way_between_two_runs(a_broker, monkeypatch, properties, portions):
    given_way = []
    monkeypatch.setattr(session, "must_give_way", lambda: given_way.append(1) or True)
    async with a_broker() as connect:
        peer = await connect()
        await peer.call("create_topic", topic="a", partitions=4)
        frames = [encode_frame(T.PUBLISH, number, 0, properties, b"") for number in range(COUNT)]
        await peer.stream.send_all(b"".join(frames))
        answers = [await peer.receive() for _ in range(COUNT)]
    assert sorted(answer.sequence_number for answer in answers) == list(range(COUNT))
    assert len(given_way) >= portions - 1


async def test_requests_that_wait_for_nothing_give_way_between_two(a_broker, monkeypatch):
    given_way = []
    monkeypatch.setattr(session, "must_give_way", lambda: given_way.append(1) or True)
    async with a_broker() as connect:
        operator = await a_topic(connect)
        frames = []
        for number in range(20):
            await operator.call("create_subscription", subscription_id=f"s{number}", topic="a")
            frames.append(encode_frame(T.SUBSCRIBE, number, 0, {"subscription_id": f"s{number}"}, b""))
        peer = await a_fast_peer(connect)
        given_way.clear()
        await peer.stream.send_all(b"".join(frames))
        answers = [await peer.receive() for _ in range(20)]
    assert [answer.sequence_number for answer in answers] == list(range(20))
    assert len(given_way) >= 19


@pytest.mark.parametrize("dialect", ["basic", "fast"])
async def test_no_more_answers_are_owed_to_a_peer_than_one_step_can_make(a_broker, monkeypatch, dialect):
    go, reached, sync = threading.Event(), threading.Event(), os.fdatasync

    def held(fd):
        reached.set()
        assert go.wait(30)
        sync(fd)

    total = 3 * MOST_OWED
    async with a_broker() as connect:
        peer = await connect()
        if dialect == "fast":
            await peer.ask(T.HELLO, 1, protocol="1")
        await peer.call("create_topic", topic="a", partitions=4)
        patch_sync(monkeypatch, held)
        frames = b"".join(encode_frame(T.PUBLISH, number, 0, {"topic": "a"}, b"") for number in range(total))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(peer.stream.send_all, frames)
            assert await trio.to_thread.run_sync(reached.wait, 10)
            logs = [connect.broker.topics.log("a", number) for number in range(4)]
            await until(lambda: sum(log.next_offset for log in logs) > MOST_OWED)
            for _ in range(100):
                await trio.lowlevel.checkpoint()
            assert sum(log.next_offset for log in logs) <= MOST_OWED + ANSWERED_EACH
            go.set()
            numbers = [(await peer.receive()).sequence_number for _ in range(total)]
        assert sorted(numbers) == list(range(total))


@pytest.mark.parametrize("key", [None, "k"], ids=["uniform", "own keys"])
async def test_staged_messages_are_checked_in_portions(a_broker, key):
    async with a_broker() as connect:
        peer = await connect()
        await peer.call("create_topic", topic="a")
        stage = (await peer.call("begin_transaction", transaction="x"))["stage"]
        own = [{} if key is None else {"key": f"{key}{number}"} for number in range(3 * pacing.MOST_AT_ONCE)]
        frames = b"".join(encode_frame(T.DATA, 0, 5, {"topic": "a", **each}, b"") for each in own)
        with pacing.counted() as work:
            staged = await peer.ask(T.STAGE, 9, frames, stage=stage, topic="a", partition="0", first="0")
        assert staged.properties["messages"] == str(len(own))
        assert 0 < work.most <= pacing.MOST_AT_ONCE
