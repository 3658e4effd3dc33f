"""Anything may happen to a subscription in any order, and every promise of docs/SUBSCRIPTIONS.md still holds.

The model is as plain as can be: a set of settled messages, a dictionary of who holds what until when, one number of
attempts for each message, and a list of the acks that are not durable. A snapshot is taken, and later it becomes
durable or is lost. A crash goes back to the last durable one, and to the copy of the model that was made with it.
"""

from __future__ import annotations

import copy
from collections import Counter
from random import Random
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from qb.core.subscriptions import dispatch, failures
from qb.core.subscriptions.push_decisions import DeadLetterDecision, Decision, PushDecision
from qb.core.subscriptions.queues import key_order, key_queue, round_robin
from qb.core.subscriptions.save_urgency import SaveUrgency
from qb.core.subscriptions.snapshot import PartitionSnapshot, SnapshotChanges, SubscriptionSnapshot, merged
from qb.core.subscriptions.subscription import Subscription
from qb.core.subscriptions.subscription_options import RetryBackoff, SubscriptionMode, SubscriptionOptions
from tests.support.subscription_tools import reopened

PARTITIONS = (0, 1)
DEADLINE = 10.0
MAX_DELIVERIES = 3
KEYS = ("a", "b", "c", None)

Message = tuple[int, int]  # (partition, offset)

json = msgspec.json
partitions = st.sampled_from(PARTITIONS)
chance = st.randoms(use_true_random=False)


class Model:
    """What a subscription has to remember, kept without any cleverness."""

    def __init__(self) -> None:
        self.begin = dict.fromkeys(PARTITIONS, 0)  # below this nothing is owed
        self.settled: set[Message] = set()
        self.attempts: Counter[Message] = Counter()
        self.failures: Counter[Message] = Counter()  # at most so many can be held against a message
        self.deaths: Counter[Message] = Counter()  # of at most so many is a message a suspect
        self.alone: set[Message] = set()

    def forget(self, message: Message) -> None:
        """A seek has been here."""
        self.settled.discard(message)
        self.alone.discard(message)
        del self.attempts[message]
        del self.failures[message]
        del self.deaths[message]


class Ack(NamedTuple):
    """An ack that is not durable."""

    subscriber: str
    message: Message
    late: bool  # had its lease ended before?


class Save(NamedTuple):
    """What has changed since the last save, all of it, and the model as it was then."""

    changes: SnapshotChanges
    whole: SubscriptionSnapshot
    model: Model
    acks: int  # how many of the acks so far it has


def contents(snapshot: SubscriptionSnapshot) -> Any:
    """Return what a snapshot says, however its messages are put into runs."""
    partitions = {
        each.partition: (each.start, each.next, {at: run_of[3:] for run_of, at in opened(each)})
        for each in snapshot.partitions
    }
    return partitions, snapshot.paused, snapshot.redelivered, snapshot.dead_lettered


def opened(partition: PartitionSnapshot) -> list[tuple[Any, int]]:
    return [(msgspec.structs.astuple(run), offset) for run in partition.runs() for offset in run.offsets]


class Machine(RuleBasedStateMachine):
    """One subscription with two partitions, driven by whatever hypothesis thinks of."""

    mode = SubscriptionMode.SHARED
    in_portions = False  # do messages come back two at a time?

    @initialize(seed=st.integers(0, 2**32))
    def begin(self, seed: int) -> None:
        self.patches = pytest.MonkeyPatch()
        if self.in_portions:
            for module in (failures, dispatch):
                self.patches.setattr(module, "AT_ONCE", 2)
            self.patches.setattr(dispatch, "REDELIVERED_AT_ONCE", 3)
            self.patches.setattr(dispatch, "MOST_BY_KEY", 5)
            self.patches.setattr(key_queue, "MOST_IN_FLIGHT", 4)
            self.patches.setattr(round_robin, "BUSY", 2)
        self.patches.setattr(key_order, "FEW", seed % 2 * key_order.FEW)  # else messages are looked at by columns
        self.now = 1000.0
        self.random = Random(seed)
        self.options = SubscriptionOptions(
            mode=self.mode,
            ack_deadline=DEADLINE,
            max_in_flight=8,
            max_deliveries=MAX_DELIVERIES,
            backoff=RetryBackoff(initial=1, factor=2, cap=8),
        )
        self.subscription = Subscription("s", self.options, dict.fromkeys(PARTITIONS, 0), self.random)
        self.keys: dict[int, list[str | None]] = {partition: [] for partition in PARTITIONS}
        self.model = Model()
        self.windows: dict[str, int] = {}  # by subscriber, in the order of joining
        self.announces: set[str] = set()
        self.holds: dict[Message, tuple[str, float]] = {}  # holder, deadline
        self.named: dict[str, set[Message]] = {}
        self.letters: list[DeadLetterDecision] = []
        self.dead_lettered: set[Message] = set()  # their letters are durable, and could be written twice
        self.given: Counter[str] = Counter()  # since the windows were last disturbed
        self.joined = 0
        self.paused = False
        self.acks: list[Ack] = []  # since the last durable snapshot was taken, of all who were there then or later
        self.all_windows: dict[str, int] = {}  # of all who ever joined
        self.saves: list[Save] = []  # under way, at most one
        self.stored = self.subscription.copy()
        self.persist()

    # Helpers

    def end(self, partition: int) -> int:
        return len(self.keys[partition])

    def owed(self) -> list[Message]:
        return [
            (partition, offset)
            for partition in PARTITIONS
            for offset in range(self.model.begin[partition], self.end(partition))
            if (partition, offset) not in self.model.settled
        ]

    def held_by(self, name: str) -> list[Message]:
        return sorted(message for message, (holder, _) in self.holds.items() if holder == name)

    def room(self, name: str) -> int:
        return self.windows[name] - len(self.held_by(name)) - self.unsaved(name)

    def unsaved(self, name: str) -> int:
        return sum(1 for ack in self.acks if ack.subscriber == name)

    def key(self, message: Message) -> str | None:
        return self.keys[message[0]][message[1]]

    def pick(self, random: Random) -> str:
        return random.choice(list(self.windows))

    def drop(self, message: Message) -> None:
        """The lease has ended."""
        holder, _ = self.holds.pop(message)
        self.named[holder].discard(message)

    def settle(self, message: Message) -> None:
        self.model.settled.add(message)
        self.model.alone.discard(message)
        self.model.deaths.pop(message, None)

    def fail(self, message: Message, failures: int = 1) -> None:
        """The lease has ended badly; later messages of the same key are taken back."""
        self.drop(message)
        self.model.failures[message] += failures
        if self.mode is SubscriptionMode.KEY_SHARED and self.key(message) is not None:
            for other in list(self.holds):
                if other[0] == message[0] and other[1] > message[1] and self.key(other) == self.key(message):
                    self.drop(other)

    # What happens

    @rule(partition=partitions, keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=9))
    def publish(self, partition: int, keys: list[str | None]) -> None:
        self.keys[partition] += keys
        self.deliver()

    @precondition(lambda self: len(self.windows) < (1 if self.mode is SubscriptionMode.EXCLUSIVE else 4))
    @rule(window=st.integers(1, 10), announces=st.booleans())
    def join(self, window: int, announces: bool) -> None:
        name = f"w{self.joined}"
        self.joined += 1
        self.subscription.join(name, window, announces)
        self.windows[name] = self.all_windows[name] = min(window, 8)
        self.named[name] = set()
        if announces:
            self.announces.add(name)
        self.given.clear()
        self.deliver()

    def gone(self, name: str) -> None:
        for message in self.held_by(name):
            self.drop(message)
        del self.windows[name], self.named[name]
        self.given.clear()

    @precondition(lambda self: self.windows)
    @rule(random=chance, then_deliver=st.booleans())
    def leave(self, random: Random, then_deliver: bool) -> None:
        name = self.pick(random)
        self.subscription.leave(name)
        self.gone(name)
        if then_deliver:
            self.deliver()

    @precondition(lambda self: self.windows)
    @rule(random=chance, then_deliver=st.booleans())
    def die(self, random: Random, then_deliver: bool) -> None:
        name = self.pick(random)
        held, named = self.held_by(name), set(self.named[name])
        in_hand = held
        if named:
            in_hand = sorted(named)
        elif name in self.announces:
            in_hand = [message for message in held if self.model.attempts[message] == 1]
        self.subscription.died(name, self.now)
        self.gone(name)
        if len(in_hand) == 1:
            self.model.failures[in_hand[0]] += 1 + self.model.deaths.pop(in_hand[0], 0)
        else:
            self.model.deaths.update(in_hand)
        if len(in_hand) == 1 or named:
            self.model.alone.update(in_hand)
        if then_deliver:
            self.deliver()

    @precondition(lambda self: self.holds)
    @rule(random=chance)
    def start(self, random: Random) -> None:
        message, (holder, _) = random.choice(sorted(self.holds.items()))
        assert self.subscription.started(holder, *message)
        self.named[holder].add(message)

    @precondition(lambda self: self.windows)
    @rule(
        random=chance, partition=partitions, first=st.integers(0, 20), count=st.integers(1, 9), step=st.integers(1, 4)
    )
    def ack_a_run(self, random: Random, partition: int, first: int, count: int, step: int) -> None:
        name = self.pick(random)
        run = range(first, first + count * step, step)
        acked = [message for message in self.held_by(name) if message[0] == partition and message[1] in run]
        number = self.subscription.ack(name, partition, [run], self.now)
        for message in acked:
            self.acked(name, message)
        assert number >= len(acked)
        if number > len(acked):  # some came late, after their leases had ended
            late = [message for message in self.owed() if message[0] == partition and message[1] in run]
            late = [message for message in late if self.is_settled(message)]
            assert number == len(acked) + len(late)
            for message in late:
                assert message not in self.holds
                self.settle(message)
                self.acks.append(Ack(name, message, late=True))

    def acked(self, name: str, message: Message) -> None:
        self.drop(message)
        self.settle(message)
        self.acks.append(Ack(name, message, late=False))

    def is_settled(self, message: Message) -> bool:
        words = self.subscription.explain(*message, end=self.end(message[0]), now=self.now)
        return words.startswith("acked by")

    @precondition(lambda self: self.windows)
    @rule(random=chance)
    def ack_everything_and_go_on(self, random: Random) -> None:
        self.ack_everything(random)
        self.deliver()

    def ack_everything(self, random: Random) -> None:
        name = self.pick(random)
        for partition in PARTITIONS:
            held = [message for message in self.held_by(name) if message[0] == partition]
            runs = [range(offset, offset + 1) for _, offset in held]
            assert self.subscription.ack(name, partition, runs, self.now) == len(held)
            for message in held:
                self.acked(name, message)

    @precondition(lambda self: self.holds)
    @rule(random=chance, delay=st.sampled_from([None, 0.0, 5.0]))
    def nack(self, random: Random, delay: float | None) -> None:
        message, (holder, _) = random.choice(sorted(self.holds.items()))
        assert self.subscription.nack(holder, *message, self.now, "no luck", delay)
        self.fail(message)
        self.model.alone.discard(message)
        self.model.deaths.pop(message, None)

    @precondition(lambda self: self.windows)
    @rule(random=chance, partition=partitions, offset=st.integers(0, 30))
    def nack_what_is_not_held(self, random: Random, partition: int, offset: int) -> None:
        name = self.pick(random)
        if self.holds.get((partition, offset), ("", 0))[0] != name:
            assert not self.subscription.nack(name, partition, offset, self.now)

    @precondition(lambda self: self.holds)
    @rule(random=chance, seconds=st.floats(0, 30), everything=st.booleans())
    def extend(self, random: Random, seconds: float, everything: bool) -> None:
        message, (holder, _) = random.choice(sorted(self.holds.items()))
        extended = [message]
        if everything:
            extended = self.held_by(holder)
            assert sum(self.subscription.extend_all(holder, seconds, self.now)) == len(extended)
        else:
            run = range(message[1], message[1] + 1)
            assert self.subscription.extend(holder, message[0], [run], seconds, self.now) == 1
        for each in extended:
            self.holds[each] = (holder, max(self.holds[each][1], self.now + seconds))

    @rule(partition=partitions, part=st.floats(0, 1), what=st.sampled_from(["seek", "retention", "pause", "crash"]))
    def upset(self, partition: int, part: float, what: str) -> None:
        """Rare things share one rule, so that they stay rare."""
        if what == "seek":
            self.seek(partition, part)
        elif what == "retention":
            self.drop_by_retention(partition, part / 2)
        elif what == "pause":
            self.pause()
        else:
            self.crash()

    def seek(self, partition: int, part: float) -> None:
        offset = int(part * self.end(partition))
        self.subscription.seek(partition, offset)
        for other in range(self.end(partition)):
            self.model.forget((partition, other))
            if (partition, other) in self.holds:
                self.drop((partition, other))
        self.letters = [letter for letter in self.letters if letter.partition != partition]
        self.model.begin[partition] = offset
        self.given.clear()

    def drop_by_retention(self, partition: int, part: float) -> None:
        first = int(part * self.end(partition))
        self.subscription.advance(partition, first)
        for offset in range(first):
            if (partition, offset) in self.holds:
                self.drop((partition, offset))
        self.letters = [x for x in self.letters if x.partition != partition or x.offset >= first]
        self.model.begin[partition] = max(self.model.begin[partition], first)

    def pause(self) -> None:
        self.subscription.pause()
        self.paused = True

    @precondition(lambda self: self.paused)
    @rule()
    def resume(self) -> None:
        self.subscription.resume()
        self.paused = False

    @rule(seconds=st.floats(0, 12))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.deliver()

    @rule()
    def wait_for_the_next_wakeup(self) -> None:
        wakeup = self.subscription.next_wakeup(self.now)
        if wakeup is not None:
            self.now = max(self.now, wakeup)
        self.deliver()

    # What is durable

    @precondition(lambda self: not self.saves)  # the next one begins when the last one has ended
    @rule()
    def begin_to_save(self) -> None:
        whole = self.subscription.copy()
        changes = self.subscription.changes()
        self.saves.append(Save(changes, whole, copy.deepcopy(self.model), len(self.acks)))
        assert not self.subscription.dirty

    @precondition(lambda self: self.saves)
    @rule(then_deliver=st.booleans())
    def finish_a_save(self, then_deliver: bool) -> None:
        self.durable = self.saves.pop(0)
        changes = self.durable.changes
        self.stored = merged(self.stored, changes.head, changes.partitions)
        assert contents(self.stored) == contents(self.durable.whole), "what is stored piece by piece is the whole"
        counted = [ack for ack in self.acks[: self.durable.acks] if ack.subscriber in self.windows]
        assert self.subscription.saved(changes.number) == bool(counted), "says whether there is room now"
        del self.acks[: self.durable.acks]
        if then_deliver:
            self.deliver()

    @precondition(lambda self: self.saves)
    @rule()
    def lose_a_save(self) -> None:
        """The disk refuses it: what is open is as it was before, and the next save has it all."""
        self.subscription.not_saved(self.saves.pop(0).changes)
        self.begin_to_save()

    def persist(self) -> None:
        if self.saves:
            self.finish_a_save(then_deliver=False)
        self.begin_to_save()
        self.finish_a_save(then_deliver=False)

    def crash(self) -> None:
        self.check_what_comes_again()
        saved = json.decode(json.encode(self.stored), type=SubscriptionSnapshot)
        self.subscription = reopened("s", saved, self.now, self.random)
        self.model = copy.deepcopy(self.durable.model)
        self.acks.clear()
        self.saves.clear()
        self.holds.clear()
        self.windows.clear()
        self.named.clear()
        self.given.clear()
        self.letters.clear()
        self.paused = self.subscription.paused

    def check_what_comes_again(self) -> None:
        """A crash makes no message come again but those in flight: pushed and not durably acked."""
        settled = self.durable.model.settled
        again = {name: set(self.held_by(name)) for name in self.all_windows}
        for ack in self.acks:
            if not ack.late and ack.message not in settled:  # a late one was to come again by its deadline anyway
                again[ack.subscriber].add(ack.message)
        for name, messages in again.items():
            assert len(messages) <= self.all_windows[name], "more than its window comes again"
        acked = {ack.message for ack in self.acks}
        for message in self.model.settled - acked - self.dead_lettered:
            durably = message in settled or message[1] < self.durable.model.begin[message[0]]
            assert durably, "acked, no longer in a window, and not durable"

    @precondition(lambda self: self.letters)
    @rule(stored=st.booleans())
    def carry_out_a_dead_letter(self, stored: bool) -> None:
        letter = self.letters.pop(0)
        if stored:
            self.subscription.dead_lettered(letter.partition, letter.offset, self.now)
            self.settle((letter.partition, letter.offset))
            self.dead_lettered.add((letter.partition, letter.offset))
        else:
            self.subscription.dead_letter_failed(letter.partition, letter.offset, self.now)

    # Delivering, and what must be true of every delivery

    @rule()
    def deliver(self) -> None:
        for message, (_, deadline) in sorted(self.holds.items()):
            if deadline <= self.now and message in self.holds:
                self.fail(message)
        for partition in PARTITIONS:
            wanted = self.subscription.wanted(partition)
            at_hand = range(wanted.start, min(wanted.stop, self.end(partition)))
            if self.mode is SubscriptionMode.KEY_SHARED:
                self.subscription.offer_keys(
                    partition, at_hand.start, self.keys[partition][at_hand.start : at_hand.stop]
                )
            elif at_hand:
                self.subscription.offer(partition, at_hand.start, len(at_hand))
        disturbed = self.in_portions or not all(self.room(name) > 0 for name in self.windows)
        decisions = self.decide()
        for decision in decisions:
            if isinstance(decision, PushDecision):
                self.receive(decision)
            else:
                self.receive_dead_letter(decision)
        again = any(isinstance(decision, DeadLetterDecision) or decision.attempt > 1 for decision in decisions)
        if again or (decisions and self.in_portions):
            self.check_fairness(disturbed)
            self.persist()
            self.deliver()  # there may be room now
            return
        wakeup = self.subscription.next_wakeup(self.now)
        assert wakeup is None or wakeup > self.now, "would be woken again and again for nothing"
        self.check_fairness(disturbed)
        self.check_that_nothing_is_forgotten()

    def decide(self) -> list[Decision]:
        """Return what it decides when all that is due has come back; a save may begin between two portions."""
        for number in range(1000):
            may_decide, before = self.subscription.may_decide(self.now), self.subscription.copy()
            decisions = self.subscription.decide(self.now)
            assert may_decide or (not decisions and self.subscription.copy() == before)
            wakeup = self.subscription.next_wakeup(self.now)
            if decisions or wakeup is None or wakeup > self.now or not self.in_portions:
                return decisions
            if number % 2:
                self.persist()
        raise AssertionError("portions without end")

    @precondition(lambda self: self.in_portions and all(due > self.now for _, due in self.holds.values()))
    @rule()
    def one_portion(self) -> None:
        """Anything may happen between this portion of what has come back and the next one."""
        decisions = self.subscription.decide(self.now)
        for decision in decisions:
            if isinstance(decision, PushDecision):
                self.receive(decision)
            else:
                self.receive_dead_letter(decision)
        if decisions:
            self.persist()

    def receive(self, deliver: PushDecision) -> None:
        assert not self.paused
        assert deliver.subscriber in self.windows
        if self.mode is SubscriptionMode.FAILOVER:
            assert deliver.subscriber == next(iter(self.windows)), "only the first one is active"
        for run in deliver.runs:
            for offset in run:
                self.receive_one(deliver, (deliver.partition, offset))

    def receive_one(self, deliver: PushDecision, message: Message) -> None:
        name = deliver.subscriber
        assert message in self.owed(), "delivered though it was settled, skipped or never published"
        assert message not in self.holds, "under two leases at once"
        assert self.room(name) > 0, "more than the window"
        assert deliver.attempt == self.model.attempts[message] + 1
        assert not deliver.suspects or self.model.deaths[message], "no death could be its work"
        assert not self.model.alone.intersection(self.held_by(name)), "not alone any more"
        if message in self.model.alone:
            assert not self.held_by(name), "not offered alone"
        if self.mode is SubscriptionMode.KEY_SHARED and (key := self.key(message)) is not None:
            self.check_order(name, message, key)
        self.holds[message] = (name, self.now + DEADLINE)
        self.model.attempts[message] += 1
        self.given[name] += 1

    def check_order(self, name: str, message: Message, key: str) -> None:
        for other in self.owed():
            same = self.key(other) == key and other != message
            if same and other in self.holds:
                assert self.holds[other][0] == name, "one key at two subscribers"
                assert other[0] != message[0] or other[1] < message[1], "a later one of the key is in flight"
            if same and other[0] == message[0] and other[1] < message[1]:
                assert other in self.holds, "overtook an earlier one of the key"

    def receive_dead_letter(self, letter: DeadLetterDecision) -> None:
        message = (letter.partition, letter.offset)
        assert message in self.owed()
        assert message not in self.holds
        assert self.model.failures[message] >= MAX_DELIVERIES, "condemned for less than max_deliveries failures"
        assert letter.attempts == self.model.attempts[message]
        assert letter not in self.letters
        self.letters.append(letter)

    def check_fairness(self, disturbed: bool) -> None:
        open_windows = all(self.room(name) > 0 for name in self.windows)
        if (
            disturbed
            or not open_windows
            or self.a_subscriber_is_kept_free()
            or self.mode is not SubscriptionMode.SHARED
        ):
            self.given.clear()
        elif self.windows:
            given = [self.given[name] for name in self.windows]
            assert max(given) - min(given) <= 1, "not in turn"

    def a_subscriber_is_kept_free(self) -> bool:
        words = (self.subscription.explain(*each, end=self.end(each[0]), now=self.now) for each in self.owed())
        return bool(self.model.alone) or any("alone" in each for each in words)

    def check_that_nothing_is_forgotten(self) -> None:
        """Right after decide() no message that could go out is left behind, and words are found for every message."""
        for message in self.owed():
            words = self.subscription.explain(*message, end=self.end(message[0]), now=self.now)
            assert words.startswith("in flight") == (message in self.holds), words
            if message[1] < self.subscription.wanted(message[0]).start:
                assert "next to be delivered" not in words

    # What must be true at any time

    @invariant()
    def the_floor_is_the_first_message_that_is_not_settled(self) -> None:
        for partition in PARTITIONS:
            unsettled = [offset for p, offset in self.owed() if p == partition]
            start = max(self.model.begin[partition], self.end(partition))
            assert self.subscription.floor(partition) == min(unsettled, default=start)

    @invariant()
    def the_numbers_agree_with_the_model(self) -> None:
        description = self.subscription.describe({partition: self.end(partition) for partition in PARTITIONS})
        assert {each.subscriber: each.in_flight for each in description.subscribers} == {
            name: len(self.held_by(name)) for name in self.windows
        }
        assert {each.subscriber: each.unsaved_acks for each in description.subscribers} == {
            name: self.unsaved(name) for name in self.windows
        }
        assert description.lag == len(self.owed()) == sum(each.lag for each in description.partitions)
        assert description.in_flight == sum(each.in_flight for each in description.partitions)
        assert description.waiting == sum(each.waiting for each in description.partitions)

    @invariant()
    def figures_that_are_kept_agree_with_a_recount(self) -> None:
        state = self.subscription._state
        cursors = state.cursors.values()
        assert state.waiting == sum(len(cursor.waiting) + len(cursor.passed) for cursor in cursors)
        assert state.delivered == sum(cursor.next for cursor in cursors)
        assert state.fresh == {cursor.partition: cursor for cursor in cursors if cursor.next < cursor.end}
        leases = [lease for holder in state.holders() for lease in holder.leases()]
        assert state.in_rows == sum(lease.count for lease in leases if lease.keys)
        for subscriber in state.subscribers.values():
            indexes = subscriber.partitions().values()
            held = [lease for index in indexes for lease in index]
            assert subscriber.in_flight == sum(index.count for index in indexes)
            assert subscriber.in_flight == sum(len(run) for lease in held for run in lease.held())

    @invariant()
    def acks_that_keep_a_place_are_on_their_way_to_the_disk(self) -> None:
        seen = self.saves[-1].acks if self.saves else 0
        unseen = Counter(ack.subscriber for ack in self.acks[seen:] if ack.subscriber in self.windows)
        assert self.subscription.dirty or not unseen, "these would never be saved"
        half = {name for name, count in unseen.items() if 2 * count >= self.windows[name]}
        assert (self.subscription.save_urgency >= SaveUrgency.MUCH) == bool(half)
        held = self.subscription._state.subscribers
        whole = any(not held[name].in_flight and self.unsaved(name) == unseen[name] for name in half)
        assert (self.subscription.save_urgency is SaveUrgency.ALL) == whole
        starved = any(self.room(name) <= 0 for name in unseen)
        assert (self.subscription.save_urgency is SaveUrgency.NONE) == (not half and not starved)

    def teardown(self) -> None:
        """However it went, one healthy subscriber gets to the end of everything: nothing was lost."""
        if not hasattr(self, "subscription"):
            return
        try:
            self.check_that_all_comes()
        finally:
            self.patches.undo()

    def check_that_all_comes(self) -> None:
        for name in list(self.windows):
            self.subscription.leave(name)
            self.gone(name)
        self.resume()
        self.join(window=4, announces=False)
        for _ in range(1000):
            self.deliver()
            while self.letters:
                self.carry_out_a_dead_letter(stored=True)
            self.ack_everything(self.random)
            self.persist()
            if not self.owed():
                break
            self.now = max(self.now, self.subscription.next_wakeup(self.now) or 0)
        assert not self.owed(), "lost"
        assert all(not partition.open for partition in self.subscription.snapshot().partitions)


def machine(mode: SubscriptionMode, in_portions: bool = False) -> Any:
    test = type(f"{mode.name}Machine", (Machine,), {"mode": mode, "in_portions": in_portions}).TestCase
    phases = set(Phase) - {Phase.explain}  # explaining is slow; the shortest failing story says enough
    test.settings = settings(
        max_examples=80,
        stateful_step_count=50,
        deadline=None,
        phases=phases,
        suppress_health_check=[HealthCheck.too_slow],
    )
    return pytest.mark.timeout(300)(test)  # when it fails, shrinking takes its time


TestShared = machine(SubscriptionMode.SHARED)
TestKeyShared = machine(SubscriptionMode.KEY_SHARED)
TestExclusive = machine(SubscriptionMode.EXCLUSIVE)
TestFailover = machine(SubscriptionMode.FAILOVER)
TestSharedInPortions = machine(SubscriptionMode.SHARED, in_portions=True)
TestKeySharedInPortions = machine(SubscriptionMode.KEY_SHARED, in_portions=True)


def test_a_key_that_has_found_its_subscriber_fills_the_window_with_what_is_beyond_its_share() -> None:
    story = type("Story", (Machine,), {"mode": SubscriptionMode.KEY_SHARED})()
    story.begin(seed=0)
    for window in (1, 6, 2):
        story.join(window=window, announces=False)
    story.publish(partition=0, keys=[None, "a", "a", "a", "a", "a", "c", "b", "a"])
    story.publish(partition=0, keys=["a", "a", "b"])
    story.teardown()


@pytest.mark.parametrize("mode", [SubscriptionMode.SHARED, SubscriptionMode.KEY_SHARED])
@pytest.mark.parametrize("named", [1, 3])
def test_what_a_dead_subscriber_had_announced_is_isolated_even_if_the_broker_ends_before_all_has_come_back(
    mode: SubscriptionMode, named: int
) -> None:
    story = type("Story", (Machine,), {"mode": mode, "in_portions": True})()
    story.begin(seed=0)
    story.join(window=8, announces=False)
    story.publish(partition=0, keys=["a", "b", "c", None, "a", "b"])
    for message in sorted(story.holds)[-named:]:
        assert story.subscription.started("w0", *message)
        story.named["w0"].add(message)
    story.die(random=Random(0), then_deliver=False)
    assert story.subscription._state.departed
    story.persist()
    story.crash()
    story.teardown()


def test_the_only_fresh_message_of_an_announcing_subscriber_is_isolated_even_if_the_broker_ends_at_once() -> None:
    story = type("Story", (Machine,), {"in_portions": True})()
    story.begin(seed=0)
    story.publish(partition=0, keys=[None] * 3)
    story.join(window=8, announces=False)
    story.leave(random=Random(0), then_deliver=True)
    story.join(window=5, announces=True)
    while len(story.holds) < 3:
        story.wait(seconds=0)
    story.publish(partition=0, keys=[None])
    assert sorted(story.model.attempts.values()) == [1, 2, 2, 2]
    story.die(random=Random(0), then_deliver=False)
    assert story.subscription._state.departed
    story.persist()
    story.crash()
    story.teardown()
