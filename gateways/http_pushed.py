"""gateways.http_pushed: messages as events, and where an event's id says that its message is.

May import: core.frames, gateways.http_events, gateways.http_views, the standard library.
Never: trio, sockets, storage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from core.frames import Frame
from gateways.http_events import event
from gateways.http_views import MessageView, message_view


class Batch(NamedTuple):
    """Messages to be pushed together."""

    topic: str
    partition: int
    messages: Sequence[Frame]
    attempt: int | None = None

    def views(self) -> list[MessageView]:
        attempt = {} if self.attempt is None else {"attempt": self.attempt}
        return [message_view(message, self.topic, self.partition, **attempt) for message in self.messages]


def encode_batch(batch: Batch) -> bytes:
    """Return one event a message; its id says where the message is."""
    return b"".join([event(view, id=f"{view.partition}:{view.offset}") for view in batch.views()])


def parse_event_id(text: str) -> tuple[int, int] | None:
    """Return partition and offset of an event id, or None if it is none of ours."""
    partition, colon, offset = text.partition(":")
    fits = colon and partition.isdecimal() and offset.isdecimal() and len(text) < 40
    return (int(partition), int(offset)) if fits else None
