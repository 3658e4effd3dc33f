"""An answer without end: Server-Sent Events, with heartbeats, until the peer or the broker ends it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol

import msgspec
import trio

from qb.doors.http.requests.http_peer import HttpPeer

HEARTBEAT = 15.0  # seconds of silence until a comment says that the stream lives
SLACK = 0.005  # seconds of work that may be done before any rest is taken
STREAM_TYPE = "text/event-stream; charset=utf-8"
STREAM_HEADERS = {"x-accel-buffering": "no"}

Send = Callable[[bytes], None]
_encode = msgspec.json.Encoder().encode


def event(data: Any, *, name: str = "", id: str = "") -> bytes:
    """Return one event. JSON has no bare line ends, so the data is one line."""
    head = (f"event: {name}\n" if name else "") + (f"id: {id}\n" if id else "")
    return b"%sdata: %s\n\n" % (head.encode(), _encode(data))


class StreamPace:
    """Gives out turns to push, one at a time, and rests as long as the turns took.

    So all streams together get at most half of the processor's time, and publishers the other half, however many
    streams there are.
    """

    def __init__(self) -> None:
        self._lock = trio.Lock()
        self._rests_until = 0.0

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        async with self._lock:
            started = time.perf_counter()
            yield
            took = time.perf_counter() - started
            now = trio.current_time()
            self._rests_until = max(self._rests_until, now) + took
            if self._rests_until - now > SLACK:
                await trio.sleep_until(self._rests_until)


class EventSource(Protocol):
    """What a stream pushes."""

    ended: dict[str, Any] | None  # the last event, once nothing more comes

    def opening(self) -> bytes:
        """Return what is sent first."""

    async def next_batch(self) -> Any:
        """Wait for something to push; None: look at `ended`. Cancelling it loses nothing."""

    def encode(self, batch: Any) -> bytes:
        """Return the events of a batch."""

    def sent(self, batch: Any) -> None:
        """The batch has been handed to the connection."""

    async def close(self) -> None:
        """The stream is over, in whichever way."""


class EventStream:
    """Pushes a source to one peer."""

    def __init__(self, source: EventSource, peer: HttpPeer, pace: StreamPace) -> None:
        self._source = source
        self._transport = peer.transport
        self._pace = pace

    async def push(self, send: Send, wait_until_gone: Callable[[], Awaitable[None]]) -> None:
        """Send events until the source ends or the peer has gone."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_cancel_after, wait_until_gone, nursery.cancel_scope)
                await self._push(send)
                nursery.cancel_scope.cancel()
        finally:
            await self._source.close()

    async def _push(self, send: Send) -> None:
        source = self._source
        send(source.opening())
        while source.ended is None:
            with trio.move_on_after(HEARTBEAT) as waiting:
                batch = await source.next_batch()
            if waiting.cancelled_caught:
                send(b": alive\n\n")
            elif batch is not None:
                await self._transport.wait_for_turn(0)
                async with self._pace.turn():
                    send(source.encode(batch))
                if self._transport.gone:
                    return
                source.sent(batch)
        send(event(source.ended, name="end"))


async def _cancel_after(happens: Callable[[], Awaitable[None]], scope: trio.CancelScope) -> None:
    await happens()
    scope.cancel()
