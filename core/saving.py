"""core.saving: makes the state of subscriptions durable: soon enough for their windows, and not more often.

May import: core.errors, core.live, core.subscriptions.alarms, core.subscriptions.saving, storage.engine, trio,
    the standard library.
Never: sockets, files.

One task saves all: while a transaction is under way, what has become due gathers for the next one. Whatever is out of
date has an alarm, and a save that fails sets it again, so no ack waits for ever to be made durable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import trio

from core.errors import BrokerError
from core.live import Live, Save, Saving
from core.subscriptions.alarms import NEVER, Alarms
from core.subscriptions.saving import Haste
from storage.engine import Metadata

LAZILY = 0.1  # seconds by which a state on disk may lag behind; all that may lag are saved at the same moments
SPACING = 0.05  # seconds between two saves of a subscription if a window is full, but most of it is being handled
SHARE = 4  # taking snapshots of a subscription takes at most one part in so many of the time
RETRY = 1.0  # seconds until the next try when one has failed


class Saver:
    """Keeps the states of subscriptions on disk."""

    def __init__(self, metadata: Metadata, serve: Callable[[Live], None]) -> None:
        """`serve` is called when there is room in a window again."""
        self._metadata = metadata
        self._serve = serve
        self._alarms: Alarms[Saving] = Alarms()
        self._not_before = 0.0  # a save has failed: give the disk some time
        self._wake = trio.Event()

    def note(self, live: Live) -> None:
        """See that it is saved in time, if it has changed."""
        if not live.subscription.dirty or live.gone:
            return
        due = self._due(live)
        if due < live.saving.due:
            self._set_alarm(live, due)

    def _due(self, live: Live) -> float:
        now, haste, saving = trio.current_time(), live.subscription.haste, live.saving
        if haste is Haste.NONE:
            due = (now // LAZILY + 1) * LAZILY
        elif haste is Haste.SOME:
            due = max(now, saving.began + SPACING)
        else:
            due = now
        return max(due, saving.began + SHARE * saving.took, self._not_before)

    def _set_alarm(self, live: Live, due: float) -> None:
        if due < self._alarms.first():
            self._wake.set()
        self._alarms.set(live.saving, due)

    async def save(self, live: Live) -> None:
        """Return when the state as it is now is durable. Raises BrokerError, and then tries again by itself."""
        save = self._take(live)
        try:
            await self._metadata.put(live.key, save.value)
        except BaseException:
            self._try_again([save])
            raise
        live.subscription.saved(save.number)

    async def run(self) -> None:
        """Save what is due until cancelled."""
        while True:
            with trio.move_on_at(self._alarms.first()):
                await self._wake.wait()
            self._wake = trio.Event()
            due = [saving.live for saving in self._alarms.pop_due(trio.current_time())]
            if any(not live.gone for live in due):
                await self._save_all(due)

    async def finish(self, lives: Iterable[Live]) -> None:
        """Make durable what is out of date. Raises BrokerError."""
        for live in lives:
            if live.subscription.dirty or live.saving.due < NEVER:
                self._metadata.put_soon(live.key, self._take(live).value)
        await self._metadata.flush()

    async def _save_all(self, lives: Iterable[Live]) -> None:
        saves = [self._take(live) for live in lives if not live.gone]
        for save in saves:
            self._metadata.put_soon(save.live.key, save.value)
        try:
            await self._metadata.flush()
        except BrokerError:  # the metadata has logged it
            self._try_again(saves)
            return
        for save in saves:
            if save.live.subscription.saved(save.number):
                self._serve(save.live)

    def _take(self, live: Live) -> Save:
        saving = live.saving
        saving.due, saving.began = NEVER, trio.current_time()
        save = live.to_save()
        saving.took = trio.current_time() - saving.began
        return save

    def _try_again(self, saves: Iterable[Save]) -> None:
        self._not_before = trio.current_time() + RETRY
        for live in (save.live for save in saves):
            if not live.gone and live.saving.due > self._not_before:
                self._set_alarm(live, self._not_before)
