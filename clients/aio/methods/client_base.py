"""What all methods of a client stand on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from qb.clients.aio.background import AsyncBackground
from qb.clients.aio.link import AsyncLink, AsyncPendingCall
from qb.clients.aio.subscribing.joined import AsyncClientSubscriptions
from qb.clients.aio.waiting import now
from qb.clients.protocol.client_errors import BrokerUnavailable, ConnectionLost, QBError, ShuttingDown
from qb.clients.protocol.conversation import Conversation, answer_of, check_success
from qb.clients.protocol.partition_spread import TopicRoutes
from qb.clients.protocol.reconnecting import READ_ONLY_METHODS
from qb.core.wire.addresses import BrokerAddress
from qb.core.wire.frames import Frame


class AsyncClientBase:
    """The connection of a client, and the requests that go over it."""

    client_id: str | None
    _servers: Sequence[BrokerAddress]
    _request_timeout: float
    _background: AsyncBackground
    _link: AsyncLink
    _conversation: Conversation
    _routes: TopicRoutes
    _handling: AsyncClientSubscriptions
    _producers: set[Any]  # AsyncProducer, while it has a task

    async def _request(self, method: str, **arguments: Any) -> Any:
        if method in READ_ONLY_METHODS:
            return await self._insist(self._deadline(), method, **arguments)
        return answer_of(await self._ask(lambda: self._conversation.request(method, arguments)))

    async def _insist(self, deadline: float, method: str, **arguments: Any) -> Any:
        """Call a method that does no harm when it is called twice: again, if the connection is lost."""
        return answer_of(await self._repeat(lambda: self._conversation.request(method, arguments), deadline))

    async def _repeat(
        self, compose: Callable[[], tuple[int, bytes]], deadline: float, begun: AsyncPendingCall | None = None
    ) -> Frame:
        """Send a request that does no harm when it is carried out twice: again, if the connection is lost.

        `begun`: the first try, if that is on its way already. Raises what the broker refuses it with, or as ask().
        """
        lost: QBError | None = None
        while True:
            try:
                call, begun = begun or await self._link.begin(compose, deadline), None
                answer = await self._link.answer(call, deadline)
                check_success(answer)
                return answer
            except (ConnectionLost, ShuttingDown) as error:
                if not self._link.started:  # we were disconnected on purpose
                    raise
                lost = error
            except BrokerUnavailable as error:
                raise lost or error from None

    async def _ask(self, compose: Callable[[], tuple[int, bytes]]) -> Frame:
        return await self._link.ask(compose, self._deadline())

    def _deadline(self, seconds: float | None = None) -> float:
        return now() + (self._request_timeout if seconds is None else seconds)
