"""A follower of a stream begins again soon when its server falls silent, and when its connection is lost."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing

import msgspec
import pytest
import trio

from qb.replication.jetstream.stream_follower import EXPIRES, HEARTBEAT, SILENCE, follow_stream
from qb.replication.nats.nats_protocol import NatsMessage


class OneServer:
    """A stream of records of one byte, whose consumers may be deaf: what a NATS client sees of it."""

    def __init__(self, last: int) -> None:
        self.last = last
        self.consumers: list[tuple[float, int]] = []  # when each was made, and where it begins
        self.deaf: set[int] = set()  # numbers of consumers that say nothing
        self.silent_from = 100  # they give what is before, and then nothing more
        self.is_connected = True
        self._inboxes: dict[str, Callable[[NatsMessage], None]] = {}
        self.lost: Callable[[], None]

    def new_inbox(self) -> str:
        return f"inbox{len(self.consumers)}"

    def subscribe(self, subject: str, received: Callable[[NatsMessage], None], lost: Callable[[], None]) -> int:
        self._inboxes[subject], self.lost = received, lost
        return len(self._inboxes)

    def unsubscribe(self, sid: int) -> None:
        self._inboxes[list(self._inboxes)[sid - 1]] = lambda message: None

    async def request(self, subject: str, payload: bytes, *, timeout: float) -> NatsMessage:
        first = msgspec.json.decode(payload)["config"]["opt_start_seq"]
        self.consumers.append((trio.current_time(), first))
        return NatsMessage("", 1, "", {}, msgspec.json.encode({"name": str(len(self.consumers) - 1)}))

    def publish(self, subject: str, payload: bytes, *, reply: str) -> None:
        trio.lowlevel.spawn_system_task(self._pulled, int(subject.rpartition(".")[2]), reply)

    def send(self, inbox: str, position: int) -> None:
        self._inboxes[inbox](NatsMessage("", 7, f"$JS.ACK.s.c.1.{position}.1.1.0", {}, b"x"))

    def say(self, inbox: str, status: int) -> None:
        self._inboxes[inbox](NatsMessage("", 7, "", {}, b"", status))

    async def _pulled(self, number: int, inbox: str) -> None:
        _, at = self.consumers[number]
        for position in range(at, min(self.last, self.silent_from if number in self.deaf else self.last) + 1):
            self.send(inbox, position)
            self.consumers[number] = self.consumers[number][0], position + 1
        if number in self.deaf:
            return
        if self.consumers[number][1] > at:
            self.say(inbox, 404)
            return
        for _ in range(int(EXPIRES / HEARTBEAT) - 1):
            await trio.sleep(HEARTBEAT)
            self.say(inbox, 100)
        await trio.sleep(HEARTBEAT)
        self.say(inbox, 408)


async def follow(server: OneServer, found: list[int]) -> None:
    async with aclosing(follow_stream(server, "s", 1, 0.05)) as following:  # type: ignore[arg-type]
        async for records in following:
            found += [each.position for each in records]


async def test_a_server_that_has_nothing_keeps_its_consumer(autojump_clock, nursery: trio.Nursery) -> None:
    server, found = OneServer(3), []
    nursery.start_soon(follow, server, found)
    await trio.sleep(20 * EXPIRES)
    assert found == [1, 2, 3]
    assert len(server.consumers) == 1


@pytest.mark.parametrize("silent_from", [0, 2])
async def test_behind_a_server_that_falls_silent_it_begins_again(
    silent_from: int, autojump_clock, nursery: trio.Nursery
) -> None:
    server, found = OneServer(3), []
    server.deaf, server.silent_from = {0}, silent_from
    began = trio.current_time()
    nursery.start_soon(follow, server, found)
    await trio.sleep(20 * EXPIRES)
    assert found == [1, 2, 3]
    (_, again) = server.consumers
    assert again[0] - began < SILENCE + 2 * HEARTBEAT


async def test_a_lost_connection_ends_the_pull_at_once(autojump_clock, nursery: trio.Nursery) -> None:
    server, found = OneServer(0), []
    server.deaf = {0}
    nursery.start_soon(follow, server, found)
    await trio.sleep(HEARTBEAT)
    server.last = 3
    server.lost()
    server.send("inbox1", 2)  # 1 was sent to the connection that was lost
    lost = trio.current_time()
    await trio.sleep(20 * EXPIRES)
    assert found == [1, 2, 3]
    assert server.consumers[1][0] - lost < HEARTBEAT
