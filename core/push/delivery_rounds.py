"""Carries out what subscriptions decide: reads the messages, pushes them, has the cursors saved.

A subscription is served in rounds: read what could go out, decide, carry it out; never two rounds at once. A round that
finds all its messages in memory takes place in the step of the event loop that caused it (a settle, a commit), unless
this pass of the event loop has lasted long or others wait: then it waits for its turn. A round that has to wait, for
the disk or for a durable state, gets a task, which decides and pushes in turn too. An idle subscription costs only its
state.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import TypeVar

import trio

from qb.core.pacing import Turn, working_on
from qb.core.push.active_subscription import ActiveSubscription, PushRound
from qb.core.push.cursor_saver import CursorSaver
from qb.core.push.delivery_sinks import DeliverySink, PushedRun
from qb.core.push.kept_cursors import KeptCursors
from qb.core.push.serving_turns import ServingTurns
from qb.core.push.stored_slices import Frames, collect, collect_recent
from qb.core.push.watched_topics import WatchedTopics
from qb.core.push.window_shares import WindowShares
from qb.core.rights.quotas import Allowance
from qb.core.subscriptions.messages.deadlines import NEVER, Deadlines
from qb.core.subscriptions.push_decisions import DeadLetterDecision, Decision, PushDecision
from qb.core.subscriptions.subscription_options import SubscriptionMode
from qb.core.wire.clock import now_ms
from qb.core.wire.errors import BrokerError, OffsetOutOfRange, QuotaExceeded
from qb.storage.engine import Metadata, PartitionLog, StoredChunk
from qb.storage.faults import keep_running
from qb.storage.measures import SECONDS, Histogram

log = logging.getLogger("qb.deliveries")

ROUNDS_NOW = 4  # in one turn; then others have theirs
TASKS_AT_ONCE = 50  # that begin in one pass of the event loop

Result = TypeVar("Result")

# Publishes a dead letter, given the stored frame that it is about; returns when it is durable.
StoreDeadLetter = Callable[[ActiveSubscription, DeadLetterDecision, bytes], Awaitable[None]]


class DeliveryRounds:
    """All subscriptions in service."""

    def __init__(self, metadata: Metadata, store_dead_letter: StoreDeadLetter) -> None:
        self._kept_cursors = KeptCursors()
        self._store_dead_letter = store_dead_letter
        self._saver = CursorSaver(metadata, self.serve)
        self._active: dict[str, ActiveSubscription] = {}
        self._turns = ServingTurns()
        self._watched = WatchedTopics(self._published)
        self._draining = False
        self._tasks: dict[ActiveSubscription, None] = {}  # those that a task is to serve, in this order
        self._deadlines: Deadlines[ActiveSubscription] = Deadlines()
        self._wakes_at = NEVER  # when the task that starts rounds looks for deadlines by itself
        self._shares = WindowShares(self.serve_soon)
        self.deliver_seconds = Histogram(SECONDS)  # from a message's timestamp to its first push; the first of a run

    def __iter__(self) -> Iterator[ActiveSubscription]:
        return iter(list(self._active.values()))

    def __len__(self) -> int:
        return len(self._active)

    def get(self, name: str) -> ActiveSubscription | None:
        """Return a subscription in service."""
        return self._active.get(name)

    # Subscriptions and subscribers

    def add(self, active: ActiveSubscription) -> None:
        """Put a subscription into service."""
        self._active[active.name] = active
        self._kept_cursors.add(len(active.logs))
        self.serve_soon(active)

    def remove(self, active: ActiveSubscription, reason: str) -> None:
        """Take a subscription out of service and notify its subscribers."""
        active.gone = True
        self._turns.discard(active)
        del self._active[active.name]
        for sink in list(active.sinks.values()):
            self._shares.leave(active, sink)
            sink.removed(active.name, reason)
        active.sinks.clear()
        self._watch_logs(active)
        active.subscription.close()
        active.due = NEVER

    def add_partitions(self, active: ActiveSubscription, logs: Mapping[int, PartitionLog]) -> None:
        """The topic has more partitions: serve them from their beginning."""
        new = {partition: each for partition, each in logs.items() if partition not in active.logs}
        active.logs = {**active.logs, **new}
        self._kept_cursors.add(len(new))
        for partition in new:
            active.subscription.add_partition(partition, 0)
        self._watched.partitions_added(active)
        self.read_again(active, new)
        self.serve_soon(active)

    def join(
        self,
        active: ActiveSubscription,
        sink: DeliverySink,
        window: int | None,
        announces: bool,
        allowances: Sequence[Allowance] = (),
    ) -> None:
        """Let a subscriber take part, with its share of the allowances.

        Raises SubscriptionBusy, BadRequest, QuotaExceeded.
        """
        active.subscription.join(sink.name, window, announces)
        try:
            self._shares.join(active, sink, allowances)
        except QuotaExceeded:
            active.subscription.leave(sink.name)
            raise
        active.sinks[sink.name] = sink
        self._watch_logs(active)
        self.serve_soon(active)

    def leave(self, active: ActiveSubscription, sink: DeliverySink, *, died: bool) -> None:
        """A subscriber leaves or has died; the messages that it held go to the others."""
        if active.sinks.pop(sink.name, None) is None or (self._draining and not died):
            return
        self._shares.leave(active, sink)
        self._watch_logs(active)
        if died:
            active.subscription.died(sink.name, trio.current_time())
        else:
            active.subscription.leave(sink.name)
        self.serve_soon(active)

    def drain(self) -> None:
        """The broker stops: push nothing more.

        What subscribers that leave from now on have in flight stays so. At the next start it is ready again all the
        same, and there is nothing to save for it.
        """
        self._draining = True

    async def leave_in_turn(self, active: ActiveSubscription, sink: DeliverySink, *, died: bool) -> None:
        """The same for a connection that has ended: many may end together. Done even if the caller is cancelled."""
        with trio.CancelScope(shield=True):
            await self._in_turn(active, partial(self.leave, active, sink, died=died))

    def _watch_logs(self, active: ActiveSubscription) -> None:
        """Watch the logs while there are subscribers: a publish costs nothing for subscriptions without any."""
        if active.sinks and active not in self._watched:
            self._watched.add(active)
            self.read_again(active, active.logs)
        elif not active.sinks:
            self._watched.discard(active)
            active.unread.clear()

    def read_again(self, active: ActiveSubscription, partitions: Iterable[int]) -> None:
        """Look at these partitions in the next round, if they have messages that were not offered yet."""
        if active in self._watched:
            active.unread.add(active.with_unread(partitions))

    def _published(self, active: ActiveSubscription, partition: int) -> None:
        active.unread.add((partition,))
        self.serve(active)

    # Serving

    def serve_soon(self, active: ActiveSubscription) -> None:
        """This subscription has changed: serve it in turn, or at the next try if it is suspended."""
        if active.serving:
            active.again = True
        elif not (active.gone or active.service.text or self._draining):
            self._serve_in_turn(active)

    def has_room(self, name: str) -> None:
        """All subscriptions together have fewer messages open: one that waited for that may go on."""
        active = self._active.get(name)
        if active is not None:
            self.serve_soon(active)

    def _serve_in_turn(self, active: ActiveSubscription) -> None:
        self._turns.add(active, partial(self._serve_now, active), behind=active.behind)

    def serve(self, active: ActiveSubscription) -> None:
        """This subscription has changed: serve it now if this pass of the event loop has time for it, else in turn."""
        waits = active.serving or active.gone or active.service.text or active.unfinished or self._draining
        turn = None if waits else self._turns.this_pass(behind=active.behind)
        if turn is None:
            self.serve_soon(active)
        else:
            self._serve_now(active, turn)

    def _serve_now(self, active: ActiveSubscription, turn: Turn) -> None:
        """Make rounds until nothing is left to decide, the turn is over, or a task has to wait for something."""
        if active.serving:
            active.again = True
        elif self._draining or active.gone:
            return
        elif active.service.text or active.unfinished:
            self._serve_in_task(active)
        else:
            try:
                self._make_rounds(active, turn)
            except Exception as error:
                self._suspend(active, error)

    def _make_rounds(self, active: ActiveSubscription, turn: Turn) -> None:
        working_on("deliveries of", active.name)
        for _ in range(ROUNDS_NOW):
            if not active.subscription.may_decide(trio.current_time()):
                self._note_changes(active)
                return
            chunks = self._read_recent(active)
            if chunks is None:
                self._serve_in_task(active)
                return
            todo = self._decide(active, chunks)
            self._carry_out_now(active, todo)
            if active.unfinished:
                self._serve_in_task(active)
                return
            now = trio.current_time()
            more = self._may_decide_more(todo) and active.subscription.may_decide(now)
            self._note_changes(active)
            if active.due > now and not more:
                return
            if turn.is_over or active.due <= now:  # it takes messages back in portions
                break
        self.serve_soon(active)

    def _serve_in_task(self, active: ActiveSubscription) -> None:
        active.serving = True
        self._tasks[active] = None
        self._turns.wake()

    async def run(self) -> None:
        """Serve all subscriptions until cancelled; then make their cursors durable."""
        try:
            async with trio.open_nursery() as rounds:
                rounds.start_soon(keep_running, "saving of subscriptions", self._saver.run)
                await keep_running("deliveries", partial(self._start_rounds, rounds))
        finally:
            self._turns.end()
            with trio.CancelScope(shield=True):
                await self._finish()

    async def _finish(self) -> None:
        try:
            await self._saver.finish(self)
        except BrokerError as error:
            log.error("cursors could not be saved: %s; what was acked since their last save comes again", error)

    async def _start_rounds(self, rounds: trio.Nursery) -> None:
        while True:
            self._turns.make_calls()
            for active in list(islice(self._tasks, TASKS_AT_ONCE)):
                del self._tasks[active]
                rounds.start_soon(self._serve, active)
            self._wakes_at = trio.current_time() if self._tasks else self._deadlines.first()
            await self._turns.wait(self._wakes_at)
            for active in self._deadlines.pop_due(trio.current_time()):
                if active.serving:
                    active.again = True
                elif not active.gone:
                    self._serve_in_turn(active)

    async def _serve(self, active: ActiveSubscription) -> None:
        """Do what the subscription decides until it decides nothing more."""
        active.again = True
        try:
            while active.again and not active.gone and not self._draining:
                active.again = False
                await self._round(active)
            active.service.end()
        except Exception as error:
            self._suspend(active, error)
        finally:
            active.serving = False

    def _suspend(self, active: ActiveSubscription, error: Exception) -> None:
        """Serve it no more until the next try: its log cannot be read, its state not stored, or a bug."""
        if active.gone and isinstance(error, BrokerError):
            return
        self._set_deadline(active, trio.current_time() + active.service.note(error))
        self._saver.note(active)

    async def _round(self, active: ActiveSubscription) -> None:
        working_on("deliveries of", active.name)
        todo, active.unfinished = active.unfinished, None
        if todo is None:
            chunks = await self._read(active)
            todo = await self._in_turn(active, partial(self._decide, active, chunks), behind=active.behind)
        done = 0
        try:
            if todo.needs_saved_state:
                await self._saver.save(active)
            for decision in todo.decisions:
                await self._carry_out(active, decision, todo)
                done += 1
        finally:
            active.unfinished = todo.without(done)
        active.again = active.again or self._may_decide_more(todo)
        self._note_changes(active)

    async def _in_turn(self, active: ActiveSubscription, call: Callable[[], Result], *, behind: bool = False) -> Result:
        """Make a call that must not wait in a turn of its own."""

        def named() -> Result:
            working_on("deliveries of", active.name)
            return call()

        return await self._turns.call(named, behind=behind)

    async def save(self, active: ActiveSubscription) -> None:
        """Return when the state of a subscription as it is now is durable. Raises BrokerError, as Saver.save()."""
        await self._saver.save(active)

    @staticmethod
    def _may_decide_more(done: PushRound) -> bool:
        """Return whether to look again at once: there may be more to read, and what was read may all be held back."""
        return bool(done.decisions or done.chunks)

    # Reading

    def _read_recent(self, active: ActiveSubscription) -> dict[int, StoredChunk] | None:
        """Return what could go out, by partition, or None if memory does not have all of it."""
        chunks: dict[int, StoredChunk] = {}
        for partition, each, offset, size in active.to_read(trio.current_time()):
            chunk = each.read_recent(offset, size)
            if chunk is None:
                return None
            chunks[partition] = chunk
        return chunks

    async def _read(self, active: ActiveSubscription) -> dict[int, StoredChunk]:
        """Return what could go out, by partition."""
        chunks: dict[int, StoredChunk] = {}
        for partition, each, offset, size in active.to_read(trio.current_time()):
            chunks[partition] = each.read_recent(offset, size) or await each.read(offset, size)
        return chunks

    # Deciding

    def _decide(self, active: ActiveSubscription, chunks: Mapping[int, StoredChunk]) -> PushRound:
        """Offer the subscription what was read; returns what it decides."""
        if self._draining:
            return PushRound([], {}, {})
        subscription = active.subscription
        room = subscription.room()  # what is offered beyond it would have to be read again when it goes out
        for partition, chunk in chunks.items():
            active.note_size(chunk)
            subscription.note_message_bytes(active.message_bytes)
            wanted = subscription.wanted(partition)
            usable = min(len(chunk.positions), len(wanted), room)
            if wanted.start != chunk.first_offset or not usable:
                continue  # a seek came in between, or the others have taken all the room
            room -= usable
            if subscription.options.mode is SubscriptionMode.KEY_SHARED:
                subscription.offer_keys(partition, chunk.first_offset, active.known_keys.of(partition, chunk, usable))
            else:
                subscription.offer(partition, chunk.first_offset, usable)
        subscribers = {name: (sink, sink.settled) for name, sink in active.sinks.items()}
        return PushRound(subscription.decide(trio.current_time()), chunks, subscribers)

    # Carrying out

    def _carry_out_now(self, active: ActiveSubscription, todo: PushRound) -> None:
        """Carry out the decisions in order, up to the first that has to wait; `active.unfinished` keeps the rest."""
        done = 0
        try:
            for deliver in () if todo.needs_saved_state else todo.decisions:
                assert isinstance(deliver, PushDecision)
                frames = collect_recent(
                    active.logs[deliver.partition], deliver.runs, todo.chunks.get(deliver.partition)
                )
                if frames is None:
                    break
                self._push(active, deliver, deliver.runs, frames, todo)
                done += 1
        finally:
            active.unfinished = todo.without(done)

    async def _carry_out(self, active: ActiveSubscription, decision: Decision, todo: PushRound) -> None:
        chunk = todo.chunks.get(decision.partition)
        if isinstance(decision, DeadLetterDecision):
            await self._dead_letter(active, decision, chunk)
            return
        each = active.logs[decision.partition]
        runs = tuple(run for run in decision.runs if run[-1] >= each.first_offset)
        try:
            frames = await collect(each, runs, chunk)
        except OffsetOutOfRange:  # retention was faster: what is gone is skipped, the rest comes when its lease ends
            active.subscription.advance(decision.partition, each.first_offset)
        else:
            push = partial(self._push, active, decision, runs, frames, todo)
            await self._in_turn(active, push, behind=active.behind)

    def _push(
        self,
        active: ActiveSubscription,
        deliver: PushDecision,
        runs: tuple[range, ...],
        frames: Frames,
        todo: PushRound,
    ) -> None:
        sink, settled = todo.subscribers[deliver.subscriber]
        if active.sinks.get(deliver.subscriber) is not sink or not runs:
            return  # it has left, and perhaps joined again, since this was decided
        size = sum(map(len, runs))
        about = (active.name, active.topic, deliver.partition, deliver.attempt, size, settled)
        sink.deliver(PushedRun(*about, frames, deliver.suspects, runs))
        self._count(active, deliver, size, frames)
        if sink.settles_at_once:
            active.subscription.ack(sink.name, deliver.partition, runs, trio.current_time())

    def _count(self, active: ActiveSubscription, deliver: PushDecision, size: int, frames: Frames) -> None:
        active.delivered_messages += size
        active.delivered_bytes += len(frames)
        if deliver.attempt == 1:
            self.deliver_seconds.observe(max(0, now_ms() - int.from_bytes(frames[16:24], "big")) / 1000)

    async def _dead_letter(
        self, active: ActiveSubscription, letter: DeadLetterDecision, chunk: StoredChunk | None
    ) -> None:
        now = trio.current_time()
        try:
            frame = await collect(active.logs[letter.partition], [range(letter.offset, letter.offset + 1)], chunk)
            await self._store_dead_letter(active, letter, bytes(frame))
        except OffsetOutOfRange:
            active.subscription.advance(letter.partition, active.logs[letter.partition].first_offset)
        except BrokerError as error:
            log.warning("dead letter %s %d/%d: %s", active.name, letter.partition, letter.offset, error)
            active.subscription.dead_letter_failed(letter.partition, letter.offset, now)
        else:
            active.subscription.dead_lettered(letter.partition, letter.offset, now)

    # What is due

    def _note_changes(self, active: ActiveSubscription) -> None:
        """Remember when to look at it again, when to save it, and whether it has left something unread."""
        active.behind = bool(active.unread)
        wakeup = active.subscription.next_wakeup(trio.current_time())
        if wakeup is None:
            active.due = NEVER
        elif wakeup != active.due:
            self._set_deadline(active, wakeup)
        self._saver.note(active)

    def _set_deadline(self, active: ActiveSubscription, when: float) -> None:
        if when < self._wakes_at:  # else it looks early enough by itself, perhaps for a deadline that is no more
            self._turns.wake()
        self._deadlines.set(active, when)
