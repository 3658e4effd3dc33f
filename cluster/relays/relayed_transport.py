"""The owner's end of a relay: a transport whose peer is behind another broker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qb.cluster.relays.relay_protocol import RelayReader, RelayRefused
from qb.doors.socket_poll import RECEIVE_BYTES
from qb.doors.transport import Transport


class RelayedTransport(Transport):
    """A stream of bytes to one peer, by way of a relay. What a session sends goes out as it is."""

    def __init__(self, *shared: Any) -> None:
        super().__init__(*shared)
        self.acked_by_peer = 0
        self._reader = RelayReader()
        self._is_over = False  # has all been handed over that the peer will ever send?
        self._came = b""  # bytes of the peer that were not asked for yet

    def _read(self, received: memoryview) -> bytes:
        try:
            data = self._reader.take(received)
        except RelayRefused as error:
            self.give_up(str(error))
            return b""
        self.acked_by_peer = self._reader.acked
        return data

    async def receive_view(self, most: int = RECEIVE_BYTES) -> memoryview:
        while not self._came:
            if self._reader.ended:
                return memoryview(b"")
            received = await super().receive_view()
            if not received or self.gone:
                return memoryview(b"")
            self._came = self._read(received)
        data, self._came = self._came[:most], self._came[most:]
        return memoryview(data)

    async def peek(self, size: int) -> bytes:
        if not self._came:
            self._came = bytes(await self.receive_view())
        return self._came[:size]

    async def attend(self, take: Callable[[memoryview], bool]) -> bool:
        if self._came:
            data, self._came = self._came, b""
            if not take(memoryview(data)):
                return True
        if self._reader.ended:
            return False
        if self._poll is None:
            while data_view := await self.receive_view():
                if not take(data_view):
                    return True
            return False
        return await super().attend(lambda received: self._take(received, take)) and not self._is_over

    def _take(self, received: memoryview, take: Callable[[memoryview], bool]) -> bool:
        data = self._read(received)
        wants_more = not data or take(memoryview(data))
        self._is_over = self._reader.ended and wants_more
        return wants_more and not self._reader.ended
