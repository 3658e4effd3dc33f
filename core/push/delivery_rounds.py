"""Carries out what subscriptions decide: reads the messages, pushes them, has the cursors saved.

A subscription is served in rounds: read what could go out, decide, carry it out; never two rounds at once. A round that
memory has everything for takes place in the very step of the event loop that caused it (a settle, a commit of the log).
One that has to wait, for the disk or for a state to be durable, gets a task. An idle subscription costs its state only.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial

import trio

from qb.core.push.active_subscription import ActiveSubscription, PushRound
from qb.core.push.cursor_saver import CursorSaver
from qb.core.push.delivery_sinks import DeliverySink, PushedRun
from qb.core.push.stored_slices import Frames, collect, collect_recent, keys_of
from qb.core.subscriptions.deadlines import NEVER, Deadlines
from qb.core.subscriptions.push_decisions import DeadLetterDecision, Decision, PushDecision
from qb.core.subscriptions.subscription_options import SubscriptionMode
from qb.core.wire.clock import now_ms
from qb.core.wire.errors import BrokerError, OffsetOutOfRange
from qb.storage.engine import Metadata, PartitionLog, StoredChunk
from qb.storage.faults import keep_running
from qb.storage.measures import SECONDS, Histogram

log = logging.getLogger("qb.deliveries")

ROUNDS_NOW = 4  # in one step of the event loop; then others have their turn


# Publishes a dead letter, given the stored frame that it is about; returns when it is durable.
Bury = Callable[[ActiveSubscription, DeadLetterDecision, bytes], Awaitable[None]]


class DeliveryRounds:
    """All subscriptions in service."""

    def __init__(self, metadata: Metadata, bury: Bury) -> None:
        self._bury = bury
        self._saver = CursorSaver(metadata, self.serve)
        self._lives: dict[str, ActiveSubscription] = {}
        self._ready: dict[ActiveSubscription, None] = {}  # in the order in which something happened to them
        self._alarms: Deadlines[ActiveSubscription] = Deadlines()
        self._wake = trio.Event()
        self.deliver_seconds = Histogram(SECONDS)  # from a message's timestamp to its first push; the first of a run

    def __iter__(self) -> Iterator[ActiveSubscription]:
        return iter(list(self._lives.values()))

    def get(self, name: str) -> ActiveSubscription | None:
        """Return a subscription in service."""
        return self._lives.get(name)

    # Coming and going

    def add(self, live: ActiveSubscription) -> None:
        """Put a subscription into service."""
        self._lives[live.name] = live
        self.touch(live)

    def remove(self, live: ActiveSubscription, reason: str) -> None:
        """Take a subscription out of service and tell whoever had joined it."""
        live.gone = True
        self._ready.pop(live, None)
        del self._lives[live.name]
        for outlet in list(live.outlets.values()):
            outlet.removed(live.name, reason)
        live.outlets.clear()
        self._watch_logs(live)

    def add_partitions(self, live: ActiveSubscription, logs: Mapping[int, PartitionLog]) -> None:
        """The topic has more partitions: serve them from their beginning."""
        new = {partition: each for partition, each in logs.items() if partition not in live.logs}
        live.logs = {**live.logs, **new}
        for partition, each in new.items():
            live.subscription.add_partition(partition, 0)
            if live.unwatch:
                live.unwatch.append(each.watch(lambda: self.serve(live)))
        self.touch(live)

    def join(self, live: ActiveSubscription, outlet: DeliverySink, window: int | None, announces: bool) -> None:
        """Let a subscriber take part. Raises SubscriptionBusy, BadRequest."""
        live.subscription.join(outlet.name, window, announces)
        live.outlets[outlet.name] = outlet
        self._watch_logs(live)
        self.touch(live)

    def leave(self, live: ActiveSubscription, outlet: DeliverySink, *, died: bool) -> None:
        """A subscriber goes, in good order or not; what it had goes to the others."""
        if live.outlets.pop(outlet.name, None) is None:
            return
        self._watch_logs(live)
        if died:
            live.subscription.died(outlet.name, trio.current_time())
        else:
            live.subscription.leave(outlet.name)
        self.touch(live)

    def _watch_logs(self, live: ActiveSubscription) -> None:
        """Watch the logs while somebody has joined: a publish costs nothing for subscriptions that nobody uses."""
        if live.outlets and not live.unwatch:
            live.unwatch = [each.watch(lambda: self.serve(live)) for each in live.logs.values()]
        elif not live.outlets:
            for unwatch in live.unwatch:
                unwatch()
            live.unwatch = []

    # Serving

    def touch(self, live: ActiveSubscription) -> None:
        """Something happened to this subscription: see soon what it decides, or at the next try if it stands still."""
        if live.serving:
            live.again = True
        elif not live.gone and not live.service.text:
            self._ready[live] = None
            self._wake.set()

    def serve(self, live: ActiveSubscription) -> None:
        """Something happened to this subscription: do now what it decides, or soon if that has to wait."""
        if live.serving or live.gone or live.service.text or live.unfinished:
            self.touch(live)
            return
        try:
            done = self._serve_now(live)
        except Exception as error:
            self._stand_still(live, error)
        else:
            if not done:
                self.touch(live)

    def _serve_now(self, live: ActiveSubscription) -> bool:
        """Return whether all was done that there is to do now."""
        for _ in range(ROUNDS_NOW):
            chunks = self._read_recent(live)
            if chunks is None:
                return False
            todo = self._decide(live, chunks)
            self._carry_out_now(live, todo)
            if live.unfinished:
                return False
            self._note_changes(live)
            if not self._goes_on(todo):
                return True
        return False

    async def run(self) -> None:
        """Serve all subscriptions until cancelled; then make their cursors durable."""
        try:
            async with trio.open_nursery() as rounds:
                rounds.start_soon(keep_running, "saving of subscriptions", self._saver.run)
                await keep_running("deliveries", partial(self._start_rounds, rounds))
        finally:
            with trio.CancelScope(shield=True):
                await self._saver.finish(self)

    async def _start_rounds(self, rounds: trio.Nursery) -> None:
        while True:
            ready, self._ready = self._ready, {}
            for live in ready:
                live.serving = True
                rounds.start_soon(self._serve, live)
            await self._wait()

    async def _wait(self) -> None:
        """Return when something has happened to a subscription, or is due."""
        with trio.move_on_at(self._alarms.first()):
            await self._wake.wait()
        self._wake = trio.Event()
        for live in self._alarms.pop_due(trio.current_time()):
            if live.serving:
                live.again = True
            elif not live.gone:
                self._ready[live] = None

    async def _serve(self, live: ActiveSubscription) -> None:
        """Do what the subscription decides until it decides nothing more."""
        live.again = True
        try:
            while live.again and not live.gone:
                live.again = False
                await self._round(live)
            live.service.end()
        except Exception as error:
            self._stand_still(live, error)
        finally:
            live.serving = False

    def _stand_still(self, live: ActiveSubscription, error: Exception) -> None:
        """Serve it no more until the next try: its log cannot be read, its state cannot be kept, or a fault of ours."""
        if live.gone and isinstance(error, BrokerError):
            return
        self._set_alarm(live, trio.current_time() + live.service.note(error))
        self._saver.note(live)

    async def _round(self, live: ActiveSubscription) -> None:
        todo, live.unfinished = live.unfinished, None
        if todo is None:
            todo = self._decide(live, await self._read(live))
        done = 0
        try:
            if todo.has_a_past:
                await self._saver.save(live)
            for decision in todo.decisions:
                await self._carry_out(live, decision, todo)
                done += 1
        finally:
            live.unfinished = todo.without(done)
        live.again = live.again or self._goes_on(todo)
        self._note_changes(live)

    async def save(self, live: ActiveSubscription) -> None:
        """Return when the state of a subscription as it is now is durable. Raises BrokerError, as Saver.save()."""
        await self._saver.save(live)

    @staticmethod
    def _goes_on(done: PushRound) -> bool:
        """Return whether to look again at once: what was read may all be held back, or not be all there is."""
        return bool(done.decisions or done.chunks)

    # Reading

    def _wanted(self, live: ActiveSubscription) -> Iterator[tuple[int, PartitionLog, int, int]]:
        """Yield where there are messages that could go out: partition, log, offset, and about how many bytes."""
        for outlet in live.outlets.values():
            live.subscription.block(outlet.name, outlet.full)
        for partition, each in live.logs.items() if live.outlets else ():
            wanted = live.subscription.wanted(partition)
            if wanted and wanted.start < each.first_offset:
                live.subscription.advance(partition, each.first_offset)
                wanted = live.subscription.wanted(partition)
            if wanted and wanted.start < each.end_offset:
                yield partition, each, wanted.start, live.bytes_for(len(wanted))

    def _read_recent(self, live: ActiveSubscription) -> dict[int, StoredChunk] | None:
        """Return what could go out, by partition, or None if memory does not have all of it."""
        chunks: dict[int, StoredChunk] = {}
        for partition, each, offset, size in self._wanted(live):
            chunk = each.read_recent(offset, size)
            if chunk is None:
                return None
            chunks[partition] = chunk
        return chunks

    async def _read(self, live: ActiveSubscription) -> dict[int, StoredChunk]:
        """Return what could go out, by partition."""
        chunks: dict[int, StoredChunk] = {}
        for partition, each, offset, size in self._wanted(live):
            chunks[partition] = each.read_recent(offset, size) or await each.read(offset, size)
        return chunks

    # Deciding

    def _decide(self, live: ActiveSubscription, chunks: Mapping[int, StoredChunk]) -> PushRound:
        """Tell the subscription what is there; returns what it decides."""
        subscription = live.subscription
        for partition, chunk in chunks.items():
            live.note_size(chunk)
            wanted = subscription.wanted(partition)
            if wanted.start != chunk.first_offset:
                continue  # a seek came in between
            usable = min(len(chunk.positions), len(wanted))
            if subscription.options.mode is SubscriptionMode.KEY_SHARED:
                subscription.offer_keys(partition, chunk.first_offset, keys_of(chunk)[:usable])
            else:
                subscription.offer(partition, chunk.first_offset, usable)
        subscribers = {name: (outlet, outlet.settled) for name, outlet in live.outlets.items()}
        return PushRound(subscription.decide(trio.current_time()), chunks, subscribers)

    # Carrying out

    def _carry_out_now(self, live: ActiveSubscription, todo: PushRound) -> None:
        """Carry out the decisions from the first one on, up to one that has to wait; `live` keeps the rest."""
        done = 0
        try:
            for deliver in () if todo.has_a_past else todo.decisions:
                assert isinstance(deliver, PushDecision)
                frames = collect_recent(live.logs[deliver.partition], deliver.runs, todo.chunks.get(deliver.partition))
                if frames is None:
                    break
                self._push(live, deliver, deliver.runs, frames, todo)
                done += 1
        finally:
            live.unfinished = todo.without(done)

    async def _carry_out(self, live: ActiveSubscription, decision: Decision, todo: PushRound) -> None:
        chunk = todo.chunks.get(decision.partition)
        if isinstance(decision, DeadLetterDecision):
            await self._dead_letter(live, decision, chunk)
            return
        each = live.logs[decision.partition]
        runs = tuple(run for run in decision.runs if run[-1] >= each.first_offset)
        try:
            frames = await collect(each, runs, chunk)
        except OffsetOutOfRange:  # retention was faster: what is gone is skipped, the rest comes when its lease ends
            live.subscription.advance(decision.partition, each.first_offset)
        else:
            self._push(live, decision, runs, frames, todo)

    def _push(
        self, live: ActiveSubscription, deliver: PushDecision, runs: tuple[range, ...], frames: Frames, todo: PushRound
    ) -> None:
        outlet, settled = todo.subscribers[deliver.subscriber]
        if live.outlets.get(deliver.subscriber) is not outlet or not runs:
            return  # it has left, and perhaps joined again, since this was decided
        size = sum(map(len, runs))
        about = (live.name, live.topic, deliver.partition, deliver.attempt, size, settled)
        outlet.deliver(PushedRun(*about, frames, deliver.suspects))
        self._count(live, deliver, size, frames)
        if outlet.settles_at_once:
            live.subscription.ack(outlet.name, deliver.partition, runs, trio.current_time())

    def _count(self, live: ActiveSubscription, deliver: PushDecision, size: int, frames: Frames) -> None:
        live.delivered_messages += size
        live.delivered_bytes += len(frames)
        if deliver.attempt == 1:
            self.deliver_seconds.observe(max(0, now_ms() - int.from_bytes(frames[16:24], "big")) / 1000)

    async def _dead_letter(
        self, live: ActiveSubscription, letter: DeadLetterDecision, chunk: StoredChunk | None
    ) -> None:
        now = trio.current_time()
        try:
            frame = await collect(live.logs[letter.partition], [range(letter.offset, letter.offset + 1)], chunk)
            await self._bury(live, letter, bytes(frame))
        except OffsetOutOfRange:
            live.subscription.advance(letter.partition, live.logs[letter.partition].first_offset)
        except BrokerError as error:
            log.warning("dead letter %s %d/%d: %s", live.name, letter.partition, letter.offset, error)
            live.subscription.dead_letter_failed(letter.partition, letter.offset, now)
        else:
            live.subscription.dead_lettered(letter.partition, letter.offset, now)

    # What is due

    def _note_changes(self, live: ActiveSubscription) -> None:
        """Remember when to look at it again, and when to save it."""
        wakeup = live.subscription.next_wakeup(trio.current_time())
        if wakeup is None:
            live.due = NEVER
        elif wakeup != live.due:
            self._set_alarm(live, wakeup)
        self._saver.note(live)

    def _set_alarm(self, live: ActiveSubscription, when: float) -> None:
        if when < self._alarms.first():
            self._wake.set()
        self._alarms.set(live, when)
