"""A TCP relay whose traffic towards the server can be held back, as by a network that delivers late."""

from __future__ import annotations

import trio


class LateNetwork:
    """Relays every connection to one port of this machine."""

    def __init__(self, port: int) -> None:
        self._target = port
        self.port = 0
        self.held = bytearray()  # what the peer has sent since hold()
        self._open = trio.Event()
        self._open.set()
        self._released = trio.Event()
        self._sending = trio.Lock()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Relay until it is cancelled."""
        async with trio.open_nursery() as nursery:
            (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
            self.port = listener.socket.getsockname()[1]
            nursery.start_soon(trio.serve_listeners, self._relay, [listener])
            task_status.started()

    def hold(self) -> None:
        """From now on nothing reaches the server."""
        self._open = trio.Event()

    def release(self) -> None:
        """Deliver all that was held, and what follows."""
        self._open.set()
        self._released.set()

    async def _relay(self, peer: trio.SocketStream) -> None:
        try:
            async with await trio.open_tcp_stream("127.0.0.1", self._target) as server, trio.open_nursery() as nursery:
                nursery.start_soon(self._copy, server, peer)
                nursery.start_soon(self._deliver, server)
                while data := await peer.receive_some():
                    self.held += data
                    if self._open.is_set():
                        await self._flush(server)
        except* (trio.BrokenResourceError, trio.ClosedResourceError, OSError):
            pass

    async def _flush(self, server: trio.SocketStream) -> None:
        async with self._sending:
            data, self.held = self.held, bytearray()
            await server.send_all(data)

    async def _deliver(self, server: trio.SocketStream) -> None:
        """Deliver what was held when it is released, even if the peer sends nothing more."""
        await self._released.wait()
        await self._flush(server)

    async def _copy(self, source: trio.SocketStream, target: trio.SocketStream) -> None:
        while data := await source.receive_some():
            await target.send_all(data)
        await target.aclose()
