"""Deliveries to a peer that never acks: one counts as delivered when the peer's TCP has acknowledged its bytes.

The kernel says how many bytes it has sent and the peer has not acknowledged. It is asked once for all deliveries that
wait, not once a message. Where a system cannot say it, a delivery counts when the kernel or the queue has taken it.
"""

from __future__ import annotations

import socket
import struct
import sys
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import trio

from qb.core.push.delivery_sinks import PushedRun
from qb.doors.transport import Transport

FIRST_PAUSE, LONGEST_PAUSE = 0.001, 0.05  # seconds between two looks while a peer does not acknowledge
RENEWAL = 0.5  # seconds after which the leases of what waits are renewed

if sys.platform == "linux":
    from fcntl import ioctl
    from termios import TIOCOUTQ

    def unacknowledged(sock: socket.socket) -> int | None:
        """Return how many of the bytes that the kernel took the peer has not acknowledged; None: it cannot say."""
        if sock.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        try:
            return int(struct.unpack("i", ioctl(sock, TIOCOUTQ, bytes(4)))[0])
        except OSError:
            return None

else:

    def unacknowledged(sock: socket.socket) -> int | None:
        """Return None: this system cannot say it."""
        return None


class AwaitedDelivery(NamedTuple):
    """A delivery, and how many bytes the peer has to acknowledge until it has it."""

    position: int
    subscription_id: str
    partition: int
    runs: tuple[range, ...]


class DeliveryReceipts:
    """What was pushed to one peer and is not acknowledged by its TCP."""

    def __init__(
        self,
        transport: Transport,
        received: Callable[[list[AwaitedDelivery]], None],
        renew: Callable[[], None],
    ) -> None:
        """`received` is called with what the peer has, `renew` now and then while something waits."""
        self._transport = transport
        self._received = received
        self._renew = renew
        self._awaited: deque[AwaitedDelivery] = deque()
        self._some = trio.Event()
        self.available = self._acknowledged() is not None

    def expect(self, delivery: PushedRun) -> None:
        """Note a delivery that has just been given to the transport."""
        about = delivery.subscription_id, delivery.partition, delivery.runs
        self._awaited.append(AwaitedDelivery(self._transport.position, *about))
        self._some.set()

    def look(self) -> bool:
        """See what the peer has acknowledged since the last look; returns whether it was something."""
        acknowledged = self._acknowledged() if self._awaited else None
        if acknowledged is None:
            return False
        received = []
        while self._awaited and self._awaited[0].position <= acknowledged:
            received.append(self._awaited.popleft())
        if received:
            self._received(received)
        return bool(received)

    def _acknowledged(self) -> int | None:
        """Return how many bytes the peer has; None: the system cannot say it."""
        if self._transport.acked_by_peer is not None:
            return self._transport.acked_by_peer
        waiting = unacknowledged(self._transport.sock)
        return None if waiting is None else self._transport.taken - waiting

    async def run(self) -> None:
        """Look again and again while something is awaited, until cancelled."""
        while True:
            await self._some.wait()
            self._some = trio.Event()
            pause, renew_at = FIRST_PAUSE, trio.current_time() + RENEWAL
            while self._awaited:
                pause = FIRST_PAUSE if self.look() else min(2 * pause, LONGEST_PAUSE)
                if trio.current_time() >= renew_at:
                    self._renew()
                    renew_at = trio.current_time() + RENEWAL
                await trio.sleep(pause)
