"""The life of one broker of a cell: follower, candidate, owner, and how it ends."""

from __future__ import annotations

import logging
import socket
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from functools import partial
from ipaddress import ip_address
from typing import Protocol

import trio

from qb.cluster.cell_ownership import CellOwnership
from qb.cluster.cell_view import CellView
from qb.cluster.cluster_port import ClusterPort
from qb.cluster.cluster_tls import cluster_tls
from qb.cluster.follower_doors import FollowerDoors
from qb.cluster.nats_access import nats_client, nats_monitors
from qb.cluster.owner_watch import owner_refuses, watch_owner
from qb.cluster.process_end import begin_anew, end, leave_token, left_token
from qb.cluster.relays.relayed_peers import RelayedPeers
from qb.cluster.roles import RoleEvent
from qb.core.broker.user_registry import watch_users
from qb.core.rights.log_ins import LogIns
from qb.core.settings import Settings
from qb.core.wire.addresses import BrokerAddress
from qb.doors.listening import ListeningDoor, listen
from qb.doors.tls_transport import ServerTls
from qb.replication.engine.follower import CopyDiffers
from qb.replication.engine.replicated_cell import ReplicatedCell
from qb.replication.jetstream.jetstream_store import JetStreamStore
from qb.replication.journal.journal import Journal
from qb.replication.journal.journal_store import Fenced, JournalError, JournalGap, RecordsLost
from qb.replication.journal.trio_timers import TrioTimers
from qb.replication.lease.lease_keeper import LeaseKeeper
from qb.replication.lease.lease_store import LeaseStore
from qb.replication.nats.nats_protocol import NatsError
from qb.storage.engine import Engine
from qb.storage.faults import keep_running
from qb.storage.files import CannotOpen

log = logging.getLogger("qb.cluster")

RELEASE_WITHIN = 2.0  # seconds in which a broker that leaves says so to NATS
NATS_ERRORS = (NatsError, trio.TooSlowError)


class Serve(Protocol):
    """The broker and its doors: qb.server.serve."""

    def __call__(
        self, engine: Engine, stop: trio.Event, ownership: CellOwnership, relays: RelayedPeers
    ) -> Awaitable[None]:
        """Serve until `stop` is set and everything received is finished."""


class CellNode:
    """One broker. Belongs to the event loop's thread."""

    def __init__(
        self,
        settings: Settings,
        listening: Sequence[ListeningDoor],
        cluster_listeners: Sequence[socket.socket],
        stop: trio.Event,
        serve: Serve,
        log_ins: LogIns,
        tls: ServerTls | None = None,
    ) -> None:
        """`listening` are the doors, which are open at once; `log_ins` are the broker's too, when it serves.

        Raises OSError with words for the operator.
        """
        cluster = settings.cluster
        address = cluster.advertise or str(_reachable(listening[0].listeners[0], ""))
        cluster_address = str(_reachable(cluster_listeners[0], cluster.advertise))
        name = cluster.node_name or address
        self._settings, self._listening, self._stop, self._serve = settings, listening, stop, serve
        self._client, self._timers = nats_client(cluster, f"qb {name}"), TrioTimers()
        self._store = JetStreamStore(self._client, self._timers, cluster.cell)
        self._leases = LeaseStore(self._client, cluster.cell)
        self._keeper = LeaseKeeper(
            self._leases, name, address, cluster_address, ttl=cluster.lease_ttl, predecessor=left_token()
        )
        self._port = ClusterPort(cluster_listeners, cluster_tls(cluster))
        self.view = CellView(
            self._client,
            cluster.cell,
            self._store.stream,
            name,
            address,
            cluster_address,
            cluster.lease_ttl / 3,
            nats_monitors(cluster),
            cluster.scrub_rate,
        )
        self._users = log_ins.users
        self._doors = FollowerDoors(settings, listening, self.view, log_ins, tls)

    # The tree of tasks

    async def run(self) -> None:
        """Live until `stop` is set. Raises OSError and CannotOpen, with words for the operator."""
        try:
            await self._run()
        except* (JournalError, NatsError) as failed:
            raise CannotOpen(str(_first(failed))) from None

    async def _run(self) -> None:
        async with trio.open_nursery() as connections:  # outlive all that speaks to NATS
            connections.start_soon(self._client.run)
            connections.start_soon(self._timers.run)
            connections.start_soon(self._port.run)
            connections.start_soon(self.view.run)
            connections.start_soon(keep_running, "the look at the NATS nodes", self.view.journal.run)
            async with trio.open_nursery() as passed_on:  # peers of the follower; some outlive that role
                passed_on.start_soon(self._doors.close_outdated)
                async with trio.open_nursery() as opening:
                    opening.start_soon(self._doors.run, passed_on)
                    cell = await self._opened()
                    opening.cancel_scope.cancel()
                if cell is not None:
                    await self._live(cell, passed_on)
                elif self.view.lost:
                    await self._say_lost(passed_on)
                passed_on.cancel_scope.cancel()
            connections.cancel_scope.cancel()

    async def _opened(self) -> ReplicatedCell | None:
        """Open the journal and the local copy; None if the broker is stopped meanwhile."""
        cell: ReplicatedCell | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._cancel_when_stopped, nursery.cancel_scope)
            replicas = self._settings.cluster.nats_replicas
            while True:
                try:
                    await self._store.open(replicas=replicas)
                    await self._leases.open(replicas=replicas)
                    break
                except trio.TooSlowError:
                    log.warning("NATS is not ready: %s", ", ".join(self._settings.cluster.nats_servers))
            journal = Journal(self._store, self._timers, self.view.name)
            self.view.journal.identity = self._store.identity
            copy = self._settings.storage, journal, self._store.identity
            try:
                cell = await trio.to_thread.run_sync(ReplicatedCell.open, *copy)
            except RecordsLost as error:
                self._lose(error)
            nursery.cancel_scope.cancel()
        if cell is not None:
            watch_users(cell.metadata, self._users)
        self.view.copy = self.view.scrub.cell = cell
        return cell

    async def _cancel_when_stopped(self, scope: trio.CancelScope) -> None:
        await self._stop.wait()
        scope.cancel()

    async def _live(self, cell: ReplicatedCell, passed_on: trio.Nursery) -> None:
        try:
            async with trio.open_nursery() as copying:
                copying.start_soon(cell.run)
                copying.start_soon(self.view.scrub.run)
                copying.start_soon(self._mind, cell)
                async with trio.open_nursery() as doors:
                    doors.start_soon(self._doors.run, passed_on)
                    engine = await self._become_owner(cell)
                    doors.cancel_scope.cancel()
                if engine is not None:
                    await self._own(cell, engine)
                else:
                    await cell.release()
                copying.cancel_scope.cancel()
        finally:
            cell.close()

    async def _mind(self, cell: ReplicatedCell) -> None:
        """Behave as killed when the copy can be of no use any more."""
        await cell.lost.wait()
        if isinstance(cell.why, RecordsLost):
            with suppress(OSError):
                cell.note_lost(str(cell.why))  # so that no start of this broker goes on as if nothing had happened
        if isinstance(cell.why, JournalGap):
            end(str(cell.why))
        begin_anew(str(cell.why) or type(cell.why).__name__)

    # Follower and candidate

    async def _become_owner(self, cell: ReplicatedCell) -> Engine | None:
        """Follow until the lease is ours, and take the journal over; None if the broker is stopped."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._cancel_when_stopped, nursery.cancel_scope)
            nursery.start_soon(self._follow, cell, nursery.cancel_scope)
            nursery.start_soon(watch_owner, self._keeper, self.view.gone)
            nursery.start_soon(self._look_when_owner_changes)
            fast = self._settings.cluster.fast_takeover
            leave_token(
                self._keeper.token
            )  # should the claim succeed: a process that follows this one knows it is gone
            await self._keeper.claim(partial(owner_refuses, self._keeper) if fast else None)
            nursery.cancel_scope.cancel()
        if self.view.lost:
            await self._stop.wait()  # its doors say so until then
        if self._stop.is_set():
            self.view.advance(RoleEvent.STOPPED)
            return None
        self.view.advance(RoleEvent.CLAIMED)
        log.info("%s has the lease of cell %s: taking over", self.view.name, self.view.cell)
        try:
            with trio.fail_after(2 * self._settings.cluster.lease_ttl):
                return await cell.take_over()
        except (Fenced, trio.TooSlowError) as error:
            await self._release("")
            begin_anew(str(error) or "the journal could not be taken over in time")
        except RecordsLost as error:
            await self._release("")
            with suppress(OSError):
                cell.note_lost(str(error))
            self._lose(error)
            await self._stop.wait()
            self.view.advance(RoleEvent.STOPPED)
            return None
        except JournalError:
            await self._release("")
            raise

    async def _follow(self, cell: ReplicatedCell, scope: trio.CancelScope) -> None:
        try:
            await cell.follow()
        except CopyDiffers as error:
            begin_anew(str(error))  # it is cut back to what is known to be right
        except RecordsLost as error:
            with trio.move_on_after(RELEASE_WITHIN), suppress(OSError):
                await cell.preserve()  # the journal may have to be restored from it
                cell.note_lost(str(error))
            self._lose(error)
            scope.cancel()

    def _lose(self, error: RecordsLost) -> None:
        log.critical("JOURNAL_LOST: %s", error)
        self.view.lose(str(error))

    async def _say_lost(self, passed_on: trio.Nursery) -> None:
        """Answer every peer that the journal has lost records, until the broker is stopped."""
        async with trio.open_nursery() as doors:
            doors.start_soon(self._doors.run, passed_on)
            await self._stop.wait()
            doors.cancel_scope.cancel()
        self.view.advance(RoleEvent.STOPPED)

    async def _look_when_owner_changes(self) -> None:
        while True:
            await self.view.changed.wait()
            self._keeper.look_soon()

    # Owner

    async def _own(self, cell: ReplicatedCell, engine: Engine) -> None:
        """Renew the lease and serve, until the broker is stopped or gives the cell away."""
        ownership = CellOwnership(
            self.view, self._keeper, cell.epoch, self._settings.cluster.lease_ttl, self._stop, begin_anew
        )
        relays = RelayedPeers(self._port, self.view.cell, ownership.epoch)
        async with trio.open_nursery() as holding:
            holding.start_soon(self._hold, ownership.epoch)
            await self._keeper.confirmed()
            self.view.advance(RoleEvent.CONFIRMED)
            log.info("%s owns cell %s in epoch %d", self.view.name, self.view.cell, ownership.epoch)
            holding.start_soon(ownership.watch)
            await self._serve(engine, self._stop, ownership, relays)
            holding.cancel_scope.cancel()
        await self._release(ownership.successor_name)
        self.view.advance(RoleEvent.STOPPED)
        await cell.release()
        if ownership.is_moving:
            await trio.sleep(0.05)  # for the announcement to leave
            begin_anew("the cell was given to another broker")

    async def _hold(self, epoch: int) -> None:
        await self._keeper.hold(epoch)
        begin_anew("another broker has the lease")

    async def _release(self, successor: str) -> None:
        """Let the next owner take over at once; if NATS does not hear it, the lease runs out."""
        with suppress(*NATS_ERRORS), trio.fail_after(RELEASE_WITHIN):
            await self._keeper.release(successor)


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def cluster_listeners(settings: Settings) -> list[socket.socket]:
    """Listen for the other brokers. Raises OSError with words for the operator."""
    try:
        return listen(settings.cluster.host, settings.cluster.port)
    except OSError as error:
        raise OSError(f"{error}; QB_CLUSTER_PORT chooses another port for the other brokers") from None


def _reachable(listener: socket.socket, advertised: str) -> BrokerAddress:
    """Return where a listener is reached: the host of an advertised address, if it listens on all of them."""
    host, port = listener.getsockname()[:2]
    if ip_address(host.partition("%")[0]).is_unspecified:
        host = advertised.rpartition(":")[0].strip("[]") or socket.gethostname()
    return BrokerAddress(host, port)
