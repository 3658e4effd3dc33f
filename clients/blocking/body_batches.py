"""Bodies in portions that are worth a system call."""

from __future__ import annotations

from collections.abc import Iterable

from qb.clients.protocol.publish_frames import Body, portions

__all__ = ["Bodies", "portions"]

Bodies = Iterable[Body]
