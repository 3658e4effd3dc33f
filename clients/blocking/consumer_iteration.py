"""`for` over a consumer: a generator, which is quicker than an object."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from qb.clients.blocking.consumer_membership import ConsumerMembership
from qb.clients.blocking.waiting import now
from qb.clients.protocol.message import Message


class ConsumerIteration:
    """The messages of a consumer, one at a time."""

    _member: ConsumerMembership

    def __iter__(self) -> Iterator[Message]:
        """Yield messages, waiting for them, until stop().

        Raises BrokerUnavailable if there is no broker at first, UnknownTopic, BadName.
        """
        member, state, clock = self._member, self._member.state, now
        while (held := member.next(inf)) is not None:
            member.in_hand = held
            for message in held.messages:
                held.handed = message.offset + 1
                yield message
                if held is not member.in_hand:
                    break  # the program has polled meanwhile
                held.handled = held.handed
                if held.stopped or clock() >= state.sure_until:
                    break
