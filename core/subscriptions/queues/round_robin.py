"""The round-robin order of subscribers, and how a backlog is distributed among them."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from qb.core.subscriptions.messages.joined_subscriber import JoinedSubscriber

BUSY = 500  # messages that keep a subscriber busy, whatever its window is: few handlers run for so many at a time
SHARE = 100  # messages for each subscriber: so many or more are distributed in one piece


def distribute(rooms: list[int], first: int, count: int) -> tuple[list[tuple[int, range]], int]:
    """Distribute `count` messages from `first` on, in turn, among subscribers that have so much room.

    A few messages go out one by one. Of a backlog each subscriber gets the same number in one piece, since messages
    that lie together are read, sent and acked together.
    Returns (index, run) in the order of distribution, and the index that is next in turn. The cost grows with the
    subscribers that fill up on the way, not with the messages.
    """
    distributed = []
    left = list(rooms)
    open_ = [index for index, room in enumerate(left) if room > 0]
    upcoming = 0
    while count and open_:
        k = len(open_)
        rounds = min(count // k, min(left[index] for index in open_))
        if not rounds:
            distributed += [(index, range(first + i, first + i + 1)) for i, index in enumerate(open_[:count])]
            upcoming = open_[count]
            break
        end = first + rounds * k
        if rounds < SHARE:
            distributed += [(index, range(first + i, end, k)) for i, index in enumerate(open_)]
        else:
            starts = range(first, end, rounds)
            distributed += [(index, range(start, start + rounds)) for index, start in zip(open_, starts, strict=True)]
        first, count = end, count - rounds * k
        for index in open_:
            left[index] -= rounds
        open_ = [index for index in open_ if left[index] > 0]
    return distributed, upcoming


class RoundRobin:
    """The subscribers that messages go to, in the order of their turn; the others are on standby."""

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit  # of subscribers that messages go to; None: all
        self._ring: list[JoinedSubscriber] = []  # the next in turn comes first
        self._standby: list[JoinedSubscriber] = []

    def __iter__(self) -> Iterator[JoinedSubscriber]:
        return iter(self._ring)

    def __len__(self) -> int:
        return len(self._ring)

    def join(self, subscriber: JoinedSubscriber) -> None:
        """Add a subscriber as the last in turn, or on standby."""
        full = self._limit is not None and len(self._ring) >= self._limit
        (self._standby if full else self._ring).append(subscriber)

    def leave(self, subscriber: JoinedSubscriber) -> None:
        """Remove a subscriber; the one that has been on standby longest takes its place."""
        if subscriber in self._standby:
            self._standby.remove(subscriber)
            return
        self._ring.remove(subscriber)
        if self._standby:
            self._ring.append(self._standby.pop(0))

    def next(self) -> JoinedSubscriber | None:
        """Return the next subscriber that has room, moving the turn on; None if none has."""
        for index, subscriber in enumerate(self._ring):
            if subscriber.room > 0:
                self.move_on(index + 1)
                return subscriber
        return None

    def room(self) -> int:
        """Return how many messages could go out now."""
        return sum(max(0, subscriber.room) for subscriber in self._ring)

    def with_room(self) -> int:
        """Return how many subscribers have room."""
        return sum(subscriber.room > 0 for subscriber in self._ring)

    def has_short_subscriber(self) -> bool:
        """Return whether a subscriber has so much room that it must not wait for one that has none."""
        return any(is_short(subscriber, subscriber.room) for subscriber in self._ring)

    def distribute(self, first: int, count: int) -> list[tuple[JoinedSubscriber, range]]:
        """Distribute fresh messages in turn, as far as there is room, moving the turn on."""
        members = self._ring
        distributed, upcoming = distribute([member.room for member in members], first, count)
        self.move_on(upcoming)
        return [(members[index], run) for index, run in distributed]

    def move_on(self, count: int) -> None:
        """Let so many subscribers have had their turn."""
        self._ring = self._ring[count:] + self._ring[:count]


def is_short(subscriber: JoinedSubscriber, room: int) -> bool:
    """Return whether less than half of its window is taken, or so few messages that it may be idle."""
    return room > 0 and subscriber.window - room < max(subscriber.window / 2, BUSY)


def until_busy(subscriber: JoinedSubscriber, room: int) -> int:
    """Return how many messages it has to be given until it is not short of them; 0 if it is not."""
    if not is_short(subscriber, room):
        return 0
    return min(room, ceil(max(subscriber.window / 2, BUSY)) - (subscriber.window - room))


class Turns:
    """The rooms of all subscribers while messages are distributed by key, and the next one in turn that has room."""

    def __init__(self, round_robin: RoundRobin, limit: int | None = None) -> None:
        self.rooms = {member: max(0, member.room) for member in round_robin}
        self.left = sum(self.rooms.values()) if limit is None else min(limit, sum(self.rooms.values()))
        self._round_robin = round_robin
        self.members = list(self.rooms)
        self._short = [member for member in self.members if is_short(member, self.rooms[member])]
        self._at = 0

    def next(self) -> JoinedSubscriber:
        """Return the next subscriber in turn that has room; there must be one."""
        members, rooms = self.members, self.rooms
        while True:
            member = members[self._at]
            self._at = (self._at + 1) % len(members)
            if rooms[member] > 0:
                return member

    @property
    def order(self) -> list[int]:
        """The indexes of the members in the order of their turn."""
        return [*range(self._at, len(self.members)), *range(self._at)]

    def go_on_behind(self, place: int) -> None:
        """Let it be the turn of the member behind this place."""
        self._at = (place + 1) % len(self.members)

    @property
    def has_short_subscriber(self) -> bool:
        """True while a subscriber has so much room that it must not wait for one that has none."""
        short = self._short
        while short and not is_short(short[-1], self.rooms[short[-1]]):
            short.pop()
        return bool(short)

    def room(self, member: JoinedSubscriber) -> int:
        """Return how many messages may go to this subscriber now."""
        return min(self.left, self.rooms[member])

    def take(self, member: JoinedSubscriber, count: int) -> None:
        """So many messages go to this subscriber."""
        self.rooms[member] -= count
        self.left -= count

    def end(self) -> None:
        """Let the turn go on from here."""
        self._round_robin.move_on(self._at)
