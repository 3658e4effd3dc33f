"""A peer is dropped for its own silence, never for a stall of the broker."""

from __future__ import annotations

import signal
from unittest.mock import Mock

import pytest
import trio

from qb.core.loop_watch import LoopWatch
from qb.core.settings import ServerSettings, Settings
from qb.core.wire.frames import MessageType
from qb.doors.listening import Peers
from qb.doors.peer_life import PeerLife
from tests.support.peers import Peer
from tests.support.waiting import holds_for


class Queue:
    queued = 0
    moved = False
    is_held = False


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


class Looks:
    """A session that notes the times at which it is looked at."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def check_life(self, now: float) -> None:
        self.times.append(now)


async def test_the_time_that_peers_are_judged_by_stands_still_in_a_stall(autojump_clock):
    watch = LoopWatch()
    broker = Mock(settings=Settings(server=ServerSettings(heartbeat_interval=80)))
    broker.metrics.event_loop = watch
    peers, seen = Peers(broker), Looks()
    peers._sessions.add(seen)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(peers.keep_alive)
        await trio.sleep(15)
        watch._stalled += 100  # what the watch finds after a stall of 100 s ...
        autojump_clock.jump(100)  # ... and what the clock shows
        await trio.sleep(11)  # one more look, at 10
        nursery.cancel_scope.cancel()
    assert len(seen.times) == 3
    assert seen.times[-1] - seen.times[0] <= 20


@pytest.mark.process
def test_a_broker_that_was_stopped_for_a_while_drops_no_peer_for_it(start_broker):
    broker = start_broker(heartbeat_interval=1)
    peers = [Peer(broker.port) for _ in range(20)]
    for peer in peers:
        peer.send(MessageType.HEARTBEAT, 1)
        assert peer.receive() is not None
    holds_for(0.3, lambda: broker.process.poll() is None)  # it looks at its peers every 0.125 s: it has heard them
    broker.process.send_signal(signal.SIGSTOP)
    holds_for(2.5, lambda: broker.process.poll() is None)  # the stall: longer than two intervals
    broker.process.send_signal(signal.SIGCONT)
    holds_for(0.3, lambda: "silent" not in broker.log)  # it looks at its peers before they speak again
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
