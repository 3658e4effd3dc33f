"""Transactions in one frame are shown when their decision is durable, and stored in their logs a little later."""

from __future__ import annotations

import errno
import threading
from typing import Any

import msgspec
import pytest
import trio

from qb.core.wire.frames import MessageType, encode_frame
from qb.storage.commit.batch_commit import BatchCommit
from qb.storage.metadata.metadata_log import MetadataLog
from tests.support.peers import TrioPeer
from tests.support.transaction_peers import bodies, commit, part, publish_whole, two_topics
from tests.support.waiting import until

T = MessageType


@pytest.fixture(autouse=True)
def plenty_of_room(monkeypatch) -> None:
    """The disk of the machine may be nearly full, and slow."""
    monkeypatch.setattr("qb.core.transactions.free_space.PLENTY", 0)
    monkeypatch.setattr("qb.core.transactions.free_space.AGAIN", 3_600)


@pytest.fixture
def writes(monkeypatch) -> list[str]:
    """The synced writes of logs, and of decisions with messages in them, in their order."""
    done: list[str] = []
    write_log, write_record = BatchCommit.carry_out, MetadataLog.commit

    def log(commit: BatchCommit) -> Any:
        done.append("log")
        return write_log(commit)

    def record(log: MetadataLog, body: bytes, entries: Any) -> Any:
        if b"content" in body:
            done.append("decision")
        return write_record(log, body, entries)

    monkeypatch.setattr(BatchCommit, "carry_out", log)
    monkeypatch.setattr(MetadataLog, "commit", record)
    return done


@pytest.fixture
def no_hurry(monkeypatch) -> None:
    """What may lag is written only when something else is."""
    monkeypatch.setattr("qb.storage.commit.commit_step.SOON", 3_600)


async def test_a_transaction_is_answered_and_readable_after_one_sync(a_broker, writes, no_hurry):
    async with a_broker() as connect:
        peer = await two_topics(connect)
        writes.clear()
        receipt = await publish_whole(peer, "x", part("a", 0, b"1", b"2"), part("b", 0, b"3"))
        assert writes == ["decision"]
        assert [(each["first_offset"], each["last_offset"]) for each in receipt["partitions"]] == [(0, 1), (0, 0)]
        assert (await bodies(peer, "a"), await bodies(peer, "b")) == ([b"1", b"2"], [b"3"])
        await publish_whole(peer, "y", part("a", 0, b"4"))
        assert await bodies(peer, "a") == [b"1", b"2", b"4"]
        assert "log" not in writes
    async with a_broker() as connect:  # a stop stores what lags
        peer = await connect()
        assert (await bodies(peer, "a"), await bodies(peer, "b")) == ([b"1", b"2", b"4"], [b"3"])
        assert connect.broker.transactions.notes == []
        assert await commit(peer, "x") == receipt | {"replayed": True}


async def test_a_publish_behind_a_transaction_is_stored_with_it(a_broker, writes, no_hurry):
    async with a_broker() as connect:
        peer = await two_topics(connect)
        await publish_whole(peer, "x", part("a", 0, b"1"), part("b", 0, b"2"))
        writes.clear()
        assert (await peer.publish("a", b"3")).properties["offset"] == "1"
        assert writes.count("log") == 1
        assert await bodies(peer, "a") == [b"1", b"3"]


async def numbered(peer: TrioPeer, number: int, body: bytes) -> None:
    """Publish a transaction with a number, and expect it to be committed by that."""
    properties = {"transaction": "x", "number": str(number)}
    await peer.stream.send_all(encode_frame(T.TRANSACTION, 1, 0, properties, part("a", 0, body)))
    answer = await peer.receive()
    assert answer is not None
    assert msgspec.json.decode(answer.body)["replayed"] is False


async def test_the_line_of_a_transaction_is_not_replaced_before_its_logs_have_it(a_broker, writes, no_hurry):
    async with a_broker() as connect:
        peer = await two_topics(connect)
        writes.clear()
        await numbered(peer, 1, b"1")
        assert writes == ["decision"]
        await numbered(peer, 2, b"2")
        assert writes == ["decision", "log", "decision"]
        assert await bodies(peer, "a") == [b"1", b"2"]


async def test_a_log_that_cannot_store_what_it_shows_takes_no_more_and_a_start_stores_it(
    a_broker, monkeypatch, no_hurry
):
    def fail(commit: BatchCommit, *_: Any) -> Any:
        return commit._failed(OSError(errno.ENOSPC, "No space left on device"))

    async with a_broker() as connect:
        peer = await two_topics(connect)
        await peer.publish("a", b"0")
        receipt = await publish_whole(peer, "x", part("a", 0, b"1"), part("b", 0, b"2"))
        with monkeypatch.context() as full:
            full.setattr(BatchCommit, "_write_to", fail)
            assert (await peer.publish("a", b"3")).properties["code"] == "LOG_POISONED"
        assert (await peer.publish("a", b"3")).properties["code"] == "LOG_POISONED"
        assert await bodies(peer, "a") == [b"0", b"1"]
        assert await commit(peer, "x") == receipt | {"replayed": True}
    async with a_broker() as connect:
        peer = await connect()
        assert await bodies(peer, "a") == [b"0", b"1"]
        assert await bodies(peer, "b") == [b"2"]
        assert await commit(peer, "x") == receipt | {"replayed": True}
        assert (await peer.publish("a", b"3")).properties["offset"] == "2"


async def test_a_transaction_behind_messages_that_are_not_durable_waits_for_its_logs(a_broker, monkeypatch):
    monkeypatch.setattr("qb.storage.commit.sync_pace.QUICK", 0)  # a thread syncs: the event loop must not wait
    written, may_write = threading.Event(), threading.Event()
    real = BatchCommit.carry_out

    def write(commit: BatchCommit) -> Any:
        written.set()
        assert may_write.wait(60)
        return real(commit)

    async with a_broker() as connect:
        peer, other = await two_topics(connect), await connect()
        await publish_whole(peer, "first", part("b", 0, b"0"))
        monkeypatch.setattr(BatchCommit, "carry_out", write)
        try:
            await other.send(T.PUBLISH, 1, b"1", topic="a", partition="0")
            await trio.to_thread.run_sync(written.wait, 60)
            await peer.send(T.TRANSACTION, 1, part("a", 0, b"2") + part("b", 0, b"3"), transaction="x")
            commits = connect.broker.transactions._commits
            await until(lambda: "x" in commits._unfinished)
            assert await bodies(other, "b") == [b"0"]
        finally:
            may_write.set()
        answer = await peer.receive()
        assert answer is not None
        assert msgspec.json.decode(answer.body)["messages"] == 2
        assert await bodies(peer, "a") == [b"1", b"2"]


async def test_receipts_of_many_transactions_are_the_same_after_a_kill(a_broker, monkeypatch, no_hurry):
    async with a_broker() as connect:
        peer = await two_topics(connect)
        metadata = connect.broker.engine.metadata
        monkeypatch.setattr(metadata, "put_soon", lambda key, value: None)  # as if the broker were killed before
        receipts = {}
        for number in range(140):  # the numbers in b do not follow each other
            name = f"x{number}"
            receipts[name] = await publish_whole(peer, name, part("a", 0, b".", b"."), part("b", 0, b"."))
    async with a_broker() as connect:
        peer = await connect()
        for name, receipt in receipts.items():
            assert await commit(peer, name) == receipt | {"replayed": True}
