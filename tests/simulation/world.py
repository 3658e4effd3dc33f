"""One world for one seed: its disk, network, threads, clock and chance, and the broker that lives in it."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from random import Random
from types import ModuleType
from unittest.mock import patch

import trio
import trio.testing

from qb.core.loop_watch import LoopWatch
from qb.core.pacing import Turn
from qb.core.settings import ServerSettings, Settings, StorageSettings
from qb.doors.http.http_door import HttpDoor
from qb.doors.json_lines.json_door import JsonDoor
from qb.doors.listening import BinaryDoor, ListeningDoor
from qb.server import serve
from qb.storage.files import CannotOpen
from qb.storage.local_engine import LocalEngine
from tests.simulation import threads
from tests.simulation.disk import SimulatedDisk
from tests.simulation.network import SimulatedNetwork
from tests.simulation.system import System

EPOCH_NS = 1_800_000_000_000_000_000  # the wall clock at the beginning of every world
REAL_CLOCKS = (time.perf_counter, time.monotonic)
STEPS_SHOWN = 60
FRAMES, LINES, HTTP = 9999, 4040, 8080  # the ports of the doors


class World:
    """What a seed decides about, and how to disturb it."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.chance = Random(seed)
        self.disk = SimulatedDisk("/simulated", self._branch())
        self.network = SimulatedNetwork(self._branch(), slowest=self.chance.choice((0.001, 0.02, 0.1)))
        self._slowest_disk = self.chance.choice((0.001, 0.01, 0.2))
        self.steps: deque[str] = deque(maxlen=STEPS_SHOWN)
        self.taken = 0  # steps
        self.disturbed = [0.0]  # when something was cut, killed or failed
        self.settings = Settings(
            server=ServerSettings(heartbeat_interval=self.chance.choice((5.0, 30.0))),
            storage=StorageSettings(
                data_dir="/simulated/data",
                segment_bytes=self.chance.choice((2_000, 20_000, 1_000_000)),
                tail_bytes=self.chance.choice((1_000, 1_000_000)),
            ),
        )
        self.disks = [self.disk]
        self._broker: BrokerLife | None = None

    def _branch(self) -> Random:
        """Return chance of its own, so that one more call in one part does not change what all others see."""
        return Random(self.chance.getrandbits(64))

    def note(self, what: str) -> None:
        """Add a line to the story of this world."""
        self.taken += 1
        self.steps.append(f"{trio.current_time():9.4f}  {what}")

    def disturb(self, what: str) -> None:
        """Note something that clients may notice."""
        self.disturbed.append(trio.current_time())
        self.note(f"!! {what}")

    def was_disturbed(self, since: float) -> bool:
        """Was anything cut, killed or failed at this time or later?"""
        return self.disturbed[-1] >= since

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Let this process live in this world while the context is open."""
        secret, generators, gives_way = self._branch(), self._branch(), self._branch()
        real_random, real_urandom, inhabitant = random.Random, os.urandom, threading.get_ident()

        def new_random(seed: object = None) -> Random:
            seeded = seed is None and threading.get_ident() == inhabitant
            return real_random(generators.getrandbits(64) if seeded else seed)  # type: ignore[arg-type]

        def urandom(size: int) -> bytes:  # a thread outside of this world must not change what the world sees
            return secret.randbytes(size) if threading.get_ident() == inhabitant else real_urandom(size)

        with ExitStack() as stack:
            for module, name, value in (
                (os, "urandom", urandom),
                (random, "_urandom", urandom),
                (random, "Random", new_random),
                (time, "time_ns", lambda: EPOCH_NS + int(_now() * 1e9)),
                (time, "perf_counter", _now),
                (time, "monotonic", _now),
            ):
                stack.enter_context(patch.object(module, name, value))
            stack.enter_context(patch.object(LoopWatch.__init__, "__defaults__", (lambda: 0.0,)))
            stack.enter_context(patch.object(Turn, "is_over", property(lambda turn: gives_way.random() < 0.2)))
            for module, name in _clocks_imported_by_name():  # (a loop whose clock jumps has no lag to measure)
                stack.enter_context(patch.object(module, name, _now))
            stack.enter_context(patch("qb.clients.protocol.reconnecting._random", self._branch()))
            stack.enter_context(threads.installed(self._branch(), self._slowest_disk))
            for disk in self.disks:
                stack.enter_context(System(disk).installed())
            stack.enter_context(self.network.installed())
            yield

    # The broker

    async def start(self, nursery: trio.Nursery) -> None:
        """Start the broker; returns when it serves. Raises CannotOpen."""
        engine = LocalEngine.open(self.settings.storage)
        for line in engine.recovery.notes:
            self.note(f"start: {line}")
        self._broker = BrokerLife(engine)
        listening = [
            ListeningDoor("frames", BinaryDoor, [self.network.listen(FRAMES)]),  # type: ignore[list-item]
            ListeningDoor("JSON lines", JsonDoor, [self.network.listen(LINES)]),  # type: ignore[list-item]
            ListeningDoor("HTTP", HttpDoor, [self.network.listen(HTTP)]),  # type: ignore[list-item]
        ]
        started = trio.Event()

        async def live(life: BrokerLife) -> None:
            try:
                with life.scope:
                    await serve(self.settings, engine, listening, life.stop, started=lambda broker: started.set())
            except Exception:
                if not self.disk.off:  # a process that was killed says nothing
                    raise
            finally:
                life.ended.set()

        nursery.start_soon(live, self._broker)
        await started.wait()
        self.note("the broker serves")

    async def kill(self, *, power: bool) -> None:
        """End the broker at once: what it had not written is lost, and with the power what it had not synced."""
        assert self._broker is not None
        self.disturb("the power is cut" if power else "the broker is killed")
        self.disk.off = True
        self.network.end_all()
        self._broker.scope.cancel()
        await self._broker.ended.wait()
        if power:
            self.disk.lose_power()
        self.disk.end_process()

    async def stop(self) -> None:
        """End the broker as SIGTERM does."""
        assert self._broker is not None
        self.disturb("the broker is stopped")
        self._broker.stop.set()
        await self._broker.ended.wait()
        self._broker.engine.close()
        self.network.end_all()
        self.disk.end_process()


def _now() -> float:
    """Return the time of this world; a thread outside of it, say of another test's client, keeps the real time."""
    try:
        return trio.current_time()
    except RuntimeError:
        return REAL_CLOCKS[0]()


def _clocks_imported_by_name() -> list[tuple[ModuleType, str]]:
    """Return where modules of ours hold a clock under a name of their own, so that none of them sees the real time."""
    return [
        (module, name)
        for module_name, module in list(sys.modules.items())
        if module_name.startswith("qb.")
        for name, value in vars(module).items()
        if any(value is clock for clock in REAL_CLOCKS)
    ]


class BrokerLife:
    """A broker from its start to its end."""

    def __init__(self, engine: LocalEngine) -> None:
        self.engine = engine
        self.stop = trio.Event()
        self.ended = trio.Event()
        self.scope = trio.CancelScope()


__all__ = ["CannotOpen", "World"]
