"""clients.trio_publishing: bodies from asynchronous iterables.

May import: clients.publishing, the standard library.
Never: sockets, threads.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Iterable

from clients import publishing
from clients.publishing import PORTION, Body, Portioner


async def portions(
    bodies: Iterable[Body] | AsyncIterable[Body], overhead: int, limit: int, enough: int = PORTION
) -> AsyncGenerator[list[bytes], None]:
    """As clients.publishing.portions, for asynchronous iterables too."""
    if not isinstance(bodies, AsyncIterable):
        for portion in publishing.portions(bodies, overhead, limit, enough):
            yield portion
        return
    portioner = Portioner(overhead, limit, enough)
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
