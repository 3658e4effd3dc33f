"""A fault of ours between what storage has done and the answer: the peer gets INTERNAL, or its answer, not silence."""

from __future__ import annotations

import msgspec
import pytest
import trio

from qb.core.broker.numbered_publishes import NumberedPublishes
from qb.core.broker.outgoing_messages import PartitionBatch
from qb.core.push.cursor_saver import CursorSaver
from qb.core.transactions.remembered_transactions import RememberedTransactions
from qb.core.transactions.transaction_commits import TransactionCommits
from qb.core.wire.frames import MessageType as T
from qb.doors.binary import frame_requests, stage_requests
from qb.storage.metadata import metadata_store
from tests.support.injected_faults import raise_once, tracebacks
from tests.support.push_peers import a_fast_peer, a_topic, joined
from tests.support.transaction_peers import begin, part

OFFSETS = msgspec.json.encode({"group": "g", "offsets": [["a", 0, 0]]})


async def publish(peer):
    await peer.send(T.PUBLISH, 5, b"x", topic="a")


async def transaction(peer):
    await peer.send(T.TRANSACTION, 5, part("a", 0, b"x"), transaction="t")


async def commit_offsets(peer):
    await peer.send(T.REQUEST, 5, OFFSETS, method="commit_offsets")


ANSWERED_INTERNAL = [
    (publish, NumberedPublishes, "_note"),
    (transaction, frame_requests, "_transaction_answer"),
    (transaction, RememberedTransactions, "_forget_ends"),
    (transaction, metadata_store, "decide"),
    (transaction, metadata_store, "apply_changes"),
    (commit_offsets, metadata_store, "decide"),
    (commit_offsets, metadata_store, "apply_changes"),
]


@pytest.mark.parametrize(
    ("request_of_a_peer", "owner", "method"), ANSWERED_INTERNAL, ids=lambda each: getattr(each, "__name__", each)
)
async def test_a_request_whose_answer_fails_is_answered_internal_and_others_are_served(
    a_broker, monkeypatch, caplog, request_of_a_peer, owner, method
):
    quiet, raised = raise_once(monkeypatch, owner, method)
    async with a_broker() as connect:
        other = await a_topic(connect)
        await other.publish("a", b"first")
        failing = await a_fast_peer(connect)
        quiet.clear()
        await request_of_a_peer(failing)
        with trio.fail_after(20):
            answer = await failing.receive()
            assert raised
            assert answer.properties["code"] == "INTERNAL"
            assert (await other.publish("a", b"y")).properties["status"] == "success"
            assert await other.ask(T.TRANSACTION, 9, part("a", 0, b"z"), transaction="next")
        assert tracebacks(caplog)


async def test_a_stage_whose_answer_fails_is_answered_internal(a_broker, monkeypatch, caplog):
    quiet, raised = raise_once(monkeypatch, stage_requests, "staged")
    async with a_broker() as connect:
        await a_topic(connect)
        failing = await a_fast_peer(connect)
        staging = await begin(failing, "t")
        quiet.clear()
        with trio.fail_after(20):
            assert await staging.send("a", 0, b"x") == "INTERNAL"
        assert raised
        assert len(tracebacks(caplog)) == 1


@pytest.mark.parametrize("method", ["_show_at_once", "_receipt", "_end"])
async def test_a_decided_transaction_that_cannot_be_shown_at_once_is_finished_and_answered(
    a_broker, monkeypatch, caplog, method
):
    quiet, raised = raise_once(monkeypatch, TransactionCommits, method)
    async with a_broker() as connect:
        peer = await a_topic(connect)
        quiet.clear()
        with trio.fail_after(20):
            answer = await peer.ask(T.TRANSACTION, 5, part("a", 0, b"x"), transaction="t")
            assert raised
            assert answer.properties["status"] == "success"
            assert (await peer.ask(T.TRANSACTION, 6, part("a", 0, b"y"), transaction="u")).properties[
                "status"
            ] == "success"
        assert len(tracebacks(caplog)) == 1


async def test_a_fault_behind_the_save_of_settled_messages_keeps_nothing_from_coming(a_broker, monkeypatch, caplog):
    quiet, raised = raise_once(monkeypatch, CursorSaver, "_saved")
    async with a_broker() as connect:
        publisher = await a_topic(connect)
        await publisher.call("create_subscription", subscription_id="s", topic="a")
        subscriber = await joined(connect, window="1")
        with trio.fail_after(20):
            for offset in range(3):
                await publisher.publish("a", b"x")
                assert (await subscriber.receive()).type == T.DELIVER
                quiet.clear()
                settle = msgspec.json.encode({"acks": [[0, offset, 1, 1]]})
                await subscriber.send(T.SETTLE, offset + 1, settle, subscription_id="s")
        assert raised
        assert len(tracebacks(caplog)) == 1


async def test_a_line_whose_answer_fails_is_answered_and_the_session_ends(a_broker, monkeypatch, caplog):
    quiet, raised = raise_once(monkeypatch, PartitionBatch, "outcome")
    async with a_broker() as connect:
        await a_topic(connect)
        peer = await connect.lines()
        quiet.clear()
        await peer.send(type="produce", topic="a", value="x")
        with trio.fail_after(20):
            assert b"internal error" in await peer.receive_bytes()
            assert await peer.receive_bytes() is None
        assert raised
        assert len(tracebacks(caplog)) == 1


@pytest.mark.parametrize(("owner", "method"), [(PartitionBatch, "outcome"), (metadata_store, "apply_changes")])
async def test_a_request_of_http_whose_answer_fails_is_500(a_broker, monkeypatch, caplog, owner, method):
    quiet, raised = raise_once(monkeypatch, owner, method)
    async with a_broker() as connect:
        await a_topic(connect)
        peer = await connect.http()
        quiet.clear()
        with trio.fail_after(20):
            if owner is PartitionBatch:
                answer = await peer.refused("POST", "/topics/a/messages", {"value": "x"})
            else:
                answer = await peer.refused("POST", "/topics", {"name": "b"})
        assert raised
        assert answer == (500, "INTERNAL")
        assert len(tracebacks(caplog)) == 1
