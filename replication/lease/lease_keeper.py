"""Renews the lease of an owner, and watches that of another one."""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable

import msgspec
import trio

from qb.replication.lease.lease_state import LOOK, LeaseRecord, LeaseWatcher, OwnerLease
from qb.replication.lease.lease_store import LeaseStore
from qb.replication.nats.nats_protocol import NatsError
from qb.storage.signals import Signal

TTL = 15.0  # seconds


def boot_time() -> float:
    """Return the seconds since this machine was started, those in which it slept among them."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class LeaseKeeper:
    """One broker's hand on the lease of a cell. Belongs to the event loop's thread."""

    def __init__(
        self,
        store: LeaseStore,
        owner: str,
        address: str = "",
        cluster_address: str = "",
        *,
        ttl: float = TTL,
        clock: Callable[[], float] = boot_time,
        predecessor: str = "",
    ) -> None:
        """`owner` is the name of this broker, `address` where clients reach it, `cluster_address` where brokers do.

        `predecessor` is the token of a process that has ended for certain: its lease need not run out.
        """
        self._store, self._ttl, self._clock = store, ttl, clock
        self._name, self._predecessor = owner, predecessor
        self.token = f"{owner}-{secrets.token_hex(8)}"  # a restarted broker is another owner
        self._record = LeaseRecord(self.token, address, cluster_address)
        self._revision = 0
        self._holder = OwnerLease(ttl)
        self.watcher = LeaseWatcher(ttl)
        self.refused = ""  # the token of the last owner whose cluster port was found to refuse TCP
        self._changing = trio.Lock()
        self._hurried, self._renewed = Signal(), Signal()
        self._looks_soon = False  # was a look asked for while another one was on its way?

    def may_answer(self) -> bool:
        """May this broker answer a request now? Does not block."""
        return self._holder.may_answer(self._clock())

    @property
    def is_lost(self) -> bool:
        """Has another broker the lease? Then this one must behave as if it had been killed."""
        return self._holder.is_lost

    def lose(self) -> None:
        """A foreign fence was found in the journal: answer nothing more."""
        self._holder.lost()

    async def claim(self, owner_refuses: Callable[[], Awaitable[bool]] | None = None) -> None:
        """Return when the lease is ours: it was free, or had not been renewed for its time to live.

        The claim is a compare-and-set, so a read that was outdated makes it fail. `owner_refuses` says whether the
        cluster port of the owner refuses TCP: give it only where that proves the owner's end.
        """
        while True:
            await self._look()
            record = self.watcher.record
            refuses = record is not None and record.owner in (self._predecessor, self.token)  # not held
            if not refuses and owner_refuses is not None:
                refuses = await owner_refuses()
            if self.watcher.may_take_over(refuses, self._name) and await self._write(self.watcher.revision):
                return
            with trio.move_on_after(0 if self._looks_soon else self._ttl * LOOK):
                await self._hurried.wait()
            self._looks_soon = False

    def look_soon(self) -> None:
        """Look at once: something has happened to the owner. Does not block."""
        self._looks_soon = True
        self._hurried.set()

    async def _look(self) -> None:
        sent_at = self._clock()
        try:
            revision, record = await self._store.read()
        except (NatsError, trio.TooSlowError):
            self.watcher.failed()
        else:
            self.watcher.saw(sent_at, self._clock(), revision, record)

    async def _write(self, revision: int) -> bool:
        """Write our record over this revision; returns whether that is known to have been done."""
        self._record = msgspec.structs.replace(self._record, number=self._record.number + 1)
        try:
            self._revision = await self._store.write(revision, self._record)
        except (NatsError, trio.TooSlowError):
            return False
        return True

    async def hold(self, epoch: int) -> None:
        """Renew the lease that was claimed until it is lost. Call it when the fence of this epoch has been committed.

        Returns when another broker has the lease. A cancellation does not release it: release() does.
        """
        self._holder = OwnerLease(self._ttl)
        self._holder.began(self._clock())
        self._record = msgspec.structs.replace(self._record, epoch=epoch)
        while not self._holder.is_lost:
            sent_at = self._clock()
            async with self._changing:
                has_succeeded = await self._renew(sent_at)
            await trio.sleep(max(0.0, self._holder.next_renewal(sent_at, has_succeeded) - self._clock()))

    async def _renew(self, sent_at: float) -> bool:
        if self._holder.is_lost:
            return False
        if await self._write(self._revision):
            self._holder.renewed(sent_at)
            self._renewed.set()
            return True
        await self._look_after_failure()
        return False

    async def _look_after_failure(self) -> None:
        """Who has the lease? A renewal of our own whose answer was lost has moved the revision."""
        try:
            revision, found = await self._store.read()
        except (NatsError, trio.TooSlowError):
            return
        if found is not None and found.owner != self._record.owner:
            self._holder.lost()
        else:
            self._revision = max(self._revision, revision)

    async def confirmed(self) -> None:
        """Return when this broker may answer: hold() has sent a renewal behind the fence, and it has succeeded."""
        while not self.may_answer():
            await self._renewed.wait()

    async def release(self, successor: str = "") -> None:
        """Answer nothing more, and let the next owner take over at once. Raises NatsError, trio.TooSlowError.

        `successor` is the name of a broker that comes before others for a second.
        """
        self._holder.lost()
        async with self._changing:  # a renewal on its way comes first
            revision, found = await self._store.read()
            if found is not None and found.owner == self._record.owner:
                released = msgspec.structs.replace(self._record, released=True, successor=successor)
                await self._store.write(revision, released)
