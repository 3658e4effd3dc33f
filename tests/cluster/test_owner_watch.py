"""An owner whose port has refused is gone, though a process was started in its place before NATS answered."""

from __future__ import annotations

from functools import partial

import pytest
import trio

from qb.cluster import owner_watch
from qb.replication.lease.lease_keeper import LeaseKeeper
from qb.replication.lease.lease_state import LeaseRecord
from qb.replication.nats.nats_conversation import NatsDisconnected

TTL = 15.0
RESTARTED_AFTER = 1.0  # seconds, as by a supervisor
OWNER = LeaseRecord("killed", "here:1", "here:2", 4, 9)


class SlowLease:
    """The lease of an owner; NATS answers from a moment on."""

    def __init__(self) -> None:
        self.record, self.revision, self.answers_from = OWNER, 7, 0.0

    async def _answer(self) -> None:
        if trio.current_time() < self.answers_from:
            await trio.sleep(2)
            raise NatsDisconnected("slow")

    async def read(self) -> tuple[int, LeaseRecord]:
        await self._answer()
        return self.revision, self.record

    async def write(self, revision: int, record: LeaseRecord) -> int:
        await self._answer()
        assert revision == self.revision
        self.record, self.revision = record, revision + 1
        return self.revision


class Port:
    """The owner's cluster port: it refuses for a while when the process was killed."""

    def __init__(self) -> None:
        self.refuses_from = self.refuses_until = float("inf")
        self.streams: list[trio.testing.MemoryReceiveStream] = []

    async def connect(self, address: str) -> trio.StapledStream:
        assert address == OWNER.cluster_address
        await trio.lowlevel.checkpoint()
        if self.refuses_from <= trio.current_time() < self.refuses_until:
            raise ConnectionRefusedError
        ours, theirs = trio.testing.memory_stream_pair()
        self.streams.append(theirs)
        return ours

    async def kill(self) -> None:
        self.refuses_from = trio.current_time()
        self.refuses_until = self.refuses_from + RESTARTED_AFTER
        for stream in self.streams:
            await stream.aclose()


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Port:
    port = Port()
    monkeypatch.setattr(owner_watch, "connect", port.connect)
    return port


@pytest.mark.parametrize("is_fast", [True, False])
async def test_the_lease_of_a_killed_owner_is_taken_when_nats_answers_again(
    is_fast: bool, port: Port, autojump_clock, nursery: trio.Nursery
) -> None:
    lease, gone = SlowLease(), []
    keeper = LeaseKeeper(lease, "b", ttl=TTL, clock=trio.current_time)  # type: ignore[arg-type]
    refuses = partial(owner_watch.owner_refuses, keeper)
    nursery.start_soon(owner_watch.watch_owner, keeper, gone.append)
    claimed = trio.Event()

    async def claim() -> None:
        await keeper.claim(refuses if is_fast else None)
        claimed.set()

    nursery.start_soon(claim)
    await trio.sleep(3)
    assert port.streams, "the owner is watched"
    lease.answers_from = trio.current_time() + 5 * RESTARTED_AFTER
    await port.kill()
    killed = trio.current_time()
    await claimed.wait()
    assert OWNER.cluster_address in gone
    took = trio.current_time() - killed
    assert took < 5 * RESTARTED_AFTER + 3 if is_fast else took > TTL - 3


async def test_a_process_that_was_started_in_its_place_is_not_taken_for_gone(port: Port, autojump_clock) -> None:
    lease = SlowLease()
    keeper = LeaseKeeper(lease, "b", ttl=TTL, clock=trio.current_time)  # type: ignore[arg-type]
    await port.kill()
    keeper.watcher.saw(0.0, 0.0, 7, OWNER)
    assert await owner_watch.owner_refuses(keeper)
    await trio.sleep(RESTARTED_AFTER)
    assert await owner_watch.owner_refuses(keeper), "the process of that token is gone"
    keeper.watcher.saw(1.0, 1.0, 8, LeaseRecord("anew", "here:1", "here:2", 5, 1))
    assert not await owner_watch.owner_refuses(keeper)
