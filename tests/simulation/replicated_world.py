"""A world with a cell: several brokers on one journal in memory, of which one serves."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import trio

from qb.doors.http.http_door import HttpDoor
from qb.doors.json_lines.json_door import JsonDoor
from qb.doors.listening import BinaryDoor, ListeningDoor
from qb.replication.engine.replicated_cell import ReplicatedCell
from qb.replication.journal.journal import Journal
from qb.replication.journal.journal_store import JournalError
from qb.replication.journal.memory_store import MemoryStore, MemoryStream, NetworkFaults
from qb.replication.journal.trio_timers import TrioTimers
from qb.server import serve
from qb.storage.files import CannotOpen
from qb.storage.verification import verify
from tests.simulation.disk import SimulatedDisk
from tests.simulation.ledger import BrokenPromise
from tests.simulation.world import FRAMES, HTTP, LINES, World
from tests.support.cells import answers
from tests.support.journal_world import check_fences

NODES = 2
MOST_STARTS = 60  # of all brokers of a world; more are a broker that ends again and again
IDENTITY = "the simulated stream"


class Killed(Exception):
    """The process was killed."""


class NodeLife:
    """One process of a node, from its start to its end."""

    def __init__(self, world: ReplicatedWorld, name: str) -> None:
        self.timers = TrioTimers()
        draw = random.Random(world.chance.getrandbits(64))
        self.store = MemoryStore(
            world.stream,
            self.timers,
            network=world.outside,
            faults=world.faults,
            draw=draw,
            most_bytes=world.most_bytes,
        )
        self.journal = Journal(self.store, self.timers, name, window=world.window, draw=draw)
        self.cell: ReplicatedCell | None = None
        self.promoted, self.serving, self.opened = trio.Event(), trio.Event(), trio.Event()
        self.stop, self.ended = trio.Event(), trio.Event()
        self.scope = trio.CancelScope()
        self.error: BaseException | None = None


class CellMember:
    """A broker of the cell: its disk, and its process."""

    def __init__(self, world: ReplicatedWorld, number: int) -> None:
        self.name = f"node-{number}"
        self.disk = SimulatedDisk(f"/simulated-{number}", world.branch(), number=number)
        storage = msgspec.structs.replace(world.settings.storage, data_dir=f"/simulated-{number}/data")
        self.settings = msgspec.structs.replace(world.settings, storage=storage)
        self.life: NodeLife | None = None

    @property
    def is_alive(self) -> bool:
        return self.life is not None and not self.life.ended.is_set()

    async def end_when_lost(self) -> None:
        """If it has lost its tenure, return when its process has ended, as it is about to."""
        if self.is_alive and self.cell.lost.is_set():
            assert self.life is not None
            await self.life.ended.wait()

    @property
    def cell(self) -> ReplicatedCell:
        assert self.life is not None
        assert self.life.cell is not None
        return self.life.cell


class ReplicatedWorld(World):
    """What a seed decides about a cell, and how to disturb it."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.stream, self.outside = MemoryStream(), TrioTimers()
        self.window = self.chance.choice((1, 4, 8))
        self.most_bytes = self.chance.choice((300, 4_000, 1 << 20))
        self.faults = self._drawn_faults()
        self._outside_ends = trio.CancelScope()
        self.takeovers = self.starts = 0
        self.members = [CellMember(self, number) for number in range(NODES)]
        self.disks = [member.disk for member in self.members]
        self.owner: CellMember | None = None

    def branch(self) -> random.Random:
        return self._branch()

    def _drawn_faults(self) -> NetworkFaults:
        def some(most: float) -> float:
            return self.chance.choice((0.0, self.chance.uniform(0, most)))

        return NetworkFaults(
            lost_request=some(0.05),
            lost_answer=some(0.05),
            late=some(0.1),
            latest=3.0,
            doubled=some(0.2),
            stale_read=some(0.3),
            stale_refusal=some(0.05),
        )

    async def start(self, nursery: trio.Nursery) -> None:
        """Start all brokers, and let one own the cell."""
        nursery.start_soon(self._run_outside)
        for member in self.members:
            await self.start_member(member, nursery)
        await self.take_over(self.members[0])

    async def _run_outside(self) -> None:
        with self._outside_ends:
            await self.outside.run()

    async def start_member(self, member: CellMember, nursery: trio.Nursery) -> None:
        """Start a broker as a follower; on a disk that fails it is tried again when that is whole."""
        while not member.is_alive:
            self.starts += 1
            if self.starts > MOST_STARTS:
                raise BrokenPromise(f"{member.name} cannot start: {member.life and member.life.error}")
            life = member.life = NodeLife(self, member.name)
            nursery.start_soon(self._live, member, life)
            await until(lambda: life.opened.is_set() or life.ended.is_set())  # noqa: B023
            if life.ended.is_set():
                self.note(f"{member.name} could not start: {life.error}")
                member.disk.faults.clear()
                member.disk.capacity = 1 << 30
                if not isinstance(life.error, (CannotOpen, OSError)):
                    raise BrokenPromise(f"{member.name} could not start") from life.error
        self.note(f"{member.name} follows")

    async def _live(self, member: CellMember, life: NodeLife) -> None:
        try:
            with life.scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(life.timers.run)
                    nursery.start_soon(self._abandon_at_the_end, life)
                    await self._serve(member, life, nursery)
                    nursery.cancel_scope.cancel()
        except* (JournalError, OSError, Killed) as failed:
            life.error = _first(failed)
            self.note(f"{member.name} ends: {life.error}")
        except* Exception as failed:
            life.error = _first(failed)
            if not member.disk.off:
                self.note(f"{member.name} ends by a fault of ours: {life.error!r}")
                for each in self.members:
                    if each.life is not None and each.life.cell is not None:
                        each.life.cell.abandon(Killed())
                raise
        finally:
            if life.cell is not None:
                life.cell.close()
            member.disk.end_process()
            life.ended.set()

    async def _abandon_at_the_end(self, life: NodeLife) -> None:
        """Let go of all that wait when this process ends, however it ends: its timers end too."""
        try:
            await trio.sleep_forever()
        finally:
            if life.cell is not None:
                life.cell.abandon(Killed())

    async def _serve(self, member: CellMember, life: NodeLife, nursery: trio.Nursery) -> None:
        life.cell = cell = ReplicatedCell.open(member.settings.storage, life.journal, IDENTITY)
        nursery.start_soon(cell.run)
        life.opened.set()
        async with trio.open_nursery() as following:
            following.start_soon(cell.follow)
            await life.promoted.wait()
            following.cancel_scope.cancel()
        engine = await cell.take_over()
        nursery.start_soon(self._end_when_lost, member, life)
        listening = [
            ListeningDoor("frames", BinaryDoor, [self.network.listen(FRAMES)]),  # type: ignore[list-item]
            ListeningDoor("JSON lines", JsonDoor, [self.network.listen(LINES)]),  # type: ignore[list-item]
            ListeningDoor("HTTP", HttpDoor, [self.network.listen(HTTP)]),  # type: ignore[list-item]
        ]
        await serve(member.settings, engine, listening, life.stop, started=lambda broker: life.serving.set())
        await cell.release()

    async def _end_when_lost(self, member: CellMember, life: NodeLife) -> None:
        assert life.cell is not None
        await life.cell.lost.wait()
        self.disturb(f"{member.name} has lost its tenure: {life.cell.why}")
        if self.owner is member:
            self.network.end_all()
        life.cell.abandon(Killed())
        life.scope.cancel()

    # What the adversary asks for

    async def take_over(self, member: CellMember) -> bool:
        """Let a broker own the cell, as when it has the lease; returns whether it does."""
        assert member.life is not None
        if not member.is_alive or member is self.owner:  # it gets no lease, or has it
            return member.is_alive
        self.disturb(f"{member.name} takes over")
        self.network.end_all()  # the lease of the owner before is over: it answers nothing
        self.owner, life = member, member.life
        self.takeovers += 1
        life.promoted.set()
        await until(lambda: life.serving.is_set() or life.ended.is_set())
        return life.serving.is_set() and not life.ended.is_set()

    async def kill_member(self, member: CellMember, *, power: bool) -> None:
        """End a broker at once, and with the power lose what it had not synced."""
        life = member.life
        if life is None or life.ended.is_set():
            return
        self.disturb(f"{member.name} {'loses its power' if power else 'is killed'}")
        member.disk.off, life.store.is_cut_off = True, True
        if self.owner is member:
            self.network.end_all()
        if life.cell is not None:
            life.cell.abandon(Killed())
        life.scope.cancel()
        await life.ended.wait()
        if power:
            member.disk.lose_power()
        member.disk.end_process()

    async def stop(self) -> None:
        """Compare the copies, end all in good order, and prove their directories."""
        owner = self.owner
        assert owner is not None
        for member in self.members:
            if member is not owner:
                while not await self._compare(owner, member):  # noqa: ASYNC110
                    await trio.sleep(0.01)
        await self.stop_owner()
        for member in self.members:
            if member.is_alive:
                await member.cell.release()
                await self.end_follower(member)
            if findings := verify(member.settings.storage.data_dir).findings:
                raise BrokenPromise(f"{member.name}: {findings}")
        check_fences(self.stream)
        self._outside_ends.cancel()

    async def _asked(self, cell: ReplicatedCell) -> tuple[int, object]:
        """Return what a cell answers at one position of the journal: a cursor may be saved, or a dead letter stored."""
        while True:
            position = cell.applied
            await cell._engine.queue.drained()
            asked = await answers(cell._engine)
            if cell.applied == position:
                return position, asked

    async def _compare(self, owner: CellMember, member: CellMember) -> bool:
        """Compare what two brokers have; False if the journal has gone on meanwhile."""
        position, asked = await self._asked(owner.cell)
        await until(lambda: member.cell.applied >= position or not member.is_alive)
        if not member.is_alive:
            raise BrokenPromise(f"{member.name} has ended")
        await member.cell._engine.queue.drained()
        found = await answers(member.cell._engine)
        if member.cell.applied != position:
            return False
        if found != asked:
            raise BrokenPromise(f"{member.name} does not have what the owner has")
        return True

    async def stop_owner(self) -> None:
        """End the owner as SIGTERM does."""
        assert self.owner is not None
        assert self.owner.life is not None
        self.owner.life.stop.set()
        await self.owner.life.ended.wait()

    async def end_follower(self, member: CellMember) -> None:
        assert member.life is not None
        member.life.scope.cancel()
        await member.life.ended.wait()


async def until(condition: Callable[[], object]) -> None:
    """Return when something holds; no clock but the world's passes meanwhile."""
    while not condition():  # noqa: ASYNC110
        await trio.sleep(0.01)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
