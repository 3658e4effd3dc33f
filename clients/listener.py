"""clients.listener: what a link expects of whoever cares for the broker's pushes.

May import: core.frames, the standard library.
Never: sockets, threads, trio.
"""

from __future__ import annotations

from typing import Protocol

from core.frames import Frame


class Listener(Protocol):
    """Called by the link, which goes on when it returns: nothing here may wait."""

    def welcomed(self) -> list[bytes]:
        """A connection begins: return what to send first. The link holds its locks meanwhile."""

    def pushed(self, frame: Frame) -> None:
        """Take a frame that answers nothing, or nothing that a caller waits for."""

    def lost(self) -> None:
        """The connection has ended."""
