"""Messages as events, and where an event's id says that its message is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from qb.core.wire.frames import Frame
from qb.core.wire.whole_numbers import whole_number
from qb.doors.http.reports.http_views import MessageView, message_view
from qb.doors.http.streams.event_stream import event


class EventBatch(NamedTuple):
    """Messages to be pushed together."""

    topic: str
    partition: int
    messages: Sequence[Frame]
    attempt: int | None = None

    def views(self) -> list[MessageView]:
        attempt = {} if self.attempt is None else {"attempt": self.attempt}
        return [message_view(message, self.topic, self.partition, **attempt) for message in self.messages]


def encode_batch(batch: EventBatch) -> bytes:
    """Return one event a message; its id says where the message is."""
    return b"".join([event(view, id=f"{view.partition}:{view.offset}") for view in batch.views()])


def parse_event_id(text: str) -> tuple[int, int] | None:
    """Return partition and offset of an event id, or None if it is none of ours."""
    partition, offset = (whole_number(part, 0) for part in text.partition(":")[::2])
    return None if partition is None or offset is None else (partition, offset)
