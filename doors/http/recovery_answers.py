"""What the HTTP door answers while the data directory is being opened."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import trio

from qb.doors.http.requests.http_errors import raw_response

HEAD_LIMIT = 16_384
PATIENCE = 5.0  # seconds
MOST = 256  # connections at once; one more is closed at once
_HEALTHY = raw_response(200, {"status": "healthy"})
_WHY = "the broker is recovering its data directory"
_NOT_READY = raw_response(503, {"status": "recovering", "reason": _WHY, "error": _WHY, "code": "RECOVERING"})


async def answer_recovering(listeners: Sequence[socket.socket]) -> None:
    """Answer every request: alive, but not ready. Returns never: cancel it when the broker is there."""
    async with trio.open_nursery() as nursery:
        for listener in listeners:
            nursery.start_soon(_accept, listener, nursery)


async def _accept(listener: socket.socket, nursery: trio.Nursery) -> None:
    while True:
        await trio.lowlevel.wait_readable(listener)
        try:
            peer, _ = listener.accept()
        except OSError:
            await trio.sleep(0.1)
            continue
        if len(nursery.child_tasks) > MOST:
            peer.close()
            continue
        peer.setblocking(False)
        nursery.start_soon(_answer, trio.SocketStream(trio.socket.from_stdlib_socket(peer)))


async def _answer(stream: trio.SocketStream) -> None:
    """Answer one request and close."""
    try:
        async with stream:
            with trio.move_on_after(PATIENCE):
                head = b""
                while b"\r\n\r\n" not in head and len(head) < HEAD_LIMIT:
                    data = await stream.receive_some()
                    if not data:
                        return
                    head += data
                await stream.send_all(_HEALTHY if head.startswith(b"GET /health ") else _NOT_READY)
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        pass
