"""A committed transaction that cannot be shown: it is tried again and said everywhere, and an operator can end it."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from qb.storage.stages.transaction_records import KEY
from tests.support.brokers import Doors
from tests.support.peers import TrioPeer
from tests.support.transaction_peers import Staging, begin, bodies, commit, failing_copies
from tests.support.waiting import until

PATIENCE = "qb.core.transactions.unfinished_transactions.PATIENCE"


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Tries come quickly after one another, as they do at first."""
    monkeypatch.setattr("qb.core.transactions.unfinished_transactions.FIRST_DELAY", 0.001)
    monkeypatch.setattr("qb.storage.faults.LONGEST_DELAY", 0.01)


async def staged(connect: Doors, transaction: str = "x", topic: str = "t") -> tuple[TrioPeer, Staging]:
    """Return a peer, and its stage with one message for a topic of two partitions."""
    peer = await connect()
    await peer.call("create_topic", topic=topic, partitions=2)
    return peer, await stage_one(peer, transaction, topic)


async def stage_one(peer: TrioPeer, transaction: str, topic: str = "t") -> Staging:
    stage = await begin(peer, transaction)
    await stage.send(topic, 0, transaction.encode())
    return stage


async def test_one_failed_copy_is_tried_again_and_the_commit_succeeds(a_broker):
    async with a_broker() as connect:
        peer, stage = await staged(connect)
        with failing_copies(connect, times=1) as refused:
            receipt = await commit(peer, "x", stage)
        assert refused == ["t"]
        assert (receipt["messages"], receipt["replayed"]) == (1, False)
        assert await bodies(peer, "t") == [b"x"]


async def test_a_fault_that_lasts_is_answered_and_the_transaction_becomes_visible_when_it_ends(a_broker, monkeypatch):
    monkeypatch.setattr(PATIENCE, 0)
    async with a_broker() as connect:
        peer, stage = await staged(connect)
        with failing_copies(connect) as refused:
            assert await commit(peer, "x", stage) == "TRANSACTION_UNFINISHED"
            assert (await peer.publish("t", b"later", partition="0")).properties["status"] == "success"
            assert await bodies(peer, "t") == []
            await until(lambda: len(refused) > 3)
        await until(lambda: not connect.broker.transactions.faults)
        assert await bodies(peer, "t") == [b"later", b"x"]
        assert (await commit(peer, "x", stage))["replayed"] is True


async def test_an_unfinished_transaction_is_said_everywhere_while_it_lasts(a_broker, monkeypatch):
    monkeypatch.setattr(PATIENCE, 0)
    async with a_broker() as connect:
        peer, stage = await staged(connect)
        http = await connect.http()

        async def said() -> dict[str, Any]:
            summary, logs = (
                (await http.ask("GET", "/summary")).json,
                (await peer.call("describe_topic", topic="t"))["logs"],
            )
            return {
                "partitions": [log["status"] for log in logs],
                "reason": logs[0].get("reason"),
                "health": (await http.ask("GET", "/health")).json.get("unfinished"),
                "ready": (await http.ask("GET", "/ready")).json.get("unfinished"),
                "summary": summary["status"].get("unfinished"),
                "listed": [each["transaction"] for each in (await peer.call("list_transactions"))["unfinished"]],
                "metric": b"qb_transactions_unfinished 1.0" in (await http.ask("GET", "/metrics")).body,
            }

        with failing_copies(connect):
            await commit(peer, "x", stage)
            (reason,) = connect.broker.transactions.faults
            assert "disk I/O error" in reason
            assert "qb transactions show x" in reason
            assert await said() == {
                "partitions": ["held", "ok"], "reason": reason, "health": [reason], "ready": [reason],
                "summary": [reason], "listed": ["x"], "metric": True,
            }  # fmt: skip
        await until(lambda: not connect.broker.transactions.faults)
        assert await said() == {
            "partitions": ["ok", "ok"], "reason": None, "health": None, "ready": None,
            "summary": None, "listed": [], "metric": False,
        }  # fmt: skip


async def test_a_commit_to_a_held_partition_waits_for_the_unfinished_one(a_broker):
    async with a_broker() as connect:
        peer, stage = await staged(connect)
        other, receipts = await connect(), {}
        behind = await stage_one(other, "y")

        async def ask(who: TrioPeer, transaction: str, which: Staging) -> None:
            receipts[transaction] = await commit(who, transaction, which)

        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                with failing_copies(connect) as refused:
                    nursery.start_soon(ask, peer, "x", stage)
                    await until(lambda: len(refused) > 1)
                    nursery.start_soon(ask, other, "y", behind)
                    await until(lambda: len(refused) > 5)
                    assert receipts == {}
        assert [receipts[name]["messages"] for name in "xy"] == [1, 1]
        assert await bodies(peer, "t") == [b"x", b"y"]


async def test_an_unfinished_transaction_holds_up_no_other_partition_and_the_same_one_is_refused(a_broker, monkeypatch):
    monkeypatch.setattr(PATIENCE, 0)
    async with a_broker() as connect:
        peer, stage = await staged(connect)
        same = await stage_one(peer, "y")
        await peer.call("create_topic", topic="u")
        free = await stage_one(peer, "z", "u")
        with failing_copies(connect) as refused:
            assert await commit(peer, "x", stage) == "TRANSACTION_UNFINISHED"
            assert await commit(peer, "y", same) == "PARTITION_HELD"
            assert await commit(peer, "z", free) == "TRANSACTION_UNFINISHED"
            assert {"t", "u"} == set(refused)
        await until(lambda: not connect.broker.transactions.faults)
        assert (await commit(peer, "y", same))["messages"] == 1
        assert await bodies(peer, "u") == [b"z"]


async def test_a_receipt_that_cannot_be_written_down_delays_nothing_and_is_written_later(a_broker):
    async with a_broker() as connect:
        peer, stage = await staged(connect)
        metadata, real = connect.broker.engine.metadata, connect.broker.engine.metadata._log.commit
        refused: list[bytes] = []

        def refuse_receipts(body: bytes, entries: Any) -> float:
            if b"receipt" in body and len(refused) < 2:
                refused.append(body)
                raise OSError(5, "disk I/O error")
            return real(body, entries)

        metadata._log.commit = refuse_receipts
        receipt = await commit(peer, "x", stage)
        assert await bodies(peer, "t") == [b"x"]
        assert await commit(peer, "x", stage) == receipt | {"replayed": True}
        await until(lambda: "receipt" in metadata.get(f"{KEY}x").value)
        assert len(refused) == 2
        assert await commit(peer, "x", stage) == receipt | {"replayed": True}


# The tool


async def test_a_transaction_is_shown_in_each_of_its_states(a_broker, monkeypatch):
    monkeypatch.setattr(PATIENCE, 0)
    async with a_broker() as connect:
        peer, stage = await staged(connect)
        shown = await peer.call("show_transaction", transaction="x")
        assert (shown["state"], shown["stages"][0]["messages"]) == ("open", 1)
        with failing_copies(connect):
            await commit(peer, "x", stage)
            shown = await peer.call("show_transaction", transaction="x")
            assert (shown["state"], shown["unfinished"]["failed_tries"] > 0) == ("unfinished", True)
            assert shown["unfinished"]["partitions"] == [
                {"topic": "t", "partition": 0, "end_offset": 0, "messages": 1, "copied": 0}
            ]
        await until(lambda: not connect.broker.transactions.faults)
        shown = await peer.call("show_transaction", transaction="x")
        assert (shown["state"], shown["receipt"]["messages"]) == ("committed", 1)
        for method in ("show_transaction", "finish_transaction", "abandon_transaction"):
            assert await peer.call(method, transaction="none") == "UNKNOWN_TRANSACTION"


async def test_finish_tries_at_once_and_says_why_not(a_broker, monkeypatch):
    monkeypatch.setattr(PATIENCE, 0)
    monkeypatch.setattr("qb.core.transactions.unfinished_transactions.FIRST_DELAY", 60)
    monkeypatch.setattr("qb.storage.faults.LONGEST_DELAY", 60)
    async with a_broker() as connect:
        peer, stage = await staged(connect)
        with failing_copies(connect) as refused:
            await commit(peer, "x", stage)
            assert await peer.call("finish_transaction", transaction="x") == "TRANSACTION_UNFINISHED"
            assert len(refused) == 2
        for _ in range(2):
            finished = await peer.call("finish_transaction", transaction="x")
            assert (finished["messages"], finished["replayed"]) == (1, True)
        assert await bodies(peer, "t") == [b"x"]


async def test_an_abandoned_transaction_lets_its_partitions_go_on_and_stays_over(a_broker, monkeypatch, tmp_path):
    monkeypatch.setattr(PATIENCE, 0)
    async with a_broker() as connect:
        peer, stage = await staged(connect)
        (tmp_path / "data" / "staged" / f"{stage.stage_id}.log").write_bytes(b"")
        assert await commit(peer, "x", stage) == "TRANSACTION_UNFINISHED"
        await peer.publish("t", b"later", partition="0")
        assert await bodies(peer, "t") == []
        receipt = await peer.call("abandon_transaction", transaction="x")
        assert (receipt["abandoned"], receipt["messages"], receipt["partitions"]) == (True, 0, [])
        assert await bodies(peer, "t") == [b"later"]
        assert connect.broker.transactions.faults == []
    async with a_broker() as connect:
        peer = await connect()
        assert await bodies(peer, "t") == [b"later"]
        assert await commit(peer, "x", stage) == receipt | {"replayed": True}
        assert await peer.call("abandon_transaction", transaction="x") == receipt | {"replayed": True}
        assert (await peer.call("show_transaction", transaction="x"))["state"] == "abandoned"


async def test_commits_that_wait_for_an_unfinished_transaction_go_on_when_it_is_abandoned(
    a_broker, tmp_path, monkeypatch
):
    monkeypatch.setattr("qb.core.transactions.unfinished_transactions.FIRST_DELAY", 60)
    monkeypatch.setattr("qb.storage.faults.LONGEST_DELAY", 60)
    async with a_broker() as connect:
        peer, stage = await staged(connect)
        other, operator, answers = await connect(), await connect(), {}
        behind = await stage_one(other, "y")
        (tmp_path / "data" / "staged" / f"{stage.stage_id}.log").write_bytes(b"")

        async def ask(who: TrioPeer, transaction: str, which: Staging) -> None:
            answers[transaction] = await commit(who, transaction, which)

        with trio.fail_after(4):  # less than commits wait
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask, peer, "x", stage)
                await until(lambda: bool(connect.broker.transactions.faults))
                nursery.start_soon(ask, other, "y", behind)
                await until(lambda: connect.broker.transactions._commits._blocked)
                await operator.call("abandon_transaction", transaction="x")
        assert (answers["x"]["abandoned"], answers["y"]["messages"]) == (True, 1)
        assert await bodies(peer, "t") == [b"y"]


async def test_a_finished_transaction_cannot_be_abandoned(a_broker):
    async with a_broker() as connect:
        peer, stage = await staged(connect)
        await commit(peer, "x", stage)
        assert await peer.call("abandon_transaction", transaction="x") == "BAD_REQUEST"
        assert await bodies(peer, "t") == [b"x"]


# Limits


async def test_beyond_the_limit_the_oldest_id_without_number_is_forgotten_first(a_broker):
    async with a_broker(max_remembered_transactions=3) as connect:
        peer = await connect()
        await commit(peer, "numbered", number=1)
        for name in "abcde":
            await commit(peer, name)
            assert (await peer.call("list_transactions"))["committed"] <= 3
        known = [(await peer.call("begin_transaction", transaction=name))["committed"] for name in "abcde"]
        assert known == [False, False, False, True, True]
        assert (await peer.call("begin_transaction", transaction="numbered", number=1))["committed"] is True
    async with a_broker(max_remembered_transactions=3) as connect:
        peer = await connect()
        assert (await peer.call("list_transactions"))["committed"] == 3
        await commit(peer, "f")
        assert (await peer.call("list_transactions"))["committed"] == 3


async def test_where_nothing_can_be_forgotten_a_new_id_is_refused_and_known_ones_go_on(a_broker):
    async with a_broker(max_remembered_transactions=2) as connect:
        peer = await connect()
        for name in "ab":
            await commit(peer, name, number=1)
        assert await peer.call("begin_transaction", transaction="c", number=1) == "LIMIT_REACHED"
        assert await commit(peer, "c", number=1) == "LIMIT_REACHED"
        assert (await commit(peer, "a", number=2))["replayed"] is False


async def test_no_more_stages_are_open_than_the_settings_allow(a_broker):
    async with a_broker(max_open_stages=2) as connect:
        peer = await connect()
        await begin(peer, "x")
        await begin(peer, "y")
        assert await peer.call("begin_transaction", transaction="z") == "LIMIT_REACHED"
        await peer.call("abort_transaction", transaction="x")
        await begin(peer, "z")


async def test_stages_that_are_begun_at_once_count_against_the_limit(a_broker):
    async with a_broker(max_open_stages=2) as connect:
        answers: list[Any] = []

        async def ask(peer: TrioPeer, name: str) -> None:
            answers.append(await peer.call("begin_transaction", transaction=name))

        peers = [await connect() for _ in range(5)]
        async with trio.open_nursery() as nursery:
            for number, peer in enumerate(peers):
                nursery.start_soon(ask, peer, f"x{number}")
        assert answers.count("LIMIT_REACHED") == 3


async def test_a_commit_that_names_too_many_stages_is_refused_at_once(a_broker, monkeypatch):
    monkeypatch.setattr("qb.core.transactions.transaction_commits.MOST_STAGES", 1)
    async with a_broker() as connect:
        peer, stage = await staged(connect)
        assert await commit(peer, "x", stage, stage) == "BAD_REQUEST"
        assert (await commit(peer, "x", stage))["messages"] == 1
