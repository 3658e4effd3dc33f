"""A fault of ours ends one thing, for a while: the broker and everything else in it go on."""

from __future__ import annotations

import logging

import pytest
import trio

import qb.storage.faults
from qb.core.groups.group_coordinator import GroupCoordinator
from qb.core.push.active_subscription import ActiveSubscription
from qb.core.push.delivery_rounds import DeliveryRounds
from qb.core.transactions.stage_copy import StageCopy
from qb.storage import maintenance as background
from qb.storage.faults import Fault, Faults, keep_running
from tests.support.push_peers import Delivered, a_topic, bodies, joined


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(qb.storage.faults, "FIRST_DELAY", 0.01)
    monkeypatch.setattr(qb.storage.faults, "LONGEST_DELAY", 0.05)


def break_for(monkeypatch, owner, method, broken):
    """Let a method raise for the subscription s while `broken` holds something; returns how often it did."""
    real, raised = getattr(owner, method), []

    def breaks(*arguments):
        if broken and any(isinstance(each, ActiveSubscription) and each.name == "s" for each in arguments):
            raised.append(method)
            raise RuntimeError("a bug")
        return real(*arguments)

    monkeypatch.setattr(owner, method, breaks)
    return raised


def tracebacks(caplog):
    return [record for record in caplog.records if record.exc_info]


async def fault_of(peer, subscription):
    return (await peer.call("describe_subscription", subscription_id=subscription))["fault"]


@pytest.mark.parametrize("method", ["_read_recent", "_decide", "_push", "_note_changes"])
async def test_a_round_that_raises_is_shown_and_retried_and_heals_while_others_are_served(
    a_broker, monkeypatch, caplog, method
):
    async with a_broker() as connect:
        publisher = await a_topic(connect)
        for name in ("s", "other"):
            await publisher.call("create_subscription", subscription_id=name, topic="a")
        faulty, other = [Delivered(await joined(connect, name)) for name in ("s", "other")]
        broken = [True]
        raised = break_for(monkeypatch, DeliveryRounds, method, broken)
        if method == "_read_recent":  # a round in a task asks otherwise
            raised = break_for(monkeypatch, DeliveryRounds, "_read", broken)
        for number in range(3):
            await publisher.publish("a", b"%d" % number)
            assert await other.take(1) == bodies(number, number + 1)
        while len(raised) < 3:
            await trio.lowlevel.checkpoint()
        assert "RuntimeError" in await fault_of(publisher, "s")
        assert await fault_of(publisher, "other") is None
        assert len(tracebacks(caplog)) == 1, "once, however often it is tried"
        broken.clear()
        assert [(await faulty.next())[1:] for _ in range(3)] == [(n, b"%d" % n, 1) for n in range(3)]
        while await fault_of(publisher, "s"):
            await trio.lowlevel.checkpoint()


async def test_a_subscription_that_stands_still_is_tried_by_the_clock_and_not_by_every_publish(a_broker, monkeypatch):
    monkeypatch.setattr(qb.storage.faults, "FIRST_DELAY", 60.0)
    monkeypatch.setattr(qb.storage.faults, "LONGEST_DELAY", 60.0)
    async with a_broker() as connect:
        publisher = await a_topic(connect)
        await publisher.call("create_subscription", subscription_id="s", topic="a")
        raised = break_for(monkeypatch, DeliveryRounds, "_decide", [True])
        await joined(connect)
        while not raised:
            await trio.lowlevel.checkpoint()
        for _ in range(20):
            await publisher.publish("a")
        assert len(raised) == 1


async def test_a_state_that_cannot_be_taken_keeps_no_other_from_being_saved(a_broker, monkeypatch, caplog):
    async with a_broker() as connect:
        publisher = await a_topic(connect, 2)
        for name in ("s", "other"):
            await publisher.call("create_subscription", subscription_id=name, topic="a")
        both = {name: Delivered(await joined(connect, name, window="1")) for name in ("s", "other")}
        broken = [True]
        raised = break_for(monkeypatch, ActiveSubscription, "to_save", broken)
        for name, each in both.items():
            assert await each.take(1) == [b"0"]
            await each.settle(name, acks=[[0, 0]])
        assert await both["other"].take(1) == [b"1"], "its ack became durable"
        while len(raised) < 3:
            await trio.lowlevel.checkpoint()
        assert "RuntimeError" in await fault_of(publisher, "s")
        assert len(tracebacks(caplog)) == 1
        broken.clear()
        assert await both["s"].take(1) == [b"1"]
        assert await fault_of(publisher, "s") is None


async def test_a_group_whose_timeouts_fail_keeps_no_other_member_in(a_broker, monkeypatch, caplog):
    real = GroupCoordinator.tick_group
    tried = []

    def tick_group(groups, group, now):
        if group.name == "bad":
            tried.append(now)
            raise RuntimeError("a bug")
        return real(groups, group, now)

    monkeypatch.setattr(GroupCoordinator, "tick_group", tick_group)
    async with a_broker() as connect:
        await a_topic(connect)
        groups = connect.broker.groups
        await groups.join("good", "m", ["a"])
        await groups.join("bad", "m", ["a"])
        for group in groups._groups:
            group.members["m"].heard -= 1000.0
        await groups.heartbeat("bad", "m")
        while groups._groups.get("good"):
            await trio.lowlevel.checkpoint()
        while len(tried) < 3:
            groups._changed.set()
            await trio.lowlevel.checkpoint()
    assert len(tracebacks(caplog)) == 1


async def test_retention_that_fails_for_one_log_goes_on_with_the_others(autojump_clock, monkeypatch, caplog):
    class Log:
        partition = 0

        def __init__(self, topic):
            self.topic, self.retention_hours, self.retention_bytes = topic, None, None

    async def drop_expired(log, *_):
        if log.topic == "bad":
            raise RuntimeError("a bug")
        dropped.append(log.topic)

    dropped = []
    monkeypatch.setattr(background, "drop_expired", drop_expired)
    logs = [(Log(name), Log(name)) for name in ("bad", "good")]
    with trio.move_on_after(0.1):
        await background.drop_forever(lambda: logs, lambda: 0, 0, 0, 0.01)
    assert len(dropped) > 1
    assert len(tracebacks(caplog)) == 1


async def test_a_transaction_that_fails_by_a_fault_of_ours_stops_no_other(a_broker, monkeypatch):
    real = StageCopy.begin

    def begin(copying, **options):
        if copying.decision.transaction == "bad":
            raise RuntimeError("a bug")
        real(copying, **options)

    monkeypatch.setattr(StageCopy, "begin", begin)
    async with a_broker() as connect:
        peer = await a_topic(connect)
        for _ in range(2):
            assert await peer.call("commit_transaction", transaction="bad", stages=[]) == "TRANSACTION_UNFINISHED"
        assert (await peer.call("commit_transaction", transaction="good", stages=[]))["transaction"] == "good"


# The mechanism


async def test_a_service_that_fails_begins_anew(autojump_clock, caplog):
    began = []

    async def service():
        began.append(trio.current_time())
        if len(began) < 5:
            raise RuntimeError("a bug")

    await keep_running("the service", service)
    assert len(began) == 5
    assert len(tracebacks(caplog)) == 1


async def test_a_service_can_be_cancelled():
    with trio.move_on_after(0) as scope:
        await keep_running("the service", trio.sleep_forever)
    assert scope.cancelled_caught


def test_tries_come_later_and_later_until_all_is_well():
    fault = Fault("it")
    assert [fault.note(RuntimeError()) for _ in range(5)] == [0.01, 0.02, 0.04, 0.05, 0.05]
    fault.end()
    assert fault.text is None
    assert fault.note(RuntimeError()) == 0.01


def test_another_fault_of_the_same_thing_is_logged_again(caplog):
    caplog.set_level(logging.ERROR)
    faults = Faults()
    for error in (RuntimeError("one"), RuntimeError("one"), RuntimeError("two")):
        with faults.contained("it"):
            raise error
    assert faults
    assert len(tracebacks(caplog)) == 2
    with faults.contained("it"):
        pass
    assert not faults
