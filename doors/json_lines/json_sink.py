"""Where deliveries go for a subscriber that reads lines of JSON."""

from __future__ import annotations

from qb.core.pacing import spend
from qb.core.push.delivery_sinks import FULL, PushedRun
from qb.core.wire.frames import data_frames
from qb.doors.json_lines.json_answers import line, record
from qb.doors.transport import Transport


class JsonSink:
    """One line a message."""

    def __init__(self, name: str, transport: Transport, *, settles_at_once: bool) -> None:
        self.name = name
        self.settles_at_once = settles_at_once
        self.settled = 0
        self._transport = transport

    @property
    def full(self) -> bool:
        return self._transport.has_queued(FULL)

    def deliver(self, delivery: PushedRun) -> None:
        spend(delivery.size)
        where = {
            "subscription": delivery.subscription_id,
            "topic": delivery.topic,
            "partition": delivery.partition,
        }
        messages = [
            {**where, **record(message), "attempt": delivery.attempt} for message in data_frames(delivery.frames)
        ]
        self._transport.send(b"".join([line({"ok": True, "message": message}) for message in messages]))

    def removed(self, subscription_id: str, reason: str) -> None:
        self._transport.send(line({"ok": True, "removed": {"subscription": subscription_id, "reason": reason}}))
