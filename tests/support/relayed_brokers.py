"""An owner and a follower in one process, with real sockets between them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import trio

from qb.cluster.cell_view import CellView
from qb.cluster.cluster_port import ClusterPort
from qb.cluster.cluster_tls import cluster_tls
from qb.cluster.follower_doors import FollowerDoors
from qb.cluster.members import Announcement
from qb.cluster.relays.relayed_peers import RelayedPeers
from qb.cluster.roles import Role
from qb.core.broker.cell_report import CellReport, JournalNode, JournalState
from qb.core.broker.message_broker import log_ins_of
from qb.core.settings import ClusterSettings, SecuritySettings, ServerSettings, Settings, StorageSettings
from qb.doors.listening import listen
from qb.replication.nats.nats_protocol import NatsError
from qb.server import serve
from qb.storage.local_engine import LocalEngine
from tests.support.brokers import Doors

EPOCH = 4


class NoNats:
    """A NATS client that reaches nothing: the test speaks for the others."""

    def subscribe(self, subject: str, received: Callable[..., None]) -> int:
        return 1

    def publish(self, subject: str, payload: bytes) -> None:
        pass

    async def request(self, *args: object, **options: object) -> None:
        raise NatsError("there is no NATS")


class Held:
    """A ownership that lasts until the test ends it."""

    cell, broker, lease_ttl, successor = "main", "owner", 15.0, ""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.checks = 0

    def check(self) -> None:
        self.checks += 1

    def report(self) -> CellReport:
        state = JournalState(stream="QB_main", nodes=[JournalNode(name="nats-1", role="leader")])
        return CellReport(
            cell="main", broker="owner", role="owner", owner="owner", epoch=self.epoch, brokers=[], journal=state,
            verdict="all is well", spare_nodes=0,
        )  # fmt: skip

    async def describe(self) -> dict[str, Any]:
        return {"engine": "jetstream", "owner": "owner"}

    async def move(self, to: str | None) -> None:
        raise AssertionError("no test moves it")

    def verify(self, *, start: bool, nodes: bool) -> dict[str, Any]:
        raise AssertionError("no test verifies it")


class Pair:
    """An owner and a follower in this process."""

    def __init__(self, follower: Doors, owner: Doors, view: CellView, cluster_address: str) -> None:
        self.follower, self.owner, self.view, self.cluster_address = follower, owner, view, cluster_address
        self.life_of_follower = trio.CancelScope()

    def announce(self, role: Role = Role.OWNER, epoch: int = EPOCH) -> None:
        """Have the follower hear from the owner."""
        address = "{}:{}".format(*self.owner.listening[0].listeners[0].getsockname())
        self.view._take(Announcement("owner", address, self.cluster_address, role, epoch, 0, "1", 1))


@asynccontextmanager
async def opened_pair(
    directory: Path, epoch: int = EPOCH, users_file: str = "", cluster: ClusterSettings | None = None
) -> AsyncIterator[Pair]:
    settings = Settings(
        cluster=cluster or ClusterSettings(),
        server=ServerSettings(port=0),
        storage=StorageSettings(data_dir=str(directory / "data")),
        security=SecuritySettings(users_file=users_file),
    )
    engine = await trio.to_thread.run_sync(LocalEngine.open, settings.storage)
    owner, follower, ownership = Doors(), Doors(), Held(epoch)
    listeners = listen("127.0.0.1", 0)
    port = ClusterPort(listeners, cluster_tls(settings.cluster))
    view = CellView(NoNats(), "main", "QB_main", "follower", "127.0.0.1:1", "127.0.0.1:2", 15.0)  # type: ignore[arg-type]
    doors = FollowerDoors(settings, follower.listening, view, log_ins_of(settings.security), None)
    relays = RelayedPeers(port, "main", epoch)
    try:
        async with trio.open_nursery() as nursery:
            begin = partial(serve, settings, engine, owner.listening, owner.stop, ownership=ownership, relays=relays)
            nursery.start_soon(begin)
            nursery.start_soon(port.run)
            pair = Pair(follower, owner, view, "{}:{}".format(*listeners[0].getsockname()))

            async def follow() -> None:
                with pair.life_of_follower:
                    async with trio.open_nursery() as peers:
                        peers.start_soon(doors.run, peers)
                        peers.start_soon(doors.close_outdated)

            nursery.start_soon(follow)
            yield pair
            owner.stop.set()
            nursery.cancel_scope.cancel()
    finally:
        await owner.close()
        await follower.close()
        for listener in listeners:
            listener.close()
        engine.close()
