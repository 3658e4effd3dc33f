"""HTTP/1.1 on one connection, and no other version of HTTP.

Hypercorn's server would change to HTTP/2 when a peer asks for it. This one answers such an upgrade in HTTP/1.1, which
the standard allows, and refuses HTTP/2 by prior knowledge. Hypercorn's classes are not its public interface, so the
version is pinned in setup.cfg.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import h11
import trio
from hypercorn.events import Closed
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.trio.task_group import TaskGroup, _handle
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.typing import ConnectionState
from hypercorn.utils import parse_socket_addr

from qb.doors.http.requests.http_errors import HttpError, last_answer, refusal

VERSIONS = (b"1.0", b"1.1")
GONE = {"type": "http.disconnect"}
_UNREADABLE = {
    400: ("BAD_REQUEST", "this is not HTTP/1.1"),
    431: ("HEAD_TOO_LARGE", "the request line and the headers are longer than 16 KiB"),
}


class Http11Server(TCPServer):
    """Hypercorn's server for one connection, with a protocol that stays HTTP/1.1."""

    async def run(self) -> None:
        """Answer requests until either side closes. Raises nothing."""
        sock = self.stream.socket  # a plain stream: there is no TLS at this door
        try:
            client = parse_socket_addr(sock.family, sock.getpeername())
            server = parse_socket_addr(sock.family, sock.getsockname())
            async with AppTasks() as tasks:
                self._task_group = tasks
                state = ConnectionState(self.state)
                self.protocol = Http11Protocol(  # type: ignore[assignment]  # in place of the wrapper that changes it
                    self.app, self.config, self.context, tasks, state, False, client, server, self.protocol_send
                )
                await self.idle_task.restart(tasks, self._idle_timeout)
                await self._read_data()
                await self.idle_task.stop()  # or a connection that has ended counts until its idle time is over
        except OSError:
            pass
        finally:
            await self._close()


class AppTasks(TaskGroup):
    """The tasks of one connection. An application that reads no more of a body does not keep it from being closed.

    Hypercorn hands over the parts of a body, and the news that the peer has gone, through a channel of bounded size,
    and waits when that is full.
    """

    async def spawn_app(self, app: Any, config: Any, scope: Any, send: Any) -> Callable[[Any], Awaitable[None]]:
        """Start the application; returns what its events are put with."""
        sender, receiver = trio.open_memory_channel[Any](config.max_app_queue_size)

        async def receive() -> Any:
            try:
                return await receiver.receive()
            except trio.EndOfChannel:
                return GONE

        async def put(event: Any) -> None:
            if event["type"] == GONE["type"]:
                sender.close()
                return
            with suppress(trio.ClosedResourceError, trio.BrokenResourceError):
                await sender.send(event)

        in_thread, from_thread = trio.to_thread.run_sync, trio.from_thread.run
        self.spawn(_handle, app, config, scope, receive, send, in_thread, from_thread)
        return put


class Http11Protocol(H11Protocol):
    """Hypercorn's HTTP/1.1, refusing what could be read in two ways. Each refusal closes the connection."""

    async def handle(self, event: Any) -> None:
        """Take bytes of the peer, or the news that it has gone."""
        try:
            await super().handle(event)
        except HttpError as error:
            await self._refuse(error)
            await self.send(Closed())

    async def _check_protocol(self, event: h11.Request) -> None:
        """Called with each whole head of a request. Raises HttpError."""
        self.connection_state["peer"].finished(len(self.connection.trailing_data[0]))
        check_framing(event)

    async def _send_error_response(self, status_code: int) -> None:
        """Called when the bytes of the peer are not HTTP."""
        code, text = _UNREADABLE.get(status_code, _UNREADABLE[400])
        await self._refuse(HttpError(status_code, code, text))

    async def _refuse(self, error: HttpError) -> None:
        status, body = refusal(error)
        encoded, headers = last_answer(body)
        await self._send_h11_event(h11.Response(status_code=status, headers=list(headers.items())))
        await self._send_h11_event(h11.Data(data=encoded))
        await self._send_h11_event(h11.EndOfMessage())


def check_framing(request: h11.Request) -> None:
    """Refuse another protocol, and a body on whose end two programs may disagree. Raises HttpError."""
    if request.http_version not in VERSIONS:
        raise HttpError(505, "HTTP_VERSION", "this door speaks HTTP/1.1 only; there is no HTTP/2 here")
    names = dict(request.headers)
    if names.get(b"upgrade", b"").strip().lower() == b"websocket":
        raise HttpError(403, "NO_WEBSOCKET", "this door has no WebSockets; messages are pushed as Server-Sent Events")
    if b"transfer-encoding" in names and (b"content-length" in names or request.http_version == b"1.0"):
        raise HttpError(
            400, "BAD_REQUEST", "the length of the body is given in two ways: send Content-Length or Transfer-Encoding"
        )
