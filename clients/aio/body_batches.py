"""Bodies from asynchronous iterables."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Iterable

from qb.clients.protocol import publish_frames as publishing
from qb.clients.protocol.publish_frames import PORTION, Body, BodyBatcher

Bodies = Iterable[Body] | AsyncIterable[Body]


async def portions(
    bodies: Bodies, overhead: int, limit: int, enough: int = PORTION
) -> AsyncGenerator[list[bytes], None]:
    """As qb.clients.protocol.publish_frames.portions, for asynchronous iterables too."""
    if not isinstance(bodies, AsyncIterable):
        for portion in publishing.portions(bodies, overhead, limit, enough):
            yield portion
        return
    portioner = BodyBatcher(overhead, limit, enough)
    failure: Exception | None = None
    try:
        async for body in bodies:
            if portioner.add(body):
                yield portioner.take()
    except Exception as error:
        failure = error
    if rest := portioner.take():
        yield rest
    if failure is not None:
        raise failure
