"""Messages as programs get them, pushed or pulled, cut out of stored frames a portion at a time."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from itertools import count, repeat
from typing import Any, Protocol

import msgspec

from qb.core.wire.errors import PeerMisbehaved
from qb.core.wire.frames import HEAD, OVERHEAD, Frame, MessageType, decode_properties

LONGEST = 7 * 24 * 3600.0  # the broker takes no longer delay or extension
_OWN = frozenset({"topic", "partition", "key", "subscription_id"})  # what a message has attributes for


_LENGTHS = struct.Struct(">I20xI")  # of a frame: total_length, properties_length
_STORED = struct.Struct(">IIQ8xI")  # total_length, type, offset, properties_length


class Settler(Protocol):
    """Reports to the broker what became of a message. None of this blocks for long."""

    def ack(self, message: Message) -> None: ...
    def nack(self, message: Message, delay: float | None, reason: str) -> None: ...
    def extend(self, message: Message, seconds: float) -> None: ...


class Message(msgspec.Struct, frozen=True, gc=False):
    """One message, pushed or pulled. It cannot be changed.

    Making it costs a third of what a tuple of a class costs, and the garbage collector does not walk it. So what it
    refers to must not lead back to what a program keeps messages in.

    Attributes:
        offset: Its offset in its partition.
        body: What was published.
        source: What it shares with the messages that came with it; for the library.
        at: Where its frame begins there; for the library.

    Example:
        >>> def handle(message):
        ...     print(message.topic, message.partition, message.offset, message.key, message.text())
    """

    offset: int
    body: bytes
    source: FrameSource  # what it has in common with those that came with it
    at: int  # where its frame begins there

    def text(self) -> str:
        """Return the body as UTF-8 text.

        Raises:
            UnicodeDecodeError: The body is not UTF-8.
        """
        return self.body.decode()

    def json(self, type: Any = Any) -> Any:
        """Return the body, which is JSON, as Python values.

        Args:
            type: What it must be: a class, such as a dataclass or a msgspec.Struct, or any type that has a JSON form.

        Returns:
            The value, of that type.

        Raises:
            ValueError: The body is not JSON, or not of that type; the text says where.

        Example:
            >>> order = message.json()
            >>> order["item"]
        """
        return msgspec.json.decode(self.body, type=type)

    @property
    def properties(self) -> dict[str, str]:
        """The properties that it was published with."""
        return {name: value for name, value in self._decoded().items() if name not in _OWN}

    @property
    def key(self) -> str | None:
        """The key that it was published with; None if it had none."""
        return self._decoded().get("key")

    @property
    def timestamp(self) -> int:
        """When it was published, in milliseconds since 1970."""
        return self.source.timestamp_at(self.at)

    @property
    def time(self) -> datetime:
        """The timestamp in UTC."""
        return datetime.fromtimestamp(self.timestamp / 1000, UTC)

    @property
    def topic(self) -> str:
        """The topic that it is in."""
        return self.source.topic

    @property
    def partition(self) -> int:
        """The partition that it is in."""
        return self.source.partition

    @property
    def attempt(self) -> int:
        """Which delivery this is: 1 for the first, and for a message that was pulled."""
        return self.source.attempt

    @property
    def subscription_id(self) -> str | None:
        """The subscription that pushed it; None if it was pulled."""
        return self.source.subscription_id

    @property
    def settled(self) -> int:
        """The number of the last SETTLE that the broker had seen when it sent this message."""
        return self.source.settled

    def ack(self) -> None:
        """Settle it as done, in a subscription joined with `ack="manual"`. Ignored if the message is not held any more.

        Raises:
            RuntimeError: Its subscriber acks by itself, or it was pulled.
        """
        self.source.settler.ack(self)

    def nack(self, delay: float | None = None, reason: str = "") -> None:
        """Settle it as failed, in a subscription joined with `ack="manual"`: it is delivered again.

        Args:
            delay: Seconds until then; None takes the subscription's backoff.
            reason: Why it failed; kept with the dead letter if it becomes one.

        Raises:
            ValueError: The delay is negative, or longer than a week.
            RuntimeError: Its subscriber acks by itself, or it was pulled.
        """
        if delay is not None:
            _check_seconds("delay", delay)
        self.source.settler.nack(self, delay, reason)

    def extend(self, seconds: float) -> None:
        """Hold it longer, even if this client cannot reach the broker meanwhile.

        Args:
            seconds: For how long at least, from now on.

        Raises:
            ValueError: It is negative, or longer than a week.
            RuntimeError: Its subscriber acks by itself, or it was pulled.
        """
        _check_seconds("seconds", seconds)
        self.source.settler.extend(self, seconds)

    def came_with(self, other: Message) -> bool:
        """Return whether two messages are of one delivery. The same message delivered twice is two.

        Args:
            other: The other message.

        Returns:
            True if one push brought both.
        """
        return self.source is other.source

    def _decoded(self) -> dict[str, str]:
        return _properties(self.source.properties_at(self.at))

    def __repr__(self) -> str:
        where = f"{self.topic}/{self.partition}@{self.offset}"
        return f"<Message {where}, {len(self.body)} bytes, attempt {self.attempt}>"


def to_json(value: Any) -> bytes:
    """Return a value as JSON. Raises TypeError."""
    return msgspec.json.encode(value)


def _check_seconds(name: str, seconds: float) -> None:
    if not 0 <= seconds <= LONGEST:
        raise ValueError(f"{name} must be from 0 to {LONGEST:g} seconds, not {seconds!r}")


@lru_cache(maxsize=4096)
def _properties(encoded: bytes) -> dict[str, str]:
    """Neighbours often have the same properties. The result is shared: callers must not change it."""
    return decode_properties(encoded)


class PulledSettler:
    """The settler of messages that were pulled: they are not settled."""

    def ack(self, message: Message) -> None:
        raise RuntimeError("only a message of a subscription is acked; pulled ones are committed by their consumer")

    def nack(self, message: Message, delay: float | None, reason: str) -> None:
        self.ack(message)

    def extend(self, message: Message, seconds: float) -> None:
        self.ack(message)


NOT_PUSHED = PulledSettler()


class FrameSource:
    """Stored frames of one partition: what their messages have in common, and those that are not read yet."""

    __slots__ = ("_at", "_data", "attempt", "partition", "settled", "settler", "subscription_id", "suspects", "topic")

    def __init__(
        self,
        data: bytes,
        topic: str,
        partition: int,
        *,
        subscription_id: str | None = None,
        attempt: int = 1,
        settled: int = 0,
        suspects: bool = False,
        settler: Settler = NOT_PUSHED,
    ) -> None:
        self._data, self._at = data, 0
        self.topic, self.partition, self.subscription_id = topic, partition, subscription_id
        self.attempt, self.settled, self.settler = attempt, settled, settler
        self.suspects = suspects  # may one of these have killed a process?

    @property
    def exhausted(self) -> bool:
        """Has everything been read?"""
        return self._at >= len(self._data)

    def read(self, most: int) -> list[Message]:
        """Return the next messages, at most so many. Raises PeerMisbehaved for bytes that are no stored frames."""
        data, at, unpack, kind = self._data, self._at, _STORED.unpack_from, int(MessageType.DATA)
        last = len(data) - OVERHEAD  # no frame begins behind this
        found: list[Message] = []
        while at <= last and len(found) < most:
            total, type, offset, properties_length = unpack(data, at)
            if total < OVERHEAD:
                break
            end = at + total
            if type == kind:
                found.append(Message(offset, data[at + OVERHEAD + properties_length : end], self, at))
            at = end
        if at > len(data) or (len(found) < most and at < len(data)):
            raise PeerMisbehaved(f"what lies at {at} of {len(data)} bytes is no stored frame")
        self._at = at
        return found

    def timestamp_at(self, at: int) -> int:
        """Return the timestamp of the frame at this position."""
        timestamp: int = HEAD.unpack_from(self._data, at)[3]
        return timestamp

    def properties_at(self, at: int) -> bytes:
        """Return the encoded properties of the frame at this position."""
        start = at + HEAD.size
        return self._data[start : start + int.from_bytes(self._data[start - 4 : start], "big")]


class IndexedFrameSource(FrameSource):
    """Stored frames with consecutive offsets of which the broker has said where they start."""

    __slots__ = ("_next_offset", "_starts")

    def __init__(self, data: bytes, topic: str, partition: int, starts: Sequence[int], first_offset: int) -> None:
        super().__init__(data, topic, partition)
        self._starts, self._next_offset = starts, first_offset

    def __len__(self) -> int:
        """How many messages have not been read."""
        return len(self._starts)

    def __iter__(self) -> Iterator[Message]:
        """Yield those that have not been read, without reading them."""
        return self._messages(self._starts)

    @property
    def exhausted(self) -> bool:
        return not self._starts

    def check(self) -> None:
        """Raises PeerMisbehaved if the index, which ascends, does not fit the frames."""
        data, starts = self._data, self._starts
        if starts:
            fits = starts[-1] <= len(data) - OVERHEAD
            total, properties_length = _LENGTHS.unpack_from(data, starts[-1]) if fits else (0, 0)
            if not OVERHEAD + properties_length <= total <= len(data) - starts[-1]:
                raise PeerMisbehaved(f"an index of {len(starts)} messages does not fit {len(data)} bytes")

    def read(self, most: int) -> list[Message]:
        found = list(self._messages(self._starts[:most]))
        self._starts, self._next_offset = self._starts[most:], self._next_offset + len(found)
        return found

    def message(self, number: int) -> Message:
        """Return one of those that have not been read."""
        (found,) = self._messages(self._starts[number : number + 1], number)
        return found

    def _messages(self, starts: Sequence[int], skipped: int = 0) -> Iterator[Message]:
        data = self._data
        lengths = map(_LENGTHS.unpack_from, repeat(data), starts)
        bodies = (
            data[at + OVERHEAD + properties_length : at + total]
            for at, (total, properties_length) in zip(starts, lengths, strict=True)
        )
        return map(Message, count(self._next_offset + skipped), bodies, repeat(self), starts)


class DeliveredFrames(FrameSource):
    """One DELIVER frame."""

    __slots__ = ("count",)

    subscription_id: str

    def __init__(self, frame: Frame, settler: Settler) -> None:
        """Raises PeerMisbehaved if the frame is no DELIVER."""
        about = frame.properties
        try:
            super().__init__(
                frame.body,
                about["topic"],
                int(about["partition"]),
                subscription_id=about["subscription_id"],
                attempt=int(about["attempt"]),
                settled=int(about["settled"]),
                suspects=about.get("suspects") == "true",
                settler=settler,
            )
            self.count = int(about["count"])
        except (KeyError, ValueError) as error:
            raise PeerMisbehaved(f"a DELIVER without a proper {error}") from None
