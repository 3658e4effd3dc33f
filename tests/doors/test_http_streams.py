"""Streams over HTTP cost only what moves, and what is remembered of ended ones is bounded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import trio

from qb.doors.http.streams import stream_registry
from qb.doors.http.streams.stream_registry import StreamRegistry
from qb.doors.http.streams.stream_subscriber import SentMessage
from qb.doors.http.streams.topic_tail import TopicTail


async def test_a_tail_of_a_wide_topic_looks_only_at_the_partitions_that_moved(a_broker):
    async with a_broker() as connect:
        peer = await connect.http()
        await peer.ok("POST", "/topics", {"name": "t", "partitions": 64}, 201)
        tail = TopicTail(connect.broker, "t", dict.fromkeys(range(64), 0), lambda tail: None)
        with trio.move_on_after(0.05):
            await tail.next_batch()  # nothing is there yet
        looked: list[int] = []
        tail._logs = {number: Looked(number, log, looked) for number, log in tail._logs.items()}
        tail._check_topic = lambda: None
        await peer.ok("POST", "/topics/t/messages", {"value": "x", "partition": 7})
        batch = await tail.next_batch()
        assert (batch.partition, len(batch.messages)) == (7, 1)
        assert set(looked) == {7}
        await tail.close()


class Looked:
    """A log that notes who looks at its end."""

    def __init__(self, number: int, log: Any, looked: list[int]) -> None:
        self._number, self._log, self._looked = number, log, looked

    @property
    def end_offset(self) -> int:
        self._looked.append(self._number)
        return self._log.end_offset

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)


async def test_a_tail_gives_every_partition_its_turn(a_broker):
    async with a_broker() as connect:
        peer, reader = await connect.http(), await connect.http()
        await peer.ok("POST", "/topics", {"name": "t", "partitions": 3}, 201)
        for partition in range(3):
            messages = [{"value": "x", "partition": partition}] * 250
            await peer.ok("POST", "/topics/t/messages", {"messages": messages})
        await reader.open_stream("/topics/t/tail?offset=earliest")
        seen = [(await reader.event()).data["partition"] for _ in range(750)]
        assert seen[:300] == [0] * 100 + [1] * 100 + [2] * 100
        assert {partition: seen.count(partition) for partition in seen} == {0: 250, 1: 250, 2: 250}


def ended(name: str, messages: int) -> Any:
    sent = [SentMessage(0, offset, None) for offset in range(messages)]
    return SimpleNamespace(id=name, active="s", delivered=sent)


def test_what_is_remembered_of_ended_streams_is_bounded_in_all(monkeypatch):
    monkeypatch.setattr(stream_registry, "REMEMBERED_IN_ALL", 25)
    registry = StreamRegistry(Mock())
    for number in range(5):
        stream = ended(str(number), 10)
        registry._open[stream.id] = stream
        registry._remember(stream)
    assert list(registry._ended) == ["3", "4"]
    assert registry._remembered == 20
