"""The task of a link: connects, reads, and connects again when the connection is lost."""

from __future__ import annotations

from collections.abc import Callable

import trio

from qb.clients.aio.connection.shared_connection import AsyncSharedConnection
from qb.clients.aio.connection.streams import ENDS, plain
from qb.clients.protocol.connection_phases import Phase, PhaseEvent
from qb.clients.protocol.reconnecting import CONNECT_TIMEOUT, ReconnectBackoff


class AsyncLinkTask:
    """One span from open() to close(). It begins when the one before has ended.

    It lives in the nursery of the client and shields itself, so that a client that is cancelled can still leave in good
    order; close() ends it.
    """

    def __init__(
        self, connection: AsyncSharedConnection, before: AsyncLinkTask | None, failed: Callable[[AsyncLinkTask], None]
    ) -> None:
        self._connection, self._before, self._failed = connection, before, failed
        self._scope = connection.background.shield()  # not reached by the cancellation of the caller
        self._ended = trio.Event()
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
                self._connection.trouble.note(plain(error))
            finally:
                self._connection.lost()
            await trio.sleep(backoff.pause())

    async def _live(self, backoff: ReconnectBackoff) -> None:
        """One connection, from the attempt to the end, which always raises."""
        connection = self._connection
        with trio.fail_after(CONNECT_TIMEOUT):
            stream = await trio.open_tcp_stream(*connection.trouble.server)
            connection.connected(stream)
            await self._greet(stream)
        backoff.reset()
        await self._converse(stream)

    async def _greet(self, stream: trio.SocketStream) -> None:
        """Return when the broker has welcomed us."""
        connection = self._connection
        await stream.send_all(connection.conversation.open())
        while not connection.up:
            await connection.receive(stream)
            await connection.handle_events(stream)

    async def _converse(self, stream: trio.SocketStream) -> None:
        """Read until the connection ends, which always raises."""
        connection, silent = self._connection, False
        while True:
            with trio.move_on_after(connection.heartbeat_interval) as patience:
                await connection.receive(stream)
            if patience.cancelled_caught:
                if silent:
                    raise ConnectionError("it was silent for two heartbeat intervals")
                await connection.show_life(stream, connection.conversation.heartbeat())
            silent = patience.cancelled_caught
            await connection.handle_events(stream)
