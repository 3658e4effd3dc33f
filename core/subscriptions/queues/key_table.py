"""The keys of messages in flight, each under a number: which subscriber has it, and how many of its messages.

The columns are numpy's, so that a slice of messages is looked up, counted and settled without a step of Python for
each. A number is the key's while a message of it is unsettled; later it may be another key's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat

from qb.core.subscriptions.messages.joined_subscriber import JoinedSubscriber
from qb.core.wire.columns import FEW, Numbers, distinct, np

NO_KEY = 0  # the number of all messages without a key: no subscriber has it, and it is not counted
NO_OWNER = -1
NOWHERE = -1  # the key has no queue
MAYBE = -2  # its queue knows
_LEAST = 16  # numbers
_ONE = np.int32(1)  # a plain 1 makes add.at() thirty times as slow


class KeyTable:
    """The numbers of keys, and what is known of each."""

    def __init__(self) -> None:
        self._numbers: dict[str | None, int] = {None: NO_KEY}
        self._names: list[str | None] = [None]
        self._free: list[int] = []
        self._members: list[JoinedSubscriber | None] = []  # by number; None: it is free
        self._member_numbers: dict[JoinedSubscriber, int] = {}
        self.in_flight = np.zeros(1, np.int32)  # by key: messages in flight that have no record
        self.owner = np.full(1, NO_OWNER, np.int32)  # the number of the subscriber that has it
        self.waits_in = np.full(1, NOWHERE, np.int32)  # the partition in which messages wait behind others
        self._look()

    # Keys

    def number(self, key: str | None) -> int:
        """Return the number of a key."""
        found = self._numbers.get(key)
        return int(self.number_all((key,))[0]) if found is None else found

    def number_all(self, keys: Sequence[str | None]) -> Numbers:
        """Return the number of each key. They hold until the next call, and for those that are in flight or wait."""
        numbers = self._numbers
        try:
            return np.fromiter(map(numbers.__getitem__, keys), np.int32, len(keys))
        except KeyError:
            self._make_room(len(keys))
            free, names = self._free, self._names
            for key in dict.fromkeys(keys):
                if key not in numbers:
                    number = numbers[key] = free.pop()
                    names[number] = key
            return np.fromiter(map(numbers.__getitem__, keys), np.int32, len(keys))

    def name(self, number: int) -> str | None:
        """Return the key that has this number."""
        return self._names[number]

    def names(self, numbers: list[int]) -> list[str | None]:
        """Return the keys that have these numbers."""
        return list(map(self._names.__getitem__, numbers))

    def _make_room(self, count: int) -> None:
        """Have so many numbers free: those of keys that have nothing unsettled, and new ones if those are few."""
        if len(self._free) >= count:
            return
        names = self._names
        used = (self.in_flight > 0) | (self.waits_in != NOWHERE)
        used[NO_KEY] = True
        self._free = np.flatnonzero(~used).tolist()
        for number in self._free:
            if (name := names[number]) is not None:
                del self._numbers[name]
                names[number] = None
        size = max(_LEAST, len(names))
        while len(self._free) + size - len(names) < max(2 * count, size // 2):
            size *= 2
        self._grow(size)

    def _grow(self, size: int) -> None:
        before = len(self._names)
        self._free += range(before, size)
        self._names += repeat(None, size - before)
        self.in_flight = np.concatenate([self.in_flight, np.zeros(size - before, np.int32)])
        self.owner = np.concatenate([self.owner, np.full(size - before, NO_OWNER, np.int32)])
        self.waits_in = np.concatenate([self.waits_in, np.full(size - before, NOWHERE, np.int32)])
        self._look()

    def _look(self) -> None:
        """Look at columns as at lists: a single number costs a third of what it costs in numpy."""
        self.counts = self.in_flight.data
        self.owners = self.owner.data

    # Subscribers

    def member_number(self, member: JoinedSubscriber) -> int:
        """Return the number of a subscriber."""
        found = self._member_numbers.get(member)
        if found is None:
            if None not in self._members:
                self._members.append(None)
            found = self._member_numbers[member] = self._members.index(None)
            self._members[found] = member
        return found

    def owner_of(self, number: int) -> JoinedSubscriber | None:
        """Return the subscriber that has a key."""
        found = self.owners[number]
        return None if found == NO_OWNER else self._members[found]

    def set_owner(self, number: int, member: JoinedSubscriber | None) -> None:
        """Let a subscriber have a key, or none."""
        if number != NO_KEY:
            self.owners[number] = NO_OWNER if member is None else self.member_number(member)

    def left(self, member: JoinedSubscriber) -> int:
        """A subscriber has left: no subscriber has its keys. Returns its number, which may be another's from now on."""
        number = self.member_number(member)
        del self._member_numbers[member]
        self.owner[self.owner == number] = NO_OWNER
        self._members[number] = None
        return number

    # Messages

    def take(self, numbers: Numbers, member: JoinedSubscriber) -> None:
        """Messages of these keys are in flight to a subscriber, which has the keys."""
        np.add.at(self.in_flight, numbers, _ONE)
        self.owner[numbers] = self.member_number(member)
        self.in_flight[NO_KEY], self.owner[NO_KEY] = 0, NO_OWNER

    def take_some(self, number: int, count: int, member: JoinedSubscriber) -> None:
        """The same for messages of one key."""
        if number != NO_KEY:
            self.counts[number] += count
            self.owners[number] = self.member_number(member)

    def give_back(self, number: int) -> None:
        """A message of this key has a record now: it is not counted here any more."""
        if number != NO_KEY:
            self.counts[number] -= 1

    def settle(self, numbers: Numbers) -> Iterable[int]:
        """Messages of these keys are settled, and keys without more are free. Returns those with a key queue."""
        if len(numbers) < FEW:
            return {number for number in numbers.tolist() if self._settle_one(number)}
        np.subtract.at(self.in_flight, numbers, _ONE)
        self.in_flight[NO_KEY] = 0
        waits = self.waits_in[numbers] != NOWHERE
        self.owner[numbers[(self.in_flight[numbers] == 0) & ~waits]] = NO_OWNER
        return distinct(numbers[waits]) if waits.any() else ()

    def _settle_one(self, number: int) -> bool:
        """Return whether the key has a queue."""
        if number == NO_KEY:
            return False
        self.counts[number] -= 1
        if self.waits_in[number] != NOWHERE:
            return True
        if not self.counts[number]:
            self.owners[number] = NO_OWNER
        return False
