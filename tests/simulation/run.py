"""One seed from its beginning to the check of every promise."""

from __future__ import annotations

import hashlib
import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import NamedTuple

import trio
import trio.testing
from trio._core import _run as scheduler

from tests.simulation.adversary import Adversary
from tests.simulation.ledger import Ledger
from tests.simulation.replicated_adversary import CellAdversary
from tests.simulation.replicated_world import ReplicatedWorld
from tests.simulation.workload import TOPIC, Clients
from tests.simulation.world import World

OPERATIONS = 100  # of publishers, at least
DISTURBANCES = 4
LONGEST = 3_600.0  # seconds of the world's own time


class Outcome(NamedTuple):
    """What became of a seed. Equal seeds of the same code have equal stories."""

    seed: int
    operations: int
    steps: int
    story: str  # a digest of all that happened
    error: BaseException | None = None
    last_steps: tuple[str, ...] = ()


def explained(outcome: Outcome, mode: str = "") -> str:
    """Return the story of a seed that failed, and how to repeat it."""
    assert outcome.error is not None
    again = f"seed {outcome.seed}; again: python -m tests.simulation {mode}--first {outcome.seed} --seeds 1"
    return "\n".join([again, *outcome.last_steps, *traceback.format_exception(outcome.error)])


def simulate(seed: int, operations: int = OPERATIONS, *, replicated: bool = False) -> Outcome:
    """Run one world. Never raises for what the broker did: see Outcome.error."""
    world = ReplicatedWorld(seed) if replicated else World(seed)
    ledger = Ledger(world)
    digest = hashlib.sha256()
    note = world.note

    def noted(what: str) -> None:
        note(what)
        digest.update(world.steps[-1].encode())

    world.note = noted  # type: ignore[method-assign]
    error: BaseException | None = None
    with deterministic(seed):
        try:
            clock = trio.testing.MockClock(autojump_threshold=0)
            trio.run(_live, world, ledger, operations, clock=clock)
        except BaseException as failed:
            if isinstance(failed, KeyboardInterrupt):
                raise
            error = failed
    return Outcome(seed, ledger.operations, world.taken, digest.hexdigest(), error, tuple(world.steps))


async def _live(world: World, ledger: Ledger, operations: int) -> None:
    with world.installed(), trio.fail_after(LONGEST):
        async with trio.open_nursery() as brokers:
            await world.start(brokers)
            clients = Clients(world, ledger, Random(world.chance.getrandbits(64)), operations)
            adversary = _adversary(world)
            await clients.prepare()
            async with trio.open_nursery() as background:
                background.start_soon(clients.subscribe, "worker-1")
                background.start_soon(clients.subscribe, "worker-2")
                background.start_soon(clients.consume, "reader-1")
                async with trio.open_nursery() as onlookers:
                    onlookers.start_soon(clients.administer, "operator")
                    onlookers.start_soon(clients.observe, "observer")
                    async with trio.open_nursery() as active:
                        active.start_soon(clients.publish, "publisher-1")
                        active.start_soon(clients.publish, "publisher-2")
                        active.start_soon(clients.publish_lines, "lines-1")
                        active.start_soon(clients.publish_http, "http-1")
                        active.start_soon(adversary.disturb, brokers, DISTURBANCES)
                    world.note("all is published, nothing is disturbed any more")
                    onlookers.cancel_scope.cancel()
                logs, dead_letters = await clients.settle()
                background.cancel_scope.cancel()
            ledger.check_logs(logs)
            ledger.check_deliveries(TOPIC, logs, dead_letters)
            ledger.check_offsets(await clients.committed())
            await world.stop()


def _adversary(world: World) -> Adversary | CellAdversary:
    chance = Random(world.chance.getrandbits(64))
    return CellAdversary(world, chance) if isinstance(world, ReplicatedWorld) else Adversary(world, chance)


@contextmanager
def deterministic(seed: int) -> Iterator[None]:
    """Let trio choose between tasks that could run as the seed says, and keep what the broker logs to itself."""
    before, disabled = scheduler._ALLOW_DETERMINISTIC_SCHEDULING, logging.root.manager.disable
    scheduler._ALLOW_DETERMINISTIC_SCHEDULING = True
    scheduler._r.seed(seed)
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        scheduler._ALLOW_DETERMINISTIC_SCHEDULING = before
        logging.disable(disabled)
