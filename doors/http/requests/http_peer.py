"""One HTTP connection, as the routes see it: where it came from, and how much of its input waits for the rest."""

from __future__ import annotations

from qb.doors.transport import Transport


class HttpPeer:
    """One connection.

    Its unfinished input is what was received since the last whole head of a request, less what of its body was taken.
    """

    def __init__(self, transport: Transport, address: str) -> None:
        self.transport = transport
        self.address = address
        self.is_pushed_to = False  # then the stream waits until everything is sent, and each single send does not
        self._unfinished = 0

    def received(self, size: int) -> None:
        """So many bytes have come. May refuse this connection, or another one that has waited longer."""
        self._unfinished += size
        self.transport.unfinished.hold(self._unfinished, anew=False)

    def took(self, size: int) -> None:
        """So many bytes of the body are being handled now; what is behind them begins anew."""
        self._unfinished = max(0, self._unfinished - size)
        self.transport.unfinished.hold(self._unfinished, anew=True)

    def finished(self, behind: int = 0) -> None:
        """A head, or a whole request, is being handled now; so many bytes have come behind it."""
        self._unfinished = behind
        self.transport.unfinished.hold(behind, anew=True)
