"""Key_shared on the client's side: each key in order, one message at a time.

When a message fails, the broker takes later ones of its key back. Those that are here already are dropped, neither
handled nor settled: they come again, behind the failed one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from qb.clients.protocol.message import Message


class KeyBarrier:
    """After the failure of `offset`: what follows it is dropped unless the broker knew of the failure."""

    __slots__ = ("number", "offset")

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self.number: int | None = None  # of the SETTLE that named it; None: not sent yet

    def stops(self, message: Message) -> bool:
        return message.offset > self.offset and (self.number is None or message.settled < self.number)


class KeySequencer:
    """The keys that are in hand, and those with a failure that the broker may not have known of."""

    def __init__(self, parking: bool) -> None:
        """`parking`: several messages may be in hand at once, so one whose key is in hand has to wait."""
        self._parking = parking
        self._in_hand: dict[str, deque[Message]] = {}  # what waits behind each key that is in hand
        self._bars: dict[tuple[int, str], list[KeyBarrier]] = {}
        self.freed: deque[Message] = deque()  # waited, and may be handled now; their keys count as in hand

    def admit(self, messages: list[Message]) -> tuple[list[Message], int]:
        """Return which of these, just read, are to be handled now, and how many were dropped."""
        if messages and self._bars:
            self._lift_bars(messages[0].settled)
        kept = [message for message in messages if not self._is_barred(message)] if self._bars else messages
        dropped = len(messages) - len(kept)
        return (self._park(kept) if self._parking else kept), dropped

    def _park(self, messages: list[Message]) -> list[Message]:
        ours: set[str] = set()
        now: list[Message] = []
        for message in messages:
            key = message.key
            if key is not None and key in self._in_hand and key not in ours:
                self._in_hand[key].append(message)
                continue
            if key is not None:
                ours.add(key)
                self._in_hand.setdefault(key, deque())
            now.append(message)
        return now

    def released(self, messages: Iterable[Message]) -> None:
        """These are out of hand: let the next ones of their keys go on."""
        for key in {message.key for message in messages} if self._parking else ():
            waiting = self._in_hand.get(key) if key is not None else None
            if waiting:
                self.freed.append(waiting.popleft())
            elif key is not None:
                self._in_hand.pop(key, None)

    def failed(self, message: Message) -> int:
        """Drop what follows a failed message, here and in deliveries to come; returns how many were here."""
        key = message.key
        if key is None:
            return 0
        bar = KeyBarrier(message.offset)
        self._bars.setdefault((message.partition, key), []).append(bar)
        waiting = self._in_hand.get(key)
        if not waiting:
            return 0
        kept = [each for each in waiting if each.partition != message.partition or not bar.stops(each)]
        self._in_hand[key] = deque(kept)
        return len(waiting) - len(kept)

    def is_follower(self, message: Message, failed: Message) -> bool:
        """Does the broker take `message` back when `failed` fails?"""
        same = message.key == failed.key is not None and message.partition == failed.partition
        return same and message.offset > failed.offset

    def sent(self, number: int) -> None:
        """The failures so far went out with this SETTLE."""
        for bars in self._bars.values():
            for bar in bars:
                bar.number = number if bar.number is None else bar.number

    def _is_barred(self, message: Message) -> bool:
        key = message.key
        bars = self._bars.get((message.partition, key), ()) if key is not None else ()
        return any(bar.stops(message) for bar in bars)

    def _lift_bars(self, settled: int) -> None:
        """Forget the failures of which the broker knew when it sent what is read now: later deliveries know too."""
        for key, bars in list(self._bars.items()):
            left = [bar for bar in bars if bar.number is None or bar.number > settled]
            if left:
                self._bars[key] = left
            else:
                del self._bars[key]
