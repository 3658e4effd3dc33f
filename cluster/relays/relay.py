"""A peer that is passed on: its bytes go to the owner, the owner's come back, byte for byte."""

from __future__ import annotations

from collections import deque

import trio

from qb.cluster.cluster_port import Dial
from qb.cluster.relays.relay_protocol import RelayPreamble, encode_acked, encode_data, encode_end, encode_preamble
from qb.doors.delivery_receipts import FIRST_PAUSE, LONGEST_PAUSE, unacknowledged
from qb.doors.transport import Transport
from qb.storage.signals import Signal

CHUNK = 65_536
UNREAD = 65_536  # bytes that the peer has not read: with more, the owner is not read either


class RelayedConversation:
    """One peer and its connection to the owner."""

    def __init__(self, peer: Transport, preamble: RelayPreamble, address: str, dial: Dial) -> None:
        """`address` is the cluster port of the owner that the preamble names; `dial` connects to it."""
        self._peer, self._preamble, self._address, self._dial = peer, preamble, address, dial
        self._marks: deque[tuple[int, int]] = deque()  # where the peer's stream and the owner's answers have got to
        self._marked = Signal()
        self._sending = trio.Lock()

    async def run(self, first: bytes = b"") -> None:
        """Pass on what the peer has said, and all that comes. Returns when one side has ended. Raises OSError."""
        async with await self._dial(self._address) as owner:
            await owner.send_all(encode_preamble(self._preamble) + (encode_data(first) if first else b""))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._forward, owner)
                if self._preamble.door == "frames":
                    nursery.start_soon(self._report, owner)
                await self._return(owner)
                nursery.cancel_scope.cancel()

    async def _forward(self, owner: trio.abc.Stream) -> None:
        """Pass on what the peer sends; at its end the owner may still answer."""
        try:
            while data := await self._peer.receive(CHUNK):
                await self._say(owner, encode_data(data))
            await self._say(owner, encode_end())
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the owner has closed: what it said before is still read

    async def _return(self, owner: trio.abc.Stream) -> None:
        """Pass on what the owner answers, as fast as the peer reads."""
        passed = 0
        try:
            while not self._peer.gone and (data := await owner.receive_some(CHUNK)):
                self._peer.send(bytes(data))
                passed += len(data)
                if self._preamble.door == "frames":
                    self._marks.append((self._peer.position, passed))
                    self._marked.set()
                await self._peer.wait_for_room(UNREAD)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass

    async def _report(self, owner: trio.abc.Stream) -> None:
        """Say how much of the answers the peer's TCP has acknowledged."""
        pause = FIRST_PAUSE
        while not self._peer.gone:
            if not self._marks:
                await self._marked.wait()
            waiting = unacknowledged(self._peer.sock) or 0
            acked = 0
            while self._marks and self._marks[0][0] <= self._peer.taken - waiting:
                acked = self._marks.popleft()[1]
            if acked:
                pause = FIRST_PAUSE
                try:
                    await self._say(owner, encode_acked(acked))
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    return
            else:
                pause = min(2 * pause, LONGEST_PAUSE)
                await trio.sleep(pause)

    async def _say(self, owner: trio.abc.Stream, piece: bytes) -> None:
        """Send one piece as a whole, not in the midst of another one."""
        async with self._sending:
            await owner.send_all(piece)
