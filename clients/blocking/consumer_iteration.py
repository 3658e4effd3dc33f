"""`for` over a consumer: a generator, which is quicker than an object."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from qb.clients.blocking.link import Link
from qb.clients.blocking.waiting import now
from qb.clients.consuming.assigned_partitions import PartitionProgress
from qb.clients.consuming.consumer_state import ConsumerState
from qb.clients.protocol.message import Message


class ConsumerIteration:
    """The messages of a consumer, one at a time."""

    _link: Link
    _state: ConsumerState
    _in_hand: PartitionProgress | None

    def __iter__(self) -> Iterator[Message]:
        """Yield messages, waiting for them, until stop().

        Raises BrokerUnavailable if there is no broker at first, UnknownTopic, BadName.
        """
        state, clock = self._state, now
        while (held := self._next(inf)) is not None:
            self._in_hand = held
            for message in held.messages:
                held.handed = message.offset + 1
                yield message
                if held is not self._in_hand:
                    break  # the program has polled meanwhile
                held.handled = held.handed
                if held.stopped or clock() >= state.sure_until:
                    break

    def _next(self, deadline: float) -> PartitionProgress | None:
        """Return the next partition with messages."""
        raise NotImplementedError
