"""Anything may happen to a subscription in any order, and every promise of docs/SUBSCRIPTIONS.md still holds.

The model is as plain as can be: a set of settled messages, a dictionary of who holds what until when, and one number of
attempts for each message. A crash goes back to what was durable: a snapshot, and a copy of the model made with it.
"""

from __future__ import annotations

import copy
from collections import Counter
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from core.subscriptions.decisions import DeadLetter, Deliver
from core.subscriptions.options import Backoff, Mode, Options
from core.subscriptions.snapshot import Snapshot
from core.subscriptions.subscription import Subscription

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
        self.alone: set[Message] = set()

    def forget(self, message: Message) -> None:
        """A seek has been here."""
        self.settled.discard(message)
        self.alone.discard(message)
        del self.attempts[message]
        del self.failures[message]


class Machine(RuleBasedStateMachine):
    """One subscription with two partitions, driven by whatever hypothesis thinks of."""

    mode = Mode.SHARED

    @initialize(seed=st.integers(0, 2**32))
    def begin(self, seed: int) -> None:
        self.now = 1000.0
        self.random = Random(seed)
        self.options = Options(
            mode=self.mode,
            ack_deadline=DEADLINE,
            max_in_flight=8,
            max_deliveries=MAX_DELIVERIES,
            backoff=Backoff(initial=1, factor=2, cap=8),
        )
        self.subscription = Subscription("s", self.options, dict.fromkeys(PARTITIONS, 0), self.random)
        self.keys: dict[int, list[str | None]] = {partition: [] for partition in PARTITIONS}
        self.model = Model()
        self.windows: dict[str, int] = {}  # by subscriber, in the order of joining
        self.announces: set[str] = set()
        self.holds: dict[Message, tuple[str, float]] = {}  # holder, deadline
        self.named: dict[str, set[Message]] = {}
        self.letters: list[DeadLetter] = []
        self.given: Counter[str] = Counter()  # since the windows were last disturbed
        self.joined = 0
        self.paused = False
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
        return self.windows[name] - len(self.held_by(name))

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

    def fail(self, message: Message, failures: int = 1) -> None:
        """The lease has ended badly; later messages of the same key are taken back."""
        self.drop(message)
        self.model.failures[message] += failures
        if self.mode is Mode.KEY_SHARED and self.key(message) is not None:
            for other in list(self.holds):
                if other[0] == message[0] and other[1] > message[1] and self.key(other) == self.key(message):
                    self.drop(other)

    # What happens

    @rule(partition=partitions, keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=9))
    def publish(self, partition: int, keys: list[str | None]) -> None:
        self.keys[partition] += keys
        self.deliver()

    @precondition(lambda self: len(self.windows) < (1 if self.mode is Mode.EXCLUSIVE else 4))
    @rule(window=st.integers(1, 10), announces=st.booleans())
    def join(self, window: int, announces: bool) -> None:
        name = f"w{self.joined}"
        self.joined += 1
        self.subscription.join(name, window, announces)
        self.windows[name] = min(window, 8)
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
        held, named = self.held_by(name), self.named[name]
        in_hand = held
        if named:
            in_hand = sorted(named)
        elif name in self.announces:
            in_hand = [message for message in held if self.model.attempts[message] == 1]
        self.subscription.died(name, self.now)
        self.gone(name)
        if len(in_hand) == 1:
            self.model.failures[in_hand[0]] += 2  # this death, and perhaps the one before
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
            self.drop(message)
            self.settle(message)
        assert number >= len(acked)
        if number > len(acked):  # some came late, after their leases had ended
            late = [message for message in self.owed() if message[0] == partition and message[1] in run]
            late = [message for message in late if self.is_settled(message)]
            assert number == len(acked) + len(late)
            for message in late:
                assert message not in self.holds
                self.settle(message)

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
                self.drop(message)
                self.settle(message)

    @precondition(lambda self: self.holds)
    @rule(random=chance, delay=st.sampled_from([None, 0.0, 5.0]))
    def nack(self, random: Random, delay: float | None) -> None:
        message, (holder, _) = random.choice(sorted(self.holds.items()))
        assert self.subscription.nack(holder, *message, self.now, "no luck", delay)
        self.fail(message)
        self.model.alone.discard(message)

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
            assert self.subscription.extend_all(holder, seconds, self.now) == len(extended)
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

    @rule()
    def persist(self) -> None:
        self.durable = json.encode(self.subscription.snapshot())
        self.durable_model = copy.deepcopy(self.model)
        assert not self.subscription.dirty

    def crash(self) -> None:
        saved = json.decode(self.durable, type=Snapshot)
        self.subscription = Subscription.restore("s", saved, self.now, self.random)
        self.model = copy.deepcopy(self.durable_model)
        self.holds.clear()
        self.windows.clear()
        self.named.clear()
        self.given.clear()
        self.letters.clear()
        self.paused = self.subscription.paused

    @precondition(lambda self: self.letters)
    @rule(stored=st.booleans())
    def carry_out_a_dead_letter(self, stored: bool) -> None:
        letter = self.letters.pop(0)
        if stored:
            self.subscription.dead_lettered(letter.partition, letter.offset, self.now)
            self.settle((letter.partition, letter.offset))
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
            if self.mode is Mode.KEY_SHARED:
                self.subscription.offer_keys(
                    partition, at_hand.start, self.keys[partition][at_hand.start : at_hand.stop]
                )
            elif at_hand:
                self.subscription.offer(partition, at_hand.start, len(at_hand))
        disturbed = not all(self.room(name) > 0 for name in self.windows)
        decisions = self.subscription.decide(self.now)
        for decision in decisions:
            if isinstance(decision, Deliver):
                self.receive(decision)
            else:
                self.receive_dead_letter(decision)
        if any(isinstance(decision, DeadLetter) or decision.attempt > 1 for decision in decisions):
            self.persist()
        wakeup = self.subscription.next_wakeup(self.now)
        assert wakeup is None or wakeup > self.now, "would be woken again and again for nothing"
        self.check_fairness(disturbed)
        self.check_that_nothing_is_forgotten()

    def receive(self, deliver: Deliver) -> None:
        assert not self.paused
        assert deliver.subscriber in self.windows
        if self.mode is Mode.FAILOVER:
            assert deliver.subscriber == next(iter(self.windows)), "only the first one is active"
        for run in deliver.runs:
            for offset in run:
                self.receive_one(deliver, (deliver.partition, offset))

    def receive_one(self, deliver: Deliver, message: Message) -> None:
        name = deliver.subscriber
        assert message in self.owed(), "delivered though it was settled, skipped or never published"
        assert message not in self.holds, "under two leases at once"
        assert self.room(name) > 0, "more than the window"
        assert deliver.attempt == self.model.attempts[message] + 1
        assert not self.model.alone.intersection(self.held_by(name)), "not alone any more"
        if message in self.model.alone:
            assert not self.held_by(name), "not offered alone"
        if self.mode is Mode.KEY_SHARED and (key := self.key(message)) is not None:
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

    def receive_dead_letter(self, letter: DeadLetter) -> None:
        message = (letter.partition, letter.offset)
        assert message in self.owed()
        assert message not in self.holds
        assert self.model.failures[message] >= MAX_DELIVERIES, "condemned for less than max_deliveries failures"
        assert letter.attempts == self.model.attempts[message]
        assert letter not in self.letters
        self.letters.append(letter)

    def check_fairness(self, disturbed: bool) -> None:
        open_windows = all(self.room(name) > 0 for name in self.windows)
        if disturbed or not open_windows or self.model.alone or self.mode is not Mode.SHARED:
            self.given.clear()
        elif self.windows:
            given = [self.given[name] for name in self.windows]
            assert max(given) - min(given) <= 1, "not in turn"

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
        assert description.lag == len(self.owed())

    def teardown(self) -> None:
        """However it went, one healthy subscriber gets to the end of everything: nothing was lost."""
        if not hasattr(self, "subscription"):
            return
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
            if not self.owed():
                break
            self.now = max(self.now, self.subscription.next_wakeup(self.now) or 0)
        assert not self.owed(), "lost"
        assert all(not partition.open for partition in self.subscription.snapshot().partitions)


def machine(mode: Mode) -> Any:
    test = type(f"{mode.name}Machine", (Machine,), {"mode": mode}).TestCase
    phases = set(Phase) - {Phase.explain}  # explaining is slow; the shortest failing story says enough
    test.settings = settings(
        max_examples=80,
        stateful_step_count=50,
        deadline=None,
        phases=phases,
        suppress_health_check=[HealthCheck.too_slow],
    )
    return pytest.mark.timeout(300)(test)  # when it fails, shrinking takes its time


TestShared = machine(Mode.SHARED)
TestKeyShared = machine(Mode.KEY_SHARED)
TestExclusive = machine(Mode.EXCLUSIVE)
TestFailover = machine(Mode.FAILOVER)
