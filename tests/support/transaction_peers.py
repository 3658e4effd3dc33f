"""A peer that speaks of transactions in raw frames: what any client could send, and what it would be answered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from qb.core.wire.errors import Internal
from qb.core.wire.frames import MessageType, encode_frame
from qb.storage.engine import AppendRun, Done, PartitionLog
from tests.support.brokers import Doors
from tests.support.peers import TrioPeer, stored_messages


def data(topic: str, *bodies: bytes) -> bytes:
    """Return the body of a STAGE frame with these messages."""
    return b"".join(encode_frame(MessageType.DATA, 0, 5, {"topic": topic}, body) for body in bodies)


class Staging:
    """One stage as its publisher sees it."""

    def __init__(self, peer: TrioPeer, stage_id: str) -> None:
        self.peer = peer
        self.stage_id = stage_id
        self.given = 0

    @property
    def named(self) -> dict[str, Any]:
        """The stage as a commit names it."""
        return {"stage": self.stage_id, "messages": self.given}

    async def send(self, topic: str, partition: int, *bodies: bytes, first: int | None = None) -> str:
        """Return how many messages the stage holds then, or the code of the refusal."""
        first = self.given if first is None else first
        answer = await self.peer.ask(
            MessageType.STAGE,
            9,
            data(topic, *bodies),
            stage=self.stage_id,
            topic=topic,
            partition=str(partition),
            first=str(first),
        )
        if answer.properties["status"] == "error":
            return answer.properties["code"]
        self.given = max(self.given, first + len(bodies))
        return answer.properties["messages"]


async def begin(peer: TrioPeer, transaction: str, number: int | None = None) -> Staging:
    answer = await peer.call("begin_transaction", transaction=transaction, number=number)
    assert answer["committed"] is False
    return Staging(peer, answer["stage"])


async def commit(peer: TrioPeer, transaction: str, *stages: Staging, number: int | None = None) -> Any:
    """Return the receipt, or the code of the refusal."""
    named = [stage.named for stage in stages]
    return await peer.call("commit_transaction", transaction=transaction, number=number, stages=named)


async def bodies(peer: TrioPeer, topic: str, partition: int = 0) -> list[bytes]:
    """Return every message of a partition that a reader may see; a read in bulk shows no other one."""
    properties = {"topic": topic, "partition": str(partition), "offset": "0", "max_messages": "100000"}
    bulk = await peer.ask(MessageType.FETCH, 3, **properties, bulk="1")
    answer = await peer.ask(MessageType.FETCH, 3, **properties)
    assert answer.properties["status"] == "success", answer.properties
    found = [message.body for message in stored_messages(answer.body)]
    frames = bulk.body[4 * int(bulk.properties["count"]) :]
    assert found[: int(bulk.properties["count"])] == [each.body for each in stored_messages(frames)]
    return found


async def all_bodies(peer: TrioPeer, topic: str, partitions: int) -> Sequence[list[bytes]]:
    return [await bodies(peer, topic, partition) for partition in range(partitions)]


def part(topic: str, partition: int, *messages: bytes) -> bytes:
    return encode_frame(MessageType.STAGE, 0, 0, {"topic": topic, "partition": str(partition)}, data(topic, *messages))


async def publish_whole(peer: TrioPeer, transaction: str, *parts: bytes, **properties: str) -> Any:
    """Return the receipt, or the code of the refusal."""
    answer = await peer.ask(MessageType.TRANSACTION, 1, b"".join(parts), transaction=transaction, **properties)
    if answer.properties["status"] == "error":
        return answer.properties["code"]
    return msgspec.json.decode(answer.body)


async def two_topics(connect: Doors) -> TrioPeer:
    peer = await connect()
    for topic in ("a", "b"):
        await peer.call("create_topic", topic=topic)
    return peer


@contextmanager
def failing_copies(connect: Doors, times: int = 10**9) -> Iterator[list[str]]:
    """Let the logs refuse the messages of transactions; yields the topics that refused some."""
    commits, refused = connect.broker.transactions._commits, []
    real = commits._append
    limit = times

    def append(log: PartitionLog, run: AppendRun, done: Done, *, lags: bool = False) -> None:
        if len(refused) < limit:
            refused.append(log.topic)
            done([run], Internal("messages could not be written: disk I/O error"), 0)
        else:
            real(log, run, done, lags=lags)

    commits._append = append
    try:
        yield refused
    finally:
        limit = 0
        commits._append = real
