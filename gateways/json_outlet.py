"""gateways.json_outlet: where deliveries go for a subscriber that reads lines of JSON.

May import: core.outlets, core.transport, gateways.json_answers, the standard library.
Never: trio, files.
"""

from __future__ import annotations

from core.outlets import FULL, Delivery, data_frames
from core.transport import Transport
from gateways.json_answers import line, record


class JsonOutlet:
    """One line a message."""

    def __init__(self, name: str, transport: Transport, *, settles_at_once: bool) -> None:
        self.name = name
        self.settles_at_once = settles_at_once
        self.settled = 0
        self._transport = transport

    @property
    def full(self) -> bool:
        return self._transport.queued > FULL

    def deliver(self, delivery: Delivery) -> None:
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
