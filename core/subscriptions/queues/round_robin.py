"""Whose turn it is, and how a backlog is dealt out."""

from __future__ import annotations

from collections.abc import Iterator

from qb.core.subscriptions.leases import JoinedSubscriber

SHARE = 100  # messages for each hand: so many or more are dealt as shares in one piece


def deal(rooms: list[int], first: int, count: int) -> tuple[list[tuple[int, range]], int]:
    """Deal `count` messages from `first` on to hands with so much room, in turn.

    A few go out one by one. From a backlog everybody gets as many as one by one, but in one piece: messages that lie
    together are read, sent and acked together.
    Returns (hand, run) in the order of dealing, and whose turn it is next. It costs as much as there are hands that
    fill up on the way, not as much as there are messages.
    """
    dealt = []
    left = list(rooms)
    hands = [hand for hand, room in enumerate(left) if room > 0]
    upcoming = 0
    while count and hands:
        k = len(hands)
        rounds = min(count // k, min(left[hand] for hand in hands))
        if not rounds:
            dealt += [(hand, range(first + i, first + i + 1)) for i, hand in enumerate(hands[:count])]
            upcoming = hands[count]
            break
        end = first + rounds * k
        if rounds < SHARE:
            dealt += [(hand, range(first + i, end, k)) for i, hand in enumerate(hands)]
        else:
            starts = range(first, end, rounds)
            dealt += [(hand, range(start, start + rounds)) for hand, start in zip(hands, starts, strict=True)]
        first, count = end, count - rounds * k
        for hand in hands:
            left[hand] -= rounds
        hands = [hand for hand in hands if left[hand] > 0]
    return dealt, upcoming


class RoundRobin:
    """The subscribers that messages go to, in the order of their turn; the rest stand by."""

    def __init__(self, places: int | None = None) -> None:
        self._places = places  # None: everybody
        self._ring: list[JoinedSubscriber] = []  # whose turn it is comes first
        self._standby: list[JoinedSubscriber] = []

    def __iter__(self) -> Iterator[JoinedSubscriber]:
        return iter(self._ring)

    def __len__(self) -> int:
        return len(self._ring)

    def join(self, subscriber: JoinedSubscriber) -> None:
        """Take the last place in the turn, or stand by."""
        full = self._places is not None and len(self._ring) >= self._places
        (self._standby if full else self._ring).append(subscriber)

    def leave(self, subscriber: JoinedSubscriber) -> None:
        """Go; whoever has stood by the longest takes the place that is free."""
        if subscriber in self._standby:
            self._standby.remove(subscriber)
            return
        self._ring.remove(subscriber)
        if self._standby:
            self._ring.append(self._standby.pop(0))

    def next(self) -> JoinedSubscriber | None:
        """Return who is next and has room, moving the turn on; None if nobody has."""
        for index, subscriber in enumerate(self._ring):
            if subscriber.room > 0:
                self._move_on(index + 1)
                return subscriber
        return None

    def room(self) -> int:
        """How many messages could go out now."""
        return sum(max(0, subscriber.room) for subscriber in self._ring)

    def deal(self, first: int, count: int) -> list[tuple[JoinedSubscriber, range]]:
        """Deal fresh messages out in turn, as far as there is room, moving the turn on."""
        members = self._ring
        dealt, upcoming = deal([member.room for member in members], first, count)
        self._move_on(upcoming)
        return [(members[hand], run) for hand, run in dealt]

    def _move_on(self, places: int) -> None:
        self._ring = self._ring[places:] + self._ring[:places]
