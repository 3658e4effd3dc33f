"""What disturbs a world: cuts, doubled connections, kills, power cuts, a disk that fails or is full."""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable
from random import Random

import trio

from tests.simulation.disk import Fault
from tests.simulation.world import CannotOpen, World

CAPACITY = 1 << 30
CALLS = ("fsync", "pwrite", "pwrite", "open", "rename", "unlink", "mkdir", "ftruncate")


class Adversary:
    """Disturbs at moments of chance, a few times."""

    def __init__(self, world: World, chance: Random) -> None:
        self._world, self._chance = world, chance

    async def disturb(self, brokers: trio.Nursery, times: int) -> None:
        """Disturb so many times: a fault of the disk and a kill at least, and a power cut at the end."""
        acts: list[Callable[[trio.Nursery], Awaitable[None]]] = [self._restart, self._fault]
        acts += self._chance.choices(
            (self._restart, self._cut, self._double, self._fault, self._fill, self._stop), k=times - 2
        )
        self._chance.shuffle(acts)
        for act in acts:
            await trio.sleep(self._chance.random() * 0.5)
            await act(brokers)
        await trio.sleep(0.5)
        self._heal()
        await self._world.kill(power=True)
        await self._start(brokers)

    def _heal(self) -> None:
        self._world.disk.faults.clear()
        self._world.disk.capacity = CAPACITY

    async def _start(self, brokers: trio.Nursery) -> None:
        """Start the broker; a disk that fails may prevent it, a whole one must not."""
        try:
            await self._world.start(brokers)
        except CannotOpen as error:
            self._world.note(f"cannot open: {error}")
            self._world.disk.end_process()
            self._heal()
            await self._world.start(brokers)

    async def _restart(self, brokers: trio.Nursery) -> None:
        await self._world.kill(power=self._chance.random() < 0.6)
        await trio.sleep(self._chance.random())
        await self._start(brokers)

    async def _stop(self, brokers: trio.Nursery) -> None:
        await self._world.stop()
        await self._start(brokers)

    async def _cut(self, brokers: trio.Nursery) -> None:
        self._world.disturb("a connection is cut")
        self._world.network.cut_one()

    async def _double(self, brokers: trio.Nursery) -> None:
        self._world.disturb("a connection is doubled: what was sent on it arrives late, and is sent again")
        self._world.network.double_one()

    async def _fault(self, brokers: trio.Nursery) -> None:
        call, error = self._chance.choice(CALLS), self._chance.choice((errno.EIO, errno.ENOSPC))
        self._world.disturb(f"the next {call} fails with {errno.errorcode[error]}")
        self._world.disk.faults.append(Fault(call, error))

    async def _fill(self, brokers: trio.Nursery) -> None:
        self._world.disturb("the disk is full")
        self._world.disk.capacity = self._world.disk.used + self._chance.randrange(2_000)
        await trio.sleep(self._chance.random())
        self._world.disk.capacity = CAPACITY
