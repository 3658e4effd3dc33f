"""What all methods of a client stand on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from qb.clients.aio.background import AsyncBackground
from qb.clients.aio.link import AsyncLink
from qb.clients.aio.subscribing.joined import AsyncClientSubscriptions
from qb.clients.aio.waiting import now
from qb.clients.protocol.conversation import Conversation, answer_of
from qb.clients.protocol.partition_spread import TopicRoutes
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
        return answer_of(await self._ask(lambda: self._conversation.request(method, arguments)))

    async def _ask(self, compose: Callable[[], tuple[int, bytes]]) -> Frame:
        return await self._link.ask(compose, self._deadline())

    def _deadline(self, seconds: float | None = None) -> float:
        return now() + (self._request_timeout if seconds is None else seconds)
