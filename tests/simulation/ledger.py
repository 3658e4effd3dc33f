"""What clients were promised, and the check that it was kept."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.simulation.world import World


class BrokenPromise(AssertionError):
    """The broker has done what it must not."""


class Where(NamedTuple):
    """A place in a log."""

    topic: str
    partition: int
    offset: int


class Stored(NamedTuple):
    """A message as a reader finds it."""

    where: Where
    body: str


Logs = dict[tuple[str, int], list[Stored]]  # by topic and partition


@dataclass
class Transaction:
    """Messages that must appear together."""

    bodies: list[str]
    committed: bool = False


@dataclass
class Ledger:
    """Every message has a body of its own, so that it differs from all others."""

    world: World
    attempted: set[str] = field(default_factory=set)
    acked: dict[str, Where] = field(default_factory=dict)
    transactions: dict[str, Transaction] = field(default_factory=dict)
    handled: dict[str, float] = field(default_factory=dict)  # when a handler last returned for it
    deliveries: Counter[str] = field(default_factory=Counter)
    committed: dict[tuple[str, int], int] = field(default_factory=dict)  # offsets whose commit was answered
    commits_tried: dict[tuple[str, int], int] = field(default_factory=dict)
    operations: int = 0

    def attempt(self, body: str) -> bytes:
        """A client is about to publish this."""
        self.operations += 1
        self.attempted.add(body)
        return body.encode()

    def ack(self, body: str, where: Where) -> None:
        """The broker has said that it is stored there."""
        self.acked[body] = where
        self.world.note(f"acked {body.rstrip()} at {where.topic}/{where.partition}:{where.offset}")

    def delivered(self, body: str) -> None:
        """A subscriber was given it. One that was acked comes again only after a disturbance near the ack."""
        self.deliveries[body] += 1
        self.operations += 1
        if body not in self.attempted:
            raise BrokenPromise(f"{body!r} was delivered and never published")
        done = self.handled.get(body)
        if done is not None and not self.world.was_disturbed(done - 1.0):
            raise BrokenPromise(
                f"{body} was delivered again though it was acked at {done:.4f} and nothing happened since"
            )

    def try_commit(self, where: tuple[str, int], offset: int) -> None:
        """A group is about to commit this offset."""
        self.operations += 1
        self.commits_tried[where] = max(offset, self.commits_tried.get(where, 0))

    def commit(self, where: tuple[str, int], offset: int) -> None:
        """A group's commit of its offset was answered."""
        self.committed[where] = max(offset, self.committed.get(where, 0))

    def observe(self, before: Logs, after: Logs) -> None:
        """A reader has read some logs and then the others: a transaction seen in the first is whole with the second."""
        first = _bodies(before)
        both = first | _bodies(after)
        for name, transaction in self.transactions.items():
            if first.intersection(transaction.bodies) and not both.issuperset(transaction.bodies):
                raise BrokenPromise(
                    f"of transaction {name} only {sorted(both.intersection(transaction.bodies))} was seen"
                )

    def is_settled(self, logs: Logs, dead_letters: Logs, handled: str, consumed: str) -> bool:
        """Is all of one topic handled or a dead letter, and all of the other committed?"""
        done = self.handled.keys() | _bodies(dead_letters)
        for (topic, partition), stored in logs.items():
            if topic == handled and not done >= {each.body for each in stored}:
                return False
            end = stored[-1].where.offset + 1 if stored else 0
            if topic == consumed and self.committed.get((topic, partition), 0) < end:
                return False
        return True

    # Checks

    def check_logs(self, logs: Logs) -> None:
        """Nothing acked is lost or moved, nothing is stored twice, nothing appears from nowhere, offsets are dense."""
        found: dict[str, list[Where]] = defaultdict(list)
        for (topic, partition), stored in logs.items():
            offsets = [each.where.offset for each in stored]
            if offsets != list(range(offsets[0], offsets[0] + len(offsets)) if offsets else []):
                raise BrokenPromise(f"the offsets of {topic}/{partition} are not dense: {offsets}")
            for each in stored:
                found[each.body].append(each.where)
        for body, positions in found.items():
            if body not in self.attempted:
                raise BrokenPromise(f"{body!r} is stored at {positions} and was never published")
            if len(positions) > 1:
                raise BrokenPromise(f"{body} is stored {len(positions)} times: {positions}")
        for body, where in self.acked.items():
            if found.get(body) != [where]:
                raise BrokenPromise(f"{body} was acked at {where} and is at {found.get(body, 'no place')}")
        self._check_transactions(found)

    def _check_transactions(self, found: Mapping[str, object]) -> None:
        for name, transaction in self.transactions.items():
            there = [body for body in transaction.bodies if body in found]
            if there and len(there) != len(transaction.bodies):
                raise BrokenPromise(f"of transaction {name} only {there} is there, not {transaction.bodies}")
            if transaction.committed and not there:
                raise BrokenPromise(f"transaction {name} was committed and is not there")

    def check_deliveries(self, topic: str, logs: Logs, dead_letters: Logs) -> None:
        """Everything stored in the topic was handled by the subscription, or is a dead letter."""
        dead = _bodies(dead_letters)
        if strangers := dead - self.attempted:
            raise BrokenPromise(f"dead letters that were never published: {strangers}")
        for (name, _), stored in logs.items():
            for each in stored if name == topic else ():
                if each.body not in self.handled and each.body not in dead:
                    raise BrokenPromise(f"{each.body} at {each.where} was never handled, and is no dead letter")

    def check_offsets(self, stored: Mapping[tuple[str, int], int]) -> None:
        """A group's committed offset is not behind what was answered, nor ahead of what it asked for."""
        for where, offset in self.committed.items():
            if stored.get(where, -1) < offset:
                raise BrokenPromise(f"offset {offset} of {where} was committed; the broker says {stored.get(where)}")
        for where, offset in stored.items():
            if offset > self.commits_tried.get(where, 0):
                raise BrokenPromise(
                    f"the broker says that {offset} of {where} was committed, which no client asked for"
                )


def _bodies(logs: Logs) -> set[str]:
    return {each.body for stored in logs.values() for each in stored}
