"""What a link expects of the object that takes the broker's pushes."""

from __future__ import annotations

from typing import Protocol

from qb.core.wire.frames import Frame


class PushListener(Protocol):
    """Called by the link, which goes on when it returns: nothing here may wait."""

    def welcomed(self) -> list[bytes]:
        """A connection begins: return what to send first. The link holds its locks meanwhile."""

    def pushed(self, frame: Frame) -> None:
        """Take a frame that answers nothing, or nothing that a caller waits for."""

    def lost(self) -> None:
        """The connection has ended."""
