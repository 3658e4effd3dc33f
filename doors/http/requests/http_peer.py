"""One HTTP connection, as the routes see it: where it came from, and how much of its input waits for the rest."""

from __future__ import annotations

from qb.doors.peer_identity import CHANGED, PeerIdentity
from qb.doors.transport import Transport


class HttpPeer:
    """One connection.

    Its unfinished input is what was received since the last whole head of a request, less what of its body was taken.
    What comes while a whole request is handled waits for us, and so is not held against the peer.
    """

    def __init__(self, transport: Transport, address: str, identity: PeerIdentity) -> None:
        self.transport = transport
        self.address = address
        self.identity = identity
        self._logged_in_by = ""  # the token that the last request was made with
        identity.changed = self._user_changed
        self._unfinished = 0
        self._behind: int | None = None  # bytes that came while a whole request is handled; None: none is

    async def log_in(self, token: str) -> None:
        """Be the user of this token; the same token again costs next to nothing. Raises Unauthenticated."""
        if token == self._logged_in_by:
            return
        self._logged_in_by = ""
        self.identity.log_out()
        if token:
            await self.identity.log_in(token)
            self._logged_in_by = token

    def _user_changed(self) -> None:
        self.transport.give_up(CHANGED)

    def received(self, size: int) -> None:
        """So many bytes have come. May refuse this connection, or another one that has waited longer."""
        if self._behind is not None:
            self._behind += size
            self.transport.unfinished.postpone(self._behind)
        else:
            self._unfinished += size
            self.transport.unfinished.hold(self._unfinished, anew=False)

    def took(self, size: int) -> None:
        """So many bytes of the body are being handled now; what is behind them begins anew."""
        self._begin(max(0, self._unfinished - size))

    def began(self, behind: int) -> None:
        """A head has come, or a request was answered; so many bytes have come behind it."""
        if self._behind:
            self.transport.unfinished.postpone(0)
        self._behind = None
        self._begin(behind)

    def finished(self) -> None:
        """A whole request is being handled now."""
        self._behind = 0
        self._begin(0)

    def _begin(self, unfinished: int) -> None:
        self._unfinished = unfinished
        self.transport.unfinished.hold(unfinished, anew=True)
