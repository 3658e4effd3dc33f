"""Whole brokers in simulated worlds keep every promise, and the simulation notices when one is broken."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from inspect import signature
from random import Random
from unittest.mock import patch

import pytest
import trio
import trio.testing

from qb import AsyncBrokerClient
from qb.core.broker import producers
from qb.core.transactions.stage_copy import StageCopy
from qb.doors.socket_poll import SocketPoll
from qb.storage import files
from qb.storage.log import segment
from tests.simulation.network import Connection, Pipe, SimulatedPoll
from tests.simulation.run import explained, simulate
from tests.simulation.world import World
from tests.support.brokers import ROOT

SEEDS = 1_000
AT_ONCE = 10  # seeds of one test: many tests share the work among processes

pytestmark = pytest.mark.simulation


@pytest.mark.parametrize("first", range(0, SEEDS, AT_ONCE))
def test_every_promise_is_kept(first: int) -> None:
    for seed in range(first, first + AT_ONCE):
        outcome = simulate(seed)
        if outcome.error:
            pytest.fail(explained(outcome), pytrace=False)
        assert outcome.operations >= 100


def test_a_seed_has_the_same_story_in_every_process() -> None:
    show = "from tests.simulation.run import simulate; print(*[simulate(seed).story for seed in range(3)])"
    command = [sys.executable, "-c", show]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    assert shown.stdout.split() == [simulate(seed).story for seed in range(3)]


@pytest.mark.parametrize("name", ["__init__", "add", "remove", "heard", "run"])
def test_the_poll_of_a_world_is_called_as_the_real_one(name: str) -> None:
    real, simulated = (signature(getattr(each, name)).parameters for each in (SocketPoll, SimulatedPoll))
    assert list(simulated) == list(real)


async def test_what_was_sent_on_a_doubled_connection_arrives_after_the_client_has_seen_its_end(
    autojump_clock: trio.testing.MockClock,
) -> None:
    connection = Connection(Pipe(Random(0), 0.01), Pipe(Random(0), 0.01))
    connection.to_broker.send(b"sent")
    connection.double(0.5)
    assert connection.to_client.receive(100) == b""
    began = trio.current_time()
    await connection.to_broker.wait_for_data()
    assert connection.to_broker.receive(100) == b"sent"
    assert 0.5 <= trio.current_time() - began <= 0.51
    await connection.to_broker.wait_for_data()
    assert connection.to_broker.receive(100) == b""


@contextmanager
def acks_before_the_sync() -> Iterator[None]:
    with patch.object(files, "RWF_DSYNC", 0), patch.object(files, "_datasync", lambda fd: None):
        yield


@contextmanager
def names_of_segments_are_not_synced() -> Iterator[None]:
    with patch.object(segment, "sync_directory", lambda directory: None):
        yield


@contextmanager
def repeated_publishes_are_stored_again() -> Iterator[None]:
    with patch.object(producers.KnownProducer, "judge", lambda self, number, owner=None: producers.NEW):
        yield


@contextmanager
def transactions_are_shown_as_they_are_copied() -> Iterator[None]:
    with patch.object(StageCopy, "hold", lambda self, reason=None: None):
        yield


@pytest.mark.parametrize(
    ("fault", "first"),  # the seed to begin with
    [
        (acks_before_the_sync, 0),
        (names_of_segments_are_not_synced, 0),
        (repeated_publishes_are_stored_again, 0),
        (transactions_are_shown_as_they_are_copied, 90),
    ],
)
def test_a_fault_that_is_put_back_is_found(fault: Callable[[], AbstractContextManager[None]], first: int) -> None:
    with fault():
        assert any(simulate(seed).error for seed in range(first, first + 60))


def test_a_broker_stops_though_its_cursors_cannot_be_saved() -> None:
    async def live(world: World) -> None:
        with world.installed():
            async with trio.open_nursery() as brokers:
                await world.start(brokers)
                handled = trio.Event()

                async def handle(message: object) -> None:
                    world.disk.capacity = world.disk.used
                    handled.set()

                async with AsyncBrokerClient() as client:
                    await client.create_topic("orders")
                    await client.publish("orders", b"one")
                    await client.create_and_subscribe("workers", "orders", handle)
                    await handled.wait()
                await world.stop()
                world.disk.capacity = 1 << 30
                await world.start(brokers)
                async with AsyncBrokerClient() as client:
                    assert (await client.offsets("orders")).next == 1
                await world.stop()

    trio.run(live, World(0), clock=trio.testing.MockClock(autojump_threshold=0))
