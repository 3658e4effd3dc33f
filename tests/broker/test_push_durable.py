"""What is pushed, when the disk that keeps the acks is slow or refuses, against the real broker in this process."""

from __future__ import annotations

import errno
import threading

import pytest

import qb.core.push.cursor_saver
import qb.storage.faults
from qb.core.push.cursor_saver import SAVE_INTERVAL
from qb.core.wire.frames import MessageType as T
from qb.storage.commit.sync_pace import SyncPace
from qb.storage.metadata.metadata_log import MetadataLog
from qb.storage.metadata.metadata_records import decode_changes
from tests.support.push_peers import Delivered, a_topic, all_saved, bodies, joined
from tests.support.waiting import holds_during


class Disk:
    """Stands between the metadata and its log: holds back or refuses what is written about subscriptions."""

    def __init__(self, monkeypatch):
        self._free = threading.Event()
        self._free.set()
        self.refusals = 0  # so many writes fail
        self.written = 0
        real = MetadataLog.commit

        def commit(log, body, entries):
            if any(key.startswith("cursor/") for key, _ in decode_changes(body)):
                assert self._free.wait(60)
                self.written += 1
                if self.refusals:
                    self.refusals -= 1
                    raise OSError(errno.EIO, "disk I/O error")
            return real(log, body, entries)

        monkeypatch.setattr(MetadataLog, "commit", commit)
        monkeypatch.setattr(SyncPace, "is_quick", False)  # a disk that waits must not wait in the event loop

    def stop(self):
        self._free.clear()

    def go_on(self):
        self._free.set()


@pytest.fixture
def disk(monkeypatch):
    monkeypatch.setattr(qb.core.push.cursor_saver, "RETRY", 0.05)
    monkeypatch.setattr(qb.storage.faults, "FIRST_DELAY", 0.05)
    disk = Disk(monkeypatch)
    yield disk
    disk.go_on()


async def described(peer):
    numbers = await peer.call("describe_subscription", subscription_id="s")
    return numbers["lag"], numbers["in_flight"], [each["unsaved_acks"] for each in numbers["subscribers"]]


async def test_nothing_is_pushed_in_the_place_of_an_ack_that_is_not_durable(a_broker, disk):
    async with a_broker() as connect:
        publisher = await a_topic(connect, 5)
        await publisher.call("create_subscription", subscription_id="s", topic="a")
        subscriber = Delivered(await joined(connect, window="2"))
        assert await subscriber.take(2) == bodies(0, 2)
        disk.stop()
        await subscriber.settle(acks=[[0, 0, 2]])
        for number in range(5, 9):
            await publisher.publish("a", b"%d" % number)
            assert await described(publisher) == (number - 1, 0, [2]), "acked, not durable, and nothing pushed"
        text = (await publisher.call("explain", subscription_id="s", offset=2))["text"]
        assert text.endswith("(0 of 2 in flight, 2 acks are being saved)")
        disk.go_on()
        assert await subscriber.take(2) == bodies(2, 4)


async def test_a_peer_that_never_acks_gets_no_more_than_its_window_before_a_save(a_broker, disk):
    async with a_broker() as connect:
        publisher = await a_topic(connect, 5)
        await publisher.ask(T.CREATE_SUBSCRIPTION, 2, subscription_id="s", topic="a")
        disk.stop()
        basic = await connect()
        await basic.ask(T.SUBSCRIBE, 3, subscription_id="s", window="2")
        assert [(await basic.receive()).body for _ in range(2)] == bodies(0, 2)
        assert await described(publisher) == (3, 0, [2])
        disk.go_on()
        assert [(await basic.receive()).body for _ in range(3)] == bodies(2, 5)


async def test_a_disk_that_refuses_for_a_while_costs_no_place(a_broker, disk):
    async with a_broker() as connect:
        publisher = await a_topic(connect, 6)
        await publisher.call("create_subscription", subscription_id="s", topic="a")
        subscriber = Delivered(await joined(connect, window="1"))
        for number in range(6):
            assert await subscriber.take(1) == bodies(number, number + 1)
            disk.refusals = number % 3
            await subscriber.settle(acks=[[0, number]])
        while (await described(publisher)) != (0, 0, [0]):
            pass


async def test_a_redelivery_and_a_dead_letter_wait_for_a_disk_that_refuses(a_broker, disk):
    async with a_broker() as connect:
        publisher = await a_topic(connect, 2)
        options = {"max_deliveries": 2, "backoff": {"initial": 0.0, "cap": 0.0}}
        await publisher.call("create_subscription", subscription_id="s", topic="a", options=options)
        subscriber = Delivered(await joined(connect))
        await subscriber.take(2)
        for attempt in (2, 3):
            disk.refusals = 3
            await subscriber.settle(acks=[[0, 1]], nacks=[[0, 0, 0, "no"]])
            if attempt == 2:
                assert (await subscriber.next())[3] == 2
        while not (letters := await publisher.call("dead_letters", subscription_id="s")):
            pass
        assert [letter["offset"] for letter in letters] == [0]


def count_rounds(connect, monkeypatch):
    rounds = []
    deliveries = connect.broker.subscriptions.deliveries
    real = deliveries._decide
    monkeypatch.setattr(deliveries, "_decide", lambda *given: rounds.append(given) or real(*given))
    return rounds


async def test_an_idle_subscription_costs_nothing(a_broker, disk, monkeypatch):
    async with a_broker() as connect:
        publisher = await a_topic(connect, 3)
        await publisher.call("create_subscription", subscription_id="s", topic="a")
        subscriber = Delivered(await joined(connect, window="1"))
        for number in range(3):
            assert await subscriber.take(1) == bodies(number, number + 1)
            await subscriber.settle(acks=[[0, number]])
        await all_saved(publisher)
        rounds, before = count_rounds(connect, monkeypatch), disk.written

        async def is_idle():
            return (rounds, disk.written) == ([], before)

        await holds_during(5 * SAVE_INTERVAL, is_idle)
