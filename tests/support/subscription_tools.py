"""A subscription with a clock that a test moves, for the tests of subscriptions."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec

from qb.core.subscriptions.push_decisions import DeadLetterDecision, PushDecision
from qb.core.subscriptions.snapshot import SubscriptionSnapshot
from qb.core.subscriptions.subscription import Subscription
from qb.core.subscriptions.subscription_options import SubscriptionOptions, parse_options

NO_JITTER = {"initial": 1.0, "factor": 2.0, "cap": 300.0, "jitter": 0.0}


def reopened(name: str, saved: SubscriptionSnapshot, now: float, random: Random) -> Subscription:
    """Return the subscription that a snapshot was taken of, with all that was open."""
    subscription = Subscription.restore(name, saved, random)
    for _ in subscription.reopen(saved, now):
        pass
    return subscription


class Bench:
    """A subscription, its log and its clock. Deliveries come out as {subscriber: [offsets]}."""

    def __init__(self, messages: int = 0, *joining: str, partitions: int = 1, keys: str = "", **options: Any) -> None:
        self.now = 0.0
        self.saves = True  # is what was acked made durable before the next delivery?
        self.options: SubscriptionOptions = parse_options({"backoff": NO_JITTER, **options})
        self.keys: list[str | None] | None = [None if key == "." else key for key in keys] if keys else None
        self.ends = dict.fromkeys(range(partitions), messages or len(keys))
        self.subscription = Subscription("jobs", self.options, dict.fromkeys(self.ends, 0), Random(1))
        self.attempts: dict[tuple[int, int], int] = {}  # the attempt of each message's last delivery
        self.suspects: set[tuple[int, int]] = set()  # whose last delivery said so
        self.order: list[tuple[str, int]] = []  # (subscriber, offset) in the order of delivery
        self.letters: list[DeadLetterDecision] = []
        for name in joining:
            self.subscription.join(name)

    def publish(self, count: int, partition: int = 0) -> None:
        """Append messages without keys."""
        self.ends[partition] += count

    def deliver(self, at_most: int = 10**9) -> dict[str, list[int]]:
        """Do what the broker does: offer what is wanted and decide, until nothing more comes. Return who got what."""
        got: dict[str, list[int]] = {}
        if self.saves and self.subscription.dirty:
            self.save()
        while True:
            offered = sum(self._offer(partition, at_most) for partition in self.ends)
            may_decide = self.subscription.may_decide(self.now)
            decisions = self.subscription.decide(self.now)
            assert may_decide or not decisions
            for decision in decisions:
                if isinstance(decision, PushDecision):
                    got.setdefault(decision.subscriber, []).extend(self._note(decision))
                else:
                    self.letters.append(decision)
            at_most -= offered
            wakeup = self.subscription.next_wakeup(self.now)
            if not offered and not decisions and (wakeup is None or wakeup > self.now):
                return got

    def save(self) -> bool:
        """Make a snapshot durable; returns whether that makes room."""
        self.subscription.snapshot()
        return self.subscription.saved(self.subscription.snapshots)

    def _offer(self, partition: int, at_most: int) -> int:
        wanted = self.subscription.wanted(partition)[:at_most]
        at_hand = range(wanted.start, min(wanted.stop, self.ends[partition]))
        if self.keys is not None:
            self.subscription.offer_keys(partition, at_hand.start, self.keys[at_hand.start : at_hand.stop])
        else:
            self.subscription.offer(partition, at_hand.start, len(at_hand))
        return len(at_hand)

    def _note(self, deliver: PushDecision) -> list[int]:
        offsets = [offset for run in deliver.runs for offset in run]
        for offset in offsets:
            self.attempts[deliver.partition, offset] = deliver.attempt
            (self.suspects.add if deliver.suspects else self.suspects.discard)((deliver.partition, offset))
            self.order.append((deliver.subscriber, offset))
        return offsets

    def wait(self, seconds: float) -> dict[str, list[int]]:
        """Let time pass, then deliver."""
        self.now += seconds
        return self.deliver()

    def ack(self, name: str, *offsets: int, partition: int = 0) -> int:
        return self.subscription.ack(name, partition, [range(o, o + 1) for o in offsets], self.now)

    def nack(self, name: str, offset: int, reason: str = "broken", delay: float | None = None) -> bool:
        return self.subscription.nack(name, 0, offset, self.now, reason, delay)

    def die(self, name: str) -> None:
        self.subscription.died(name, self.now)

    def explain(self, offset: int) -> str:
        return self.subscription.explain(0, offset, self.ends[0], self.now)

    def wakeup(self) -> float | None:
        return self.subscription.next_wakeup(self.now)

    def store_dead_letters(self) -> None:
        """What the broker does with dead letters when all is well."""
        for letter in self.letters:
            self.subscription.dead_lettered(letter.partition, letter.offset, self.now)

    def restart(self, *joining: str) -> None:
        """Kill the broker just after a snapshot, and start it again."""
        saved = msgspec.json.encode(self.subscription.snapshot())
        again = msgspec.json.decode(saved, type=SubscriptionSnapshot)
        self.subscription = reopened("jobs", again, self.now, Random(1))
        for name in joining:
            self.subscription.join(name)
