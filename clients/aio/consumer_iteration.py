"""`async for` over a consumer: an object that can go on after a cancellation, which a generator could not."""

from __future__ import annotations

from math import inf

from qb.clients.aio.consumer_membership import AsyncConsumerMembership
from qb.clients.aio.waiting import now
from qb.clients.protocol.message import Message


class AsyncConsumerIteration:
    """The messages of a consumer, one at a time."""

    _member: AsyncConsumerMembership

    def __aiter__(self) -> AsyncConsumerIteration:
        return self

    async def __anext__(self) -> Message:
        """Return the next message, waiting for it, until stop().

        Raises BrokerUnavailable if there is no broker at first, UnknownTopic, BadName.
        """
        member = self._member
        member.link.check_process()
        while True:
            if (held := member.in_hand) is not None:
                held.handled = held.handed
                if not held.stopped and now() < member.state.sure_until:
                    for message in held.messages:
                        held.handed = message.offset + 1
                        return message
            member.in_hand = await member.next(inf)
            if member.in_hand is None:
                raise StopAsyncIteration
