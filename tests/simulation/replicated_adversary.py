"""What disturbs a cell: kills and power cuts, owners that are cut off and come back, disks that fail, moves."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Awaitable, Callable
from random import Random

import trio

from qb.replication.journal.memory_store import NO_FAULTS
from tests.simulation.disk import Fault
from tests.simulation.replicated_world import CellMember, ReplicatedWorld

CALLS = ("fsync", "pwrite", "pwrite", "open", "rename", "unlink", "mkdir", "ftruncate")


class CellAdversary:
    """Disturbs at moments of chance, a few times."""

    def __init__(self, world: ReplicatedWorld, chance: Random) -> None:
        self._world, self._chance = world, chance

    async def disturb(self, brokers: trio.Nursery, times: int) -> None:
        """Disturb so many times: an owner that is cut off and one that is killed at least."""
        acts: list[Callable[[trio.Nursery], Awaitable[None]]] = [self._cut_off, self._kill_owner]
        more = (self._kill_owner, self._kill_follower, self._replace_follower, self._move, self._cut, self._fault)
        acts += self._chance.choices(more, k=times - 2)
        self._chance.shuffle(acts)
        for act in acts:
            await trio.sleep(self._chance.random() * 0.7)
            await act(brokers)
            await self._have_an_owner(brokers)
        await trio.sleep(0.5)
        self._calm_down()
        await trio.sleep(0.1)  # for a fault that has been met already to be noticed
        await self._have_an_owner(brokers)

    def _calm_down(self) -> None:
        self._world.faults = NO_FAULTS
        for member in self._world.members:
            member.disk.faults.clear()
            if member.life is not None:
                member.life.store.faults = NO_FAULTS

    def _other(self) -> CellMember:
        return self._chance.choice([member for member in self._world.members if member is not self._world.owner])

    async def _have_an_owner(self, brokers: trio.Nursery) -> None:
        """Restart who has ended, and let another one take over from an owner that has."""
        world = self._world
        while True:
            if world.owner is not None:
                await world.owner.end_when_lost()
            ended = world.owner is None or not world.owner.is_alive
            for member in world.members:
                await world.start_member(member, brokers)
            if not ended or await world.take_over(self._other()):
                return

    async def _kill_owner(self, brokers: trio.Nursery) -> None:
        world = self._world
        assert world.owner is not None
        await world.kill_member(world.owner, power=self._chance.random() < 0.5)
        if self._chance.random() < 0.3:
            await world.kill_member(self._other(), power=True)
        await trio.sleep(self._chance.random())

    async def _kill_follower(self, brokers: trio.Nursery) -> None:
        await self._world.kill_member(self._other(), power=self._chance.random() < 0.7)
        await trio.sleep(self._chance.random())

    async def _replace_follower(self, brokers: trio.Nursery) -> None:
        """A follower comes back with an empty disk."""
        member = self._other()
        await self._world.kill_member(member, power=True)
        self._world.note(f"{member.name} has an empty disk")
        shutil.rmtree(member.settings.storage.data_dir)

    async def _cut_off(self, brokers: trio.Nursery) -> None:
        """The owner does not reach the journal, another one takes over, and then the owner reaches it again."""
        world = self._world
        old = world.owner
        assert old is not None
        assert old.life is not None
        world.disturb(f"{old.name} is cut off from the journal")
        life = old.life
        life.store.is_cut_off = True
        await trio.sleep(self._chance.random() * 0.2)
        took_over = await world.take_over(self._other())
        await trio.sleep(self._chance.choice((0.0, 0.01, 1.0)))
        world.note(f"{old.name} reaches the journal again")
        life.store.reconnect()
        if took_over:
            await life.ended.wait()
        else:  # who should have taken over has ended; the lease of this one is over all the same
            await world.kill_member(old, power=False)

    async def _move(self, brokers: trio.Nursery) -> None:
        world = self._world
        assert world.owner is not None
        world.disturb(f"{world.owner.name} hands the cell over")
        await world.stop_owner()

    async def _cut(self, brokers: trio.Nursery) -> None:
        self._world.disturb("a connection is cut")
        self._world.network.cut_one()

    async def _fault(self, brokers: trio.Nursery) -> None:
        member = self._chance.choice(self._world.members)
        call, error = self._chance.choice(CALLS), self._chance.choice((errno.EIO, errno.ENOSPC))
        self._world.disturb(f"the next {call} of {member.name} fails with {errno.errorcode[error]}")
        member.disk.faults.append(Fault(call, error))
