"""Makes the state of subscriptions durable: soon enough for their windows, and not more often.

What is due at once is given to the metadata in the step of the event loop that makes it due, the rest by a timer. While
one transaction is under way, what becomes due gathers for the next one, as publishes do. Every state that is out of
date has a deadline, and a save that fails sets it again, so no ack stays unsaved.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import trio

from qb.core.pacing import AT_ONCE, Turn
from qb.core.push.active_subscription import ActiveSubscription, PendingSave, SaveSchedule, SaveWaiter
from qb.core.push.saved_subscriptions import changed
from qb.core.subscriptions.messages.deadlines import NEVER, Deadlines
from qb.core.subscriptions.save_urgency import SaveUrgency
from qb.core.wire.errors import BrokerError, Internal, UnknownSubscription
from qb.storage.engine import Metadata

SAVE_INTERVAL = 0.1  # seconds by which a state on disk may lag behind; all that may lag are saved at the same moments
SPACING = 0.05  # seconds between two saves of a subscription if a window is full, but most of it is being handled
# While acks come as fast as this, times what a save takes, the whole window is saved and not each half of it: the rest
# is acked before the save would be over.
QUICK = 3
NEWEST = 0.125  # the weight of the last save in how long one takes
SHARE = 4  # taking snapshots of a subscription takes at most one part in so many of the time
RETRY = 1.0  # seconds until the next try when one has failed

log = logging.getLogger("qb.cursors")


class CursorSaver:
    """Keeps the states of subscriptions on disk."""

    def __init__(self, metadata: Metadata, serve: Callable[[ActiveSubscription], None]) -> None:
        """`serve` is called when there is room in a window again."""
        self._metadata = metadata
        self._serve = serve
        self._deadlines: Deadlines[SaveSchedule] = Deadlines()
        self._began = self._takes = 0.0  # when the last transaction began, and how long one takes, in seconds
        self._under_way = False  # is there a transaction? Then what is due waits for its end
        self._not_before = 0.0  # a save has failed: give the disk some time
        self._wake = trio.Event()
        self._wakes_at = NEVER  # when the timer looks again by itself

    # What is due when

    def note(self, active: ActiveSubscription) -> None:
        """See that it is saved in time, if it has changed. Raises nothing."""
        try:
            self._note(active)
        except Exception as error:
            self._retry_later(active, error)

    def _note(self, active: ActiveSubscription) -> None:
        if not active.subscription.dirty or active.gone:
            return
        now = trio.current_time()
        due = self._due(active, now)
        if due < active.saving.due:
            self._deadlines.set(active.saving, due)
            if due <= now:
                self._begin(now)
            else:
                self._set_timer()

    def _due(self, active: ActiveSubscription, now: float) -> float:
        save_urgency, saving = active.subscription.save_urgency, active.saving
        if save_urgency is SaveUrgency.NONE:
            due = (now // SAVE_INTERVAL + 1) * SAVE_INTERVAL
        elif save_urgency is SaveUrgency.SOME:
            due = max(now, saving.began + SPACING)
        elif save_urgency is SaveUrgency.MUCH:
            due = max(now, saving.began + min(SPACING, QUICK * self._takes))
        else:
            due = now
        return max(due, saving.began + SHARE * saving.took, self._not_before)

    async def run(self) -> None:
        """Save what is due until cancelled."""
        while True:
            self._wakes_at = NEVER if self._under_way else self._deadlines.first()
            with trio.move_on_at(self._wakes_at):
                await self._wake.wait()
            self._wake = trio.Event()
            self._begin(trio.current_time())

    def _set_timer(self) -> None:
        """Wake the timer if it would come too late; the end of a transaction looks by itself."""
        if not self._under_way and self._deadlines.first() < self._wakes_at:
            self._wake.set()

    # Saving

    def _begin(self, now: float) -> None:
        """Save what is due, unless a transaction is under way: as much as a turn has time for, the rest after it."""
        if self._under_way:
            return
        saves = self._take_due(now)
        if saves:
            self._under_way, self._began = True, now
            try:
                self._metadata.put_then(_values(saves), partial(self._ended, saves))
            except Exception as error:
                for save in saves:
                    save.active.saving.fault.note(error)
                self._ended(saves, Internal("the state of subscriptions could not be stored"))

    def _take_due(self, now: float) -> list[PendingSave]:
        """Return what is due, the longest due first, and of one subscription at least if any is due.

        It is no more than a turn has time for, and no more cursors than one record of the metadata should have.
        """
        saves, cursors, turn = [], 0, Turn()
        for saving in self._deadlines.pop_due(now):
            active = saving.active
            if active is not None and (save := self._snapshot_or_retry(active, now)):
                saves.append(save)
                cursors += len(save.changes.partitions)
                if cursors >= AT_ONCE or turn.is_over:
                    break
        return saves

    def _snapshot_or_retry(self, active: ActiveSubscription, now: float) -> PendingSave | None:
        """Return the state of a subscription to be saved; if that fails it is tried again, and the others are saved."""
        try:
            active.check_in_service()
            return self._take(active, now)
        except UnknownSubscription as gone:
            self._end(active.saving.waiters, gone)
        except Exception as error:
            self._retry_later(active, error)
        return None

    def _retry_later(self, active: ActiveSubscription, error: Exception) -> None:
        self._deadlines.set(active.saving, trio.current_time() + active.saving.fault.note(error))
        self._end(active.saving.waiters, error)
        self._set_timer()

    @staticmethod
    def _end(waiters: list[SaveWaiter], error: Exception | None) -> None:
        for waiter in waiters:
            waiter.end(error)
        waiters.clear()

    def _ended(self, saves: Sequence[PendingSave], error: BrokerError | None) -> None:
        try:
            if error is not None:  # the metadata has logged it
                self._retry_saves(saves)
            self._takes += NEWEST * (trio.current_time() - self._began - self._takes)
            for save in saves:
                self._end(save.waiters, error)
                if error is None:
                    self._saved_or_retry(save)
        finally:
            self._under_way = False
            self._begin(trio.current_time())
            self._set_timer()

    def _saved_or_retry(self, save: PendingSave) -> None:
        """Let the subscription go on; if that fails it is saved once more, so that no slot of a window stays taken."""
        try:
            self._saved(save)
        except Exception as fault:
            save.active.subscription.not_saved(save.changes)
            self._retry_later(save.active, fault)

    def _saved(self, save: PendingSave) -> None:
        save.active.saving.fault.end()
        if save.active.subscription.saved(save.changes.number):
            self._serve(save.active)

    async def save(self, active: ActiveSubscription) -> None:
        """Return when the state as it is now is durable. Raises BrokerError, and then tries again by itself.

        Raises UnknownSubscription if it has been removed: nothing of it may come back.
        """
        active.check_in_service()
        waiter = SaveWaiter()
        active.saving.waiters.append(waiter)
        now = trio.current_time()
        self._deadlines.set(active.saving, now)
        self._begin(now)
        await waiter.wait()

    async def finish(self, subscriptions: Iterable[ActiveSubscription]) -> None:
        """Make durable what is out of date, as many transactions as that takes. Raises BrokerError if one failed."""
        now, waiters = trio.current_time(), list[SaveWaiter]()
        for active in subscriptions:
            if active.subscription.dirty or active.saving.due < NEVER:
                waiters.append(SaveWaiter())
                active.saving.waiters.append(waiters[-1])
                self._deadlines.set(active.saving, now)
        self._begin(now)
        failed: BrokerError | None = None
        for waiter in waiters:
            try:
                await waiter.wait()
            except BrokerError as error:
                failed = error
            except Exception:
                log.debug("one of the states was not saved; its subscription has said why", exc_info=True)
        if failed is not None:
            raise failed

    def _take(self, active: ActiveSubscription, now: float) -> PendingSave:
        saving = active.saving
        saving.due, saving.began = NEVER, now
        save = active.to_save()
        saving.took = trio.current_time() - now
        return save

    def _retry_saves(self, saves: Sequence[PendingSave]) -> None:
        self._not_before = trio.current_time() + RETRY
        for active, changes, _ in saves:
            active.subscription.not_saved(changes)
            if not active.gone and active.saving.due > self._not_before:
                self._deadlines.set(active.saving, self._not_before)
        self._set_timer()


def _values(saves: Sequence[PendingSave]) -> dict[str, Any]:
    """Return what the metadata is to keep of all of them, by key."""
    return {key: value for save in saves for key, value in changed(save.active.name, save.changes).items()}
