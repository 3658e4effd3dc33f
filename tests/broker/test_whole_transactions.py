"""Transactions that fit into one frame: decided with their messages, without a stage, many in one round."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from qb.core.wire.frames import MessageType
from qb.doors.binary.frame_requests import TRANSACTION_BYTES
from qb.storage.stages.transaction_records import KEY, TransactionRecord
from tests.support.transaction_peers import bodies, commit, data, failing_copies, part, publish_whole, two_topics
from tests.support.waiting import until

T = MessageType


async def test_a_transaction_in_one_frame_is_visible_when_it_is_answered_and_leaves_no_stage(a_broker, tmp_path):
    async with a_broker() as connect:
        peer = await two_topics(connect)
        receipt = await publish_whole(peer, "x", part("a", 0, b"1", b"2"), part("b", 0, b"3"), part("a", 0, b"44"))
        assert [(each["topic"], each["first_offset"], each["last_offset"]) for each in receipt["partitions"]] == [
            ("a", 0, 2), ("b", 0, 0),
        ]  # fmt: skip
        assert (receipt["messages"], receipt["replayed"]) == (4, False)
        assert await bodies(peer, "a") == [b"1", b"2", b"44"]
        assert await bodies(peer, "b") == [b"3"]
        assert not list((tmp_path / "data" / "staged").iterdir())
        assert await publish_whole(peer, "x", part("a", 0, b"again")) == receipt | {"replayed": True}
        assert await commit(peer, "x") == receipt | {"replayed": True}
    async with a_broker() as connect:
        peer = await connect()
        assert await publish_whole(peer, "x", part("a", 0, b"again")) == receipt | {"replayed": True}
        assert await bodies(peer, "a") == [b"1", b"2", b"44"]


@pytest.mark.parametrize(
    ("parts", "code"),
    [
        ((part("a", 0, b"1"), part("none", 0, b"2")), "UNKNOWN_TOPIC"),
        ((part("a", 0, b"1"), part("b", 7, b"2")), "UNKNOWN_PARTITION"),
        ((part("a", 0, b"1"), data("a", b"2")), "BAD_REQUEST"),
        ((part("a", 0, b"1"), b"rest"), "BAD_REQUEST"),
        ((part("a", 0, b"." * TRANSACTION_BYTES),), "BAD_REQUEST"),
        ((part("a", 0),), "BAD_REQUEST"),
    ],
)
async def test_one_part_that_cannot_be_stored_refuses_all_of_it(a_broker, parts, code):
    async with a_broker() as connect:
        peer = await two_topics(connect)
        assert await publish_whole(peer, "x", *parts) == code
        assert await bodies(peer, "a") == []
        begun = await peer.call("begin_transaction", transaction="x", opens=False)
        assert begun == {"committed": False, "stage": None}


async def test_transactions_that_come_at_once_share_a_record_and_all_become_visible(a_broker):
    async with a_broker() as connect:
        peer = await two_topics(connect)
        peers = [await connect() for _ in range(20)]
        log = connect.broker.engine.metadata._log
        real, records = log.commit, []

        def count(body: bytes, entries: Any) -> float:
            records.append(body.count(b"content"))
            return real(body, entries)

        log.commit = count
        receipts: dict[int, Any] = {}

        async def ask(number: int) -> None:
            mine = str(number).encode()
            receipts[number] = await publish_whole(peers[number], f"x{number}", part("a", 0, mine), part("b", 0, mine))

        async with trio.open_nursery() as nursery:
            for number in range(len(peers)):
                nursery.start_soon(ask, number)
        assert len(receipts) == 20
        assert sum(records) == 20
        assert max(records) > 1
        for topic in ("a", "b"):
            found = await bodies(peer, topic)
            assert sorted(found) == sorted(str(number).encode() for number in range(20))
            for number, receipt in receipts.items():
                (share,) = [each for each in receipt["partitions"] if each["topic"] == topic]
                assert found[share["first_offset"]] == str(number).encode()


async def test_a_start_finishes_what_was_decided_in_the_order_of_the_decisions(a_broker, monkeypatch):
    monkeypatch.setattr("qb.core.transactions.unfinished_transactions.PATIENCE", 0)
    async with a_broker() as connect:
        peer = await two_topics(connect)
        with failing_copies(connect) as refused:
            assert await publish_whole(peer, "z", part("a", 0, b"1"), part("b", 0, b"2")) == "TRANSACTION_UNFINISHED"
            assert await bodies(peer, "a") == []
            assert refused
            connect.stop.set()
            await until(lambda: connect.broker.engine.metadata._stopped)
    async with a_broker() as connect:
        peer = await connect()
        assert await bodies(peer, "a") == [b"1"]
        assert await bodies(peer, "b") == [b"2"]
        assert (await publish_whole(peer, "z"))["replayed"] is True


async def test_receipts_that_were_lost_are_the_same_after_a_start(a_broker, monkeypatch):
    async with a_broker() as connect:
        peer = await two_topics(connect)
        metadata = connect.broker.engine.metadata
        monkeypatch.setattr(metadata, "put_soon", lambda key, value: None)  # as if the broker were killed before
        receipts = {}
        for name, count in (("x", 1), ("y", 3), ("z", 2)):
            receipts[name] = await publish_whole(peer, name, part("a", 0, *[b"."] * count), part("b", 0, b"."))
            await peer.publish("a", b"other")
        known = [TransactionRecord.decode(entry.value) for entry in metadata.under(KEY).values()]
        assert [each.receipt for each in known] == [None] * 3
    async with a_broker() as connect:
        peer = await connect()
        for name, receipt in receipts.items():
            assert await commit(peer, name) == receipt | {"replayed": True}
        assert (len(await bodies(peer, "a")), len(await bodies(peer, "b"))) == (9, 3)
