"""Ready messages in lanes, one lane a key, each lane to one subscriber in order."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import count

from qb.core.subscriptions.leases import JoinedSubscriber
from qb.core.subscriptions.message_records import MessagePlace, MessageRecord
from qb.core.subscriptions.queues.round_robin import RoundRobin
from qb.core.subscriptions.queues.shared_queue import ReadyHeap


class KeyLane:
    """The unsettled messages of one key. A message without a key is a lane of its own, never bound."""

    __slots__ = ("_ready", "held", "key", "open", "owner", "scheduled")

    def __init__(self, key: str | None) -> None:
        self.key = key
        self.owner: JoinedSubscriber | None = None
        self.open: dict[tuple[int, int], MessageRecord] = {}  # by (partition, offset), as are the others
        self.held: set[tuple[int, int]] = set()  # neither ready nor in flight: later ones wait for these
        self._ready = ReadyHeap()
        self.scheduled = False  # is it in the agenda, or aside?

    def push(self, record: MessageRecord) -> None:
        """Add a ready message, at the place of its offset."""
        self._ready.push(record)

    def head(self) -> MessageRecord | None:
        """Return the message that may go out next, and keep it; None if none may."""
        first = self._ready.first()
        return None if first is None or self.blocker(first) else first

    def blocker(self, record: MessageRecord) -> MessageRecord | None:
        """Return the earlier message of its partition that holds this one back."""
        if not self.held:
            return None
        before = [(p, o) for p, o in self.held if p == record.partition and o < record.offset]
        return self.open[min(before)] if before else None

    def before(self, record: MessageRecord) -> MessageRecord | None:
        """Return the message behind which this ready one waits; None if it is the head."""
        first = self._ready.first()
        return self.blocker(record) if first is record else first

    def pop(self) -> MessageRecord:
        """Take out what head() has returned."""
        return self._ready.pop()


Entry = tuple[int, int, KeyLane]  # the offset of its head, a tie-breaker, a lane


class KeyOrderedQueue:
    """The queue of key_shared.

    Lanes that can move stand in the agenda, by the offset of their heads; those whose owner has no room stand aside
    until it has, so that they are not looked at again and again.
    """

    def __init__(self) -> None:
        self._lanes: dict[str | tuple[int, int], KeyLane] = {}
        self._agenda: list[Entry] = []
        self._aside: dict[JoinedSubscriber, list[Entry]] = {}
        self._number = count()

    def admit(self, record: MessageRecord) -> None:
        """Put a message into its lane; before anything else is done with it."""
        lane = self._lanes.setdefault(_lane_name(record), KeyLane(record.key))
        lane.open[record.partition, record.offset] = record

    def lane(self, record: MessageRecord) -> KeyLane:
        """Return the lane of an admitted message."""
        return self._lanes[_lane_name(record)]

    def push(self, record: MessageRecord) -> None:
        lane = self.lane(record)
        lane.held.discard((record.partition, record.offset))
        lane.push(record)
        self._schedule(lane)

    def hold(self, record: MessageRecord) -> None:
        self.lane(record).held.add((record.partition, record.offset))

    def settled(self, record: MessageRecord) -> None:
        lane, place = self.lane(record), (record.partition, record.offset)
        lane.held.discard(place)
        del lane.open[place]
        if lane.open:
            self._schedule(lane)
        else:
            del self._lanes[_lane_name(record)]

    def left(self, subscriber: JoinedSubscriber) -> None:
        for lane in self._lanes.values():
            if lane.owner is subscriber:
                lane.owner = None
        for entry in self._aside.pop(subscriber, ()):
            heappush(self._agenda, entry)

    def owner(self, record: MessageRecord) -> JoinedSubscriber | None:
        return self.lane(record).owner

    def is_first(self, record: MessageRecord) -> bool:
        return not any(
            partition == record.partition and offset < record.offset and other.place is not MessagePlace.LEASED
            for (partition, offset), other in self.lane(record).open.items()
        )

    def bind(self, record: MessageRecord, subscriber: JoinedSubscriber) -> None:
        lane = self.lane(record)
        lane.held.discard((record.partition, record.offset))
        if lane.key is not None:
            lane.owner = subscriber
        self._schedule(lane)

    def followers(self, record: MessageRecord) -> list[MessageRecord]:
        return [
            other
            for (partition, offset), other in self.lane(record).open.items()
            if partition == record.partition and offset > record.offset and other.place is MessagePlace.LEASED
        ]

    def assign(self, turn: RoundRobin) -> Iterator[tuple[JoinedSubscriber, MessageRecord]]:
        for member in turn:
            self._bring_back(member)
        while lane := self._next_lane():
            subscriber = lane.owner or turn.next()
            if subscriber is None:
                self._schedule(lane)
                return
            if subscriber.room <= 0:
                self._schedule(lane, aside=True)
                continue
            yield subscriber, self._take(lane, subscriber)

    def may_have_work(self) -> bool:
        return bool(self._agenda)

    def _take(self, lane: KeyLane, subscriber: JoinedSubscriber) -> MessageRecord:
        """Take the head out of a lane for this subscriber, and put the lane back."""
        head = lane.pop()
        if lane.key is not None:
            lane.owner = subscriber
        self._schedule(lane)
        return head

    def _bring_back(self, subscriber: JoinedSubscriber) -> None:
        """Let as many lanes move again as the subscriber has room for; those that cannot move any more take no room."""
        aside, room = self._aside.get(subscriber, []), subscriber.room
        while aside and room > 0:
            entry = heappop(aside)
            lane = entry[2]
            if lane.head():
                heappush(self._agenda, entry)
                room -= 1
            else:
                lane.scheduled = False

    def _next_lane(self) -> KeyLane | None:
        """Take the first lane that can move out of the agenda."""
        while self._agenda:
            lane = heappop(self._agenda)[2]
            lane.scheduled = False
            if lane.head():
                return lane
        return None

    def _schedule(self, lane: KeyLane, aside: bool = False) -> None:
        """Put a lane that can move into the agenda, or aside for its owner."""
        if lane.scheduled or not (head := lane.head()):
            return
        lane.scheduled = True
        row = self._aside.setdefault(lane.owner, []) if aside and lane.owner else self._agenda
        heappush(row, (head.offset, next(self._number), lane))


def _lane_name(record: MessageRecord) -> str | tuple[int, int]:
    return (record.partition, record.offset) if record.key is None else record.key
