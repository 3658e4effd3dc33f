"""The task of a link: connects, reads, and connects again when the connection is lost."""

from __future__ import annotations

from collections.abc import Callable

import anyio

from qb.clients.aio.connection.shared_connection import AsyncSharedConnection
from qb.clients.aio.event_loops.running_loop import Stream, running_loop
from qb.clients.protocol.client_errors import QBError
from qb.clients.protocol.connection_phases import Phase, PhaseEvent
from qb.clients.protocol.reconnecting import ReconnectBackoff
from qb.core.wire.errors import PeerMisbehaved

# What ends a connection, and is answered with another one; anything else is a fault of ours, and the caller's to see.
ENDS = (OSError, EOFError, PeerMisbehaved, QBError)


class AsyncLinkTask:
    """One span from open() to close(). It begins when the one before has ended.

    It lives in the task group of the client and shields itself, so that a cancelled client can still leave in good
    order; close() ends it.
    """

    def __init__(
        self, connection: AsyncSharedConnection, before: AsyncLinkTask | None, failed: Callable[[AsyncLinkTask], None]
    ) -> None:
        self._connection, self._before, self._failed = connection, before, failed
        self._scope = connection.background.shield()  # not reached by the cancellation of the caller
        self._ended = anyio.Event()
        connection.background.start(f"qb {connection.trouble.server}", self._run)

    def close(self) -> None:
        """Have it end."""
        self._scope.cancel()

    async def join(self) -> None:
        """Return when it has ended."""
        await self._ended.wait()

    async def _run(self) -> None:
        try:
            with self._scope:
                if self._before is not None:
                    await self._before.join()
                    self._before = None
                await self._keep_up()
        finally:
            self._connection.trouble.closed()
            if self._connection.phase is Phase.BACKING_OFF:
                self._connection.advance(PhaseEvent.ENDED)
            self._ended.set()
            self._failed(self)  # unless it was closed

    async def _keep_up(self) -> None:
        backoff = ReconnectBackoff()
        while True:
            self._connection.advance(PhaseEvent.ATTEMPT)
            try:
                await self._live(backoff)
            except ENDS as error:
                self._connection.trouble.note(error)
            finally:
                self._connection.lost()
            await anyio.sleep(self._connection.trouble.pause(backoff))

    async def _live(self, backoff: ReconnectBackoff) -> None:
        """One connection, from the attempt to the end, which always raises."""
        connection = self._connection
        with anyio.fail_after(connection.trouble.connect_timeout):
            server = connection.trouble.server
            stream = await running_loop().connect(server, connection.conversation.credentials.connecting(server))
            connection.connected(stream)
            await self._greet(stream)
        backoff.reset()
        await self._converse(stream)

    async def _greet(self, stream: Stream) -> None:
        """Return when the broker has welcomed us."""
        connection = self._connection
        await connection.write(stream, connection.conversation.open())
        while not connection.up:
            await connection.receive(stream)
            await connection.handle_events(stream)

    async def _converse(self, stream: Stream) -> None:
        """Read until the connection ends, which always raises."""
        connection, silent = self._connection, False
        interval = min(connection.heartbeat_interval, connection.conversation.silence)
        while True:
            if await connection.receive(stream, interval):
                silent = False
                await connection.handle_events(stream)
            elif silent:
                raise ConnectionError("it was silent for two heartbeat intervals")
            else:
                silent = True
                await connection.show_life(stream, connection.conversation.heartbeat())
