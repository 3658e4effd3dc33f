"""A handler that remembers what it was given, and tests that wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

from qb import BrokerClient, Message

PATIENCE = 20.0


class Seen(NamedTuple):
    """What is left of a message once it was handled."""

    body: bytes
    offset: int
    attempt: int
    partition: int


class Collector:
    """Call it with messages, from any thread; `then` is called after each is noted, and may raise."""

    def __init__(self, then: Callable[[Message], object] = lambda message: None) -> None:
        self.seen: list[Seen] = []
        self.messages: list[Message] = []
        self._then = then
        self._changed = threading.Condition()

    def __call__(self, message: Message) -> None:
        with self._changed:
            self.messages.append(message)
            self.seen.append(Seen(message.body, message.offset, message.attempt, message.partition))
            self._changed.notify_all()
        self._then(message)

    def batch(self, messages: list[Message]) -> None:
        for message in messages:
            self(message)

    @property
    def bodies(self) -> list[bytes]:
        return [seen.body for seen in self.seen]

    def wait_for(self, count: int) -> list[bytes]:
        """Return all bodies once there are at least so many."""
        self.wait_until(lambda: len(self.seen) >= count)
        return self.bodies

    def wait_until(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, PATIENCE), f"only {len(self.seen)} messages: {self.seen[-5:]}"


def numbered(first: int, end: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, end)]


def lag(client: BrokerClient, subscription_id: str = "s") -> int:
    found: int = client.describe_subscription(subscription_id)["lag"]
    return found
