"""A fault of ours in the step that serves all peers: one session ends, or one thing is tried again, and no more."""

from __future__ import annotations

import socket

import pytest
import trio

from qb.core.wire.frames import MessageType as T
from qb.doors import socket_poll
from qb.doors.binary.publish_runs import PublishRuns
from qb.doors.binary.server_connection import ServerConnection
from qb.doors.binary.session import Session
from qb.doors.socket_poll import SocketPoll
from qb.doors.transport import Transport
from qb.storage.commit.commit_step import CommitSteps
from qb.storage.log.partition_log import LocalLog
from tests.support.injected_faults import raise_once, tracebacks
from tests.support.push_peers import a_fast_peer, a_topic

pytestmark = pytest.mark.skipif(not socket_poll.AVAILABLE, reason="there is no epoll here: each socket is waited for")

OF_A_PEER = [
    (Session, "_take"),
    (Session, "_handle_received"),
    (Session, "_begin_at_once"),
    (ServerConnection, "receive"),
    (ServerConnection, "next_event"),
    (ServerConnection, "take_run"),
    (PublishRuns, "publish"),
    (PublishRuns, "_answers"),
    (PublishRuns, "_confirmation"),
    (Transport, "send"),
    (Transport, "_send_now"),
]
OF_THE_POLL = [
    (SocketPoll, "_attend"),
    (SocketPoll, "_take"),
    (SocketPoll, "_received"),
    (SocketPoll, "heard"),
    (CommitSteps, "__enter__"),
    (CommitSteps, "_prepare"),
    (CommitSteps, "_commit"),
]


async def answers_until_the_end(peer):
    """Return the codes of the answers that come until the broker closes."""
    codes = []
    while (frame := await peer.receive()) is not None:
        codes.append(frame.properties.get("code"))
    return codes


@pytest.mark.parametrize(("owner", "method"), OF_A_PEER, ids=lambda each: getattr(each, "__name__", each))
async def test_a_fault_in_the_code_of_one_peer_ends_its_session_with_internal_and_no_other(
    a_broker, monkeypatch, caplog, owner, method
):
    quiet, raised = raise_once(monkeypatch, owner, method)
    async with a_broker() as connect:
        other = await a_topic(connect)
        failing = await a_fast_peer(connect)
        quiet.clear()
        if method == "_begin_at_once":
            await failing.send(T.HEARTBEAT, 5)
        else:
            await failing.send(T.PUBLISH, 5, b"x", topic="a")
        with trio.fail_after(20):
            codes = await answers_until_the_end(failing)
        assert raised
        assert "INTERNAL" in codes
        assert len(tracebacks(caplog)) == 1
        with trio.fail_after(20):
            assert (await other.publish("a", b"y")).properties["status"] == "success"


@pytest.mark.parametrize(("owner", "method"), OF_THE_POLL, ids=lambda each: getattr(each, "__name__", each))
async def test_a_fault_of_the_poll_itself_is_logged_and_the_poll_goes_on(a_broker, monkeypatch, caplog, owner, method):
    quiet, raised = raise_once(monkeypatch, owner, method)
    async with a_broker() as connect:
        peer = await a_topic(connect)
        quiet.clear()
        await peer.send(T.PUBLISH, 5, b"x", topic="a")
        while not raised:
            await trio.lowlevel.checkpoint()
        with trio.fail_after(20):
            another = await a_fast_peer(connect)
            assert (await another.publish("a", b"y")).properties["status"] == "success"
        assert len(tracebacks(caplog)) == 1


async def test_a_commit_that_fails_is_tried_again_and_keeps_no_other_log_from_its_own(a_broker, monkeypatch, caplog):
    real, broken, failed = LocalLog.commit, [True], []

    def commit(log, *, alone=False):
        if log.topic == "a" and broken:
            failed.append(log)
            raise RuntimeError("a bug")
        return real(log, alone=alone)

    async with a_broker() as connect:
        peers = {name: await a_topic(connect, topic=name) for name in ("a", "b")}
        monkeypatch.setattr(LocalLog, "commit", commit)
        await peers["a"].send(T.PUBLISH, 5, b"x", topic="a")
        with trio.fail_after(20):
            await peers["b"].publish("b", b"y")
            while len(failed) < 3:
                await trio.lowlevel.checkpoint()
            broken.clear()
            assert (await peers["a"].receive()).properties["status"] == "success"
        assert len(tracebacks(caplog)) == 1, "once, however often it is tried"


async def test_a_listener_that_raises_loses_nothing_of_the_others():
    poll, heard = SocketPoll(), []
    pairs = [socket.socketpair() for _ in range(3)]

    def fail(data):
        raise RuntimeError("a bug")

    for number, (ours, theirs) in enumerate(pairs):
        ours.setblocking(False)
        poll.add(ours, fail if number == 0 else lambda data: heard.append(bytes(data)))
        theirs.send(b"%d" % number)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(poll.run)
        with trio.fail_after(20):
            while len(heard) < 2:
                await trio.lowlevel.checkpoint()
            assert pairs[0][1].recv(1) == b"", "its peer is disconnected"
        nursery.cancel_scope.cancel()
    assert heard == [b"1", b"2"]
    for pair in pairs:
        for each in pair:
            each.close()
