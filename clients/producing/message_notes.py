"""What a message has beside its body, and the partition that it belongs to."""

from __future__ import annotations

from collections.abc import Mapping

from qb.clients.protocol.partition_spread import KEYS_REMEMBERED, partition_of
from qb.clients.protocol.publish_frames import PublishForm


class MessageNote:
    """Partition, key, properties and time of a message. Raises as PublishForm for what the format cannot carry."""

    __slots__ = ("_count", "_routed", "_target", "_timestamp_ms", "form", "key", "partition", "properties", "topic")

    def __init__(
        self,
        topic: str,
        partition: int | None = None,
        key: str | None = None,
        properties: Mapping[str, str] | None = None,
        timestamp_ms: int = 0,
    ) -> None:
        self.topic, self.partition, self.key = topic, partition, key
        self.properties, self._timestamp_ms = dict(properties) if properties else None, timestamp_ms
        self.form = PublishForm(topic, partition, key, properties, timestamp_ms)  # for a broker that does the routing
        self._count = 0
        self._target, self._routed = -1, self.form

    def routed(self, count: int, turn: int) -> tuple[int, PublishForm]:
        """Return the partition, of so many, and the form that names it; without a key it is that whose turn it is."""
        if self.partition is not None:
            return self.partition, self.form
        target = turn if self.key is None else partition_of(self.key, count) if count != self._count else self._target
        if target != self._target:
            self._routed = PublishForm(self.topic, target, self.key, self.properties, self._timestamp_ms)
        self._count, self._target = count, target
        return target, self._routed


class MessageNotes:
    """Makes notes for the messages of one topic; those with nothing but a key are kept for the next with that key."""

    def __init__(self, topic: str, partition: int | None = None) -> None:
        """`partition`: of the messages that name none."""
        self.plain = MessageNote(topic, partition)
        self._topic, self._partition = topic, partition
        self._of_keys: dict[str, MessageNote] = {}

    def of(
        self, partition: int | None, key: str | None, properties: Mapping[str, str] | None, timestamp_ms: int
    ) -> MessageNote:
        """Return the note of one message. Raises as PublishForm."""
        partition = self._partition if partition is None else partition
        if partition is not None or properties or timestamp_ms or type(key) is not str:
            return MessageNote(self._topic, partition, key, properties, timestamp_ms)
        note = self._of_keys.get(key)
        if note is None:
            if len(self._of_keys) >= KEYS_REMEMBERED:
                self._of_keys.clear()
            note = self._of_keys[key] = MessageNote(self._topic, None, key)
        return note
