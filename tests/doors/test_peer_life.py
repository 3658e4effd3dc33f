"""A peer is dropped for its own silence, never for a stall of the broker."""

from __future__ import annotations

import signal
import time

import pytest
import trio

from qb.core.wire.frames import PROBE, MessageType
from qb.doors.peer_life import PeerLife
from tests.support.peers import Peer


class Queue:
    queued = 0
    moved = False


@pytest.fixture
def life() -> PeerLife:
    life = PeerLife(Queue(), interval=10, silence=20)
    life.listening = True
    assert life.look(0) is None
    return life


def test_a_silent_peer_is_probed_once_and_dropped_when_its_time_is_over(life):
    assert [(life.look(now), life.probe_is_due(now)) for now in (10, 11, 19, 20)] == [
        (None, False),
        (None, True),
        (None, False),
        (None, False),
    ]
    assert life.look(21) == "silent for 20 s"


def test_a_peer_that_is_heard_begins_anew_and_is_probed_again(life):
    assert life.look(11) is None
    assert life.probe_is_due(11)
    life.heard = True
    assert life.look(15) is None
    assert not life.probe_is_due(15)
    assert life.look(26) is None
    assert life.probe_is_due(26)
    assert life.look(36) == "silent for 20 s"


def test_a_peer_that_is_not_listened_to_is_not_silent(life):
    life.listening = False
    assert life.look(100) is None
    life.listening = True
    assert life.look(119) is None


def test_a_peer_must_read_something_of_what_waits_for_it(life):
    outgoing = life._outgoing
    outgoing.queued, outgoing.moved, life.listening = 5, True, False
    assert life.look(100) is None
    assert life.look(120) is None
    outgoing.moved = True
    assert life.look(121) is None
    assert life.look(142) == "has not read what it was sent for 20 s"


async def test_a_stall_of_the_broker_moves_the_end_of_patience_by_as_much(a_broker, autojump_clock, monkeypatch):
    async with a_broker(heartbeat_interval=30) as connect:
        peer = await connect()
        assert (await peer.receive()).sequence_number == PROBE  # silent for 30 s
        watch = connect.broker.metrics.event_loop
        monkeypatch.setattr(watch, "_stalled", 100.0)
        autojump_clock.jump(100)  # what the clock shows after a stall of 100 s
        await trio.sleep(10)
        await peer.send(MessageType.HEARTBEAT, 7)
        assert (await peer.receive()).sequence_number == 7
        await trio.sleep(10)
        autojump_clock.jump(100)  # and this is a silence of 100 s
        assert await peer.receive() is None


@pytest.mark.process
def test_a_broker_that_was_stopped_for_a_while_drops_nobody_for_it(start_broker):
    broker = start_broker(heartbeat_interval=1)
    peers = [Peer(broker.port) for _ in range(20)]
    for peer in peers:
        peer.send(MessageType.HEARTBEAT, 1)
        assert peer.receive() is not None
    time.sleep(0.3)  # it looks at its peers every 0.125 s, and knows when they last spoke
    broker.process.send_signal(signal.SIGSTOP)
    time.sleep(2.5)  # longer than two intervals: the stall itself
    broker.process.send_signal(signal.SIGCONT)
    time.sleep(0.3)  # it looks at its peers before they speak again
    for peer in peers:
        peer.send(MessageType.HEARTBEAT, 2)
    for peer in peers:
        assert peer.receive().type == MessageType.HEARTBEAT
        peer.socket.close()
    assert "silent" not in broker.log


async def test_the_lag_of_the_loop_is_exported(a_broker):
    async with a_broker() as connect:
        http = await connect.http()
        body = (await http.ask("GET", "/metrics")).body.decode()
    (count,) = [line.split()[1] for line in body.splitlines() if line.startswith("qb_event_loop_lag_seconds_count")]
    assert float(count) > 0
