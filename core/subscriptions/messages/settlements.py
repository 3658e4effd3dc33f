"""How messages were settled, for explain(): the newest notes of each partition, and of all subscriptions together."""

from __future__ import annotations

from collections import OrderedDict
from itertools import count
from typing import Protocol

import msgspec

from qb.core.wire.columns import Offsets, np

MOST = 100_000  # notes of all subscriptions together: about 40 MB
MOST_OF_ONE = 1_000  # notes of a partition of a subscription
IN_A_NOTE = 50  # offsets that lie apart take as much memory as one more note


class Settlement(msgspec.Struct, frozen=True, gc=False):
    """How some messages were settled. It is part of no cycle, so the collector need not know it."""

    number: int
    offsets: range | bytes  # a run, or packed as array("Q")
    when: float
    how: str

    @property
    def cost(self) -> int:
        """How many notes it counts as."""
        return 1 if isinstance(self.offsets, range) else 1 + len(self.offsets) // (8 * IN_A_NOTE)

    def is_about(self, offset: int) -> bool:
        """Return whether this message is one of them."""
        return offset in (self.offsets if isinstance(self.offsets, range) else memoryview(self.offsets).cast("Q"))


Settlements = list[Settlement] | tuple[()] | None  # the oldest first; (): all are forgotten; None: there were none


class Noted(Protocol):
    """A partition of a subscription, which keeps its notes here."""

    settlements: Settlements


class SettlementNotes:
    """All notes of a broker; beyond the limit the oldest are forgotten first."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._order: OrderedDict[int, Noted] = OrderedDict()  # whose note it is, by the number of the note
        self._number = count()
        self._forgotten = 0.0  # when the newest one of those was made that were forgotten for others
        self.cost = 0

    def __len__(self) -> int:
        return len(self._order)

    def note(self, cursor: Noted, offsets: range | Offsets, when: float, how: str) -> None:
        """Remember how some messages were settled."""
        packed = offsets if isinstance(offsets, range) else offsets.astype(np.uint64).tobytes()
        made = Settlement(next(self._number), packed, when, how)
        if not cursor.settlements:
            cursor.settlements = [made]
        else:
            assert isinstance(cursor.settlements, list)
            cursor.settlements.append(made)
            if len(cursor.settlements) > MOST_OF_ONE:
                self._forget_first(cursor)
        self._order[made.number] = cursor
        self.cost += made.cost
        while self.cost > self._most:
            self._forgotten = self._forget_first(next(iter(self._order.values()))).when

    def _forget_first(self, cursor: Noted) -> Settlement:
        assert isinstance(cursor.settlements, list)
        first = cursor.settlements.pop(0)
        del self._order[first.number]
        self.cost -= first.cost
        if not cursor.settlements:
            cursor.settlements = ()
        return first

    def forget(self, cursor: Noted) -> None:
        """The partition begins anew, or its subscription is removed."""
        for each in cursor.settlements or ():
            del self._order[each.number]
            self.cost -= each.cost
        cursor.settlements = None

    def find(self, cursor: Noted, offset: int) -> Settlement | None:
        """Return how a message was settled, if that is still remembered."""
        return next((each for each in reversed(cursor.settlements or ()) if each.is_about(offset)), None)

    def since(self, cursor: Noted) -> float | None:
        """Return when the oldest settlement was made that is remembered, at least; None if there was none."""
        if cursor.settlements:
            return cursor.settlements[0].when
        return self._forgotten if cursor.settlements == () else None
