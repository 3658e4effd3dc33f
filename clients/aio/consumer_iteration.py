"""`async for` over a consumer: an object that can go on after a cancellation, which a generator could not."""

from __future__ import annotations

from math import inf

from qb.clients.aio.link import AsyncLink
from qb.clients.aio.waiting import now
from qb.clients.consuming.assigned_partitions import PartitionProgress
from qb.clients.consuming.consumer_state import ConsumerState
from qb.clients.protocol.message import Message


class AsyncConsumerIteration:
    """The messages of a consumer, one at a time."""

    _link: AsyncLink
    _state: ConsumerState
    _in_hand: PartitionProgress | None

    def __aiter__(self) -> AsyncConsumerIteration:
        return self

    async def __anext__(self) -> Message:
        """Return the next message, waiting for it, until stop().

        Raises BrokerUnavailable if there is no broker at first, UnknownTopic, BadName.
        """
        self._link.check_process()
        while True:
            if (held := self._in_hand) is not None:
                held.handled = held.handed
                if not held.stopped and now() < self._state.sure_until:
                    for message in held.messages:
                        held.handed = message.offset + 1
                        return message
            self._in_hand = await self._next(inf)
            if self._in_hand is None:
                raise StopAsyncIteration

    async def _next(self, deadline: float) -> PartitionProgress | None:
        """Return the next partition with messages."""
        raise NotImplementedError
