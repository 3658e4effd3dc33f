"""The frames of messages, built fast, and the checks that need no broker."""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from operator import itemgetter
from typing import Any

from qb.clients.protocol.client_errors import MessageTooLarge, refusal
from qb.core.wire.errors import BadRequest, Code
from qb.core.wire.frames import (
    LENGTH,
    MAX_PROPERTIES,
    OVERHEAD,
    RESERVED,
    TYPE_AND_SEQUENCE,
    Frames,
    MessageType,
    encode_properties,
)
from qb.core.wire.message_rules import LATEST_MS, bad_timestamp, reserved_property
from qb.core.wire.runs.publish_table import publish_run
from qb.core.wire.runs.uniform_frames import LEAST, build

Body = bytes | bytearray | memoryview
# What packs a head, how much longer than its body a frame is, what stands between its number and its body_length, and,
# for a run with a table, how long the properties are and a head that lacks what the broker writes.
FormParts = tuple[Callable[..., bytes], int, bytes, int, bytes]

LIKELY = 256  # bytes of a body, for the first guess of how many make a portion
_MIDDLE = struct.Struct(">QI")  # timestamp and properties_length
_NOT_READ = bytes(TYPE_AND_SEQUENCE.size + LENGTH.size)  # of a head in a run with a table, before the timestamp
_NO_LENGTH = bytes(LENGTH.size)
_properties_length, _blank = itemgetter(3), itemgetter(4)  # of FormParts
PORTION = 256 * 1024  # bytes of frames that publish_many sends at once: few system calls, little to copy


class PublishForm:
    """All that a row of publishes has in common: everything but numbers and bodies.

    Raises BadRequest, MessageTooLarge, TypeError for what the format cannot carry.
    """

    __slots__ = ("_middle", "_pack", "overhead", "topic")

    def __init__(
        self,
        topic: str,
        partition: int | None = None,
        key: str | None = None,
        properties: Mapping[str, str] | None = None,
        timestamp_ms: int = 0,
    ) -> None:
        self.topic = topic
        encoded = _encoded(topic, partition, key, properties)
        self._middle = _MIDDLE.pack(_checked_timestamp(timestamp_ms), len(encoded)) + encoded
        self._pack = _packer(len(self._middle))
        self.overhead = OVERHEAD + len(encoded)

    @property
    def parts(self) -> FormParts:
        """What the head of a frame is made of: heads of many forms are built without a call for each."""
        return self._pack, self.overhead, self._middle, self.overhead - OVERHEAD, self._blank

    @property
    def _blank(self) -> bytes:
        return b"".join((_NOT_READ, self._middle, _NO_LENGTH))

    def frames(self, first_number: int, bodies: Sequence[bytes], type: int = MessageType.PUBLISH) -> Frames:
        """Return one frame for each body, numbered from `first_number` on."""
        if len(bodies) == 1:
            size = len(bodies[0])
            return self._pack(self.overhead + size, int(type), first_number, self._middle, size) + bodies[0]
        return self._frames(first_number, bodies, list(map(len, bodies)), int(type))

    def _frames(self, first_number: int, bodies: Sequence[bytes], sizes: list[int], type: int) -> Frames:
        pack, overhead, middle = self._pack, self.overhead, self._middle
        if len(bodies) >= LEAST and _are_equal(sizes):
            return build(pack(overhead + sizes[0], type, first_number, middle, sizes[0]), bodies)
        heads = [pack(overhead + size, type, number, middle, size) for number, size in enumerate(sizes, first_number)]
        return _joined(b"", heads, bodies)

    def publishes(self, first_number: int, bodies: Sequence[bytes], longest_run: int) -> Frames:
        """Return them as frames() does, or as a PUBLISH_RUN of at most `longest_run` bytes if that is quicker."""
        if len(bodies) < LEAST:
            return self.frames(first_number, bodies)
        sizes = list(map(len, bodies))
        front = b""
        if not _are_equal(sizes):
            front = publish_run(first_number, sizes, [self.overhead - OVERHEAD] * len(sizes), longest_run)
        if not front:
            return self._frames(first_number, bodies, sizes, int(MessageType.PUBLISH))
        return self._blank.join([front, *bodies])


@lru_cache(maxsize=1024, typed=True)
def _plain_form(topic: str, partition: int | None) -> PublishForm:
    return PublishForm(topic, partition)


def form_of(
    topic: str, partition: int | None, key: str | None, properties: Mapping[str, str], timestamp_ms: int
) -> PublishForm:
    """Return the form of one publish: if it has nothing of its own, the one of the last like it. Raises as Form()."""
    if key is None and not properties and type(timestamp_ms) is int and timestamp_ms == 0:
        try:
            return _plain_form(topic, partition)
        except TypeError:
            pass  # not of a type that can be looked up: Form() says what is wrong with it
    return PublishForm(topic, partition, key, properties, timestamp_ms)


class MixedPublishForm(PublishForm):
    """A row of publishes that each have a form of their own."""

    __slots__ = ("_forms",)

    def __init__(self, forms: Sequence[FormParts]) -> None:
        self._forms = forms

    def frames(self, first_number: int, bodies: Sequence[bytes], type: int = MessageType.PUBLISH) -> Frames:
        """Return one frame for each body, numbered from `first_number` on."""
        type = int(type)
        heads = [
            pack(overhead + size, type, number, middle, size)
            for (pack, overhead, middle, _, _), size, number in zip(
                self._forms, map(len, bodies), range(first_number, first_number + len(bodies)), strict=True
            )
        ]
        return _joined(b"", heads, bodies)

    def publishes(self, first_number: int, bodies: Sequence[bytes], longest_run: int) -> Frames:
        """Return them as frames() does, or as a PUBLISH_RUN of at most `longest_run` bytes if that is quicker."""
        front = b""
        if len(bodies) >= LEAST:
            properties = list(map(_properties_length, self._forms))
            front = publish_run(first_number, list(map(len, bodies)), properties, longest_run)
        return _joined(front, map(_blank, self._forms), bodies) if front else self.frames(first_number, bodies)


def _are_equal(sizes: list[int]) -> bool:
    """Are all of them the same? At the first look at the ends, nearly always, if they are not."""
    return sizes[0] == sizes[-1] and sizes.count(sizes[0]) == len(sizes)


def _joined(front: bytes, heads: Iterable[bytes], bodies: Sequence[bytes]) -> bytes:
    """Return each head with its body behind it, and something in front of all."""
    parts = [front] * (2 * len(bodies) + 1)
    parts[1::2] = heads
    parts[2::2] = bodies
    return b"".join(parts)


@lru_cache(maxsize=1024)
def _packer(length: int) -> Callable[..., bytes]:
    """Return what packs total_length, type, number, `length` bytes of what follows, and body_length in one call."""
    return struct.Struct(f">IIQ{length}sI").pack


def _encoded(topic: str, partition: int | None, key: str | None, properties: Mapping[str, str] | None) -> bytes:
    """Return the properties of a PUBLISH, with `topic` first as the broker expects it."""
    _check_text("topic", topic)
    if not topic:
        raise refusal(Code.BAD_REQUEST, "a publish needs a topic")
    named = {"topic": topic}
    if partition is not None:
        if not isinstance(partition, int) or isinstance(partition, bool):
            raise TypeError(f"partition must be an int, not {type(partition).__name__}")
        named["partition"] = str(partition)
    if key is not None:
        _check_text("key", key)
        named["key"] = key
    for name, value in (properties or {}).items():
        _check_property(name, value)
        named[name] = value
    return _encode(named)


def _encode(properties: Mapping[str, str]) -> bytes:
    try:
        encoded = encode_properties(properties)
    except BadRequest as error:
        raise refusal(Code.BAD_REQUEST, str(error)) from None
    if len(encoded) > MAX_PROPERTIES:
        raise refusal(Code.MESSAGE_TOO_LARGE, f"properties of {len(encoded)} bytes are over the limit of 64 KiB")
    return encoded


def _check_property(name: str, value: str) -> None:
    if name in RESERVED:
        raise refusal(Code.BAD_REQUEST, reserved_property(name))
    _check_text("a property name", name)
    _check_text(f"property {name!r}", value)


def _check_text(what: str, value: object) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{what} must be a str, not {type(value).__name__}")


def _checked_timestamp(timestamp_ms: int) -> int:
    if not isinstance(timestamp_ms, int):
        raise TypeError(f"timestamp_ms must be an int, not {type(timestamp_ms).__name__}")
    if not 0 <= timestamp_ms <= LATEST_MS:
        raise refusal(Code.BAD_REQUEST, bad_timestamp(timestamp_ms))
    return timestamp_ms


def as_bytes(body: Body) -> bytes:
    """Return the body as bytes, which cannot change any more. Raises TypeError for what is not bytes-like."""
    if isinstance(body, bytes):
        return body
    if isinstance(body, str):
        raise TypeError("a message is bytes, not str: use publish_text(), or encode the text first")
    if not isinstance(body, bytearray | memoryview):
        raise TypeError(f"a message is bytes, bytearray or memoryview, not {type(body).__name__}")
    return bytes(body)


def check_size(body: bytes, limit: int) -> None:
    """Raise MessageTooLarge if the broker would refuse so long a body (and perhaps the connection with it)."""
    if len(body) > limit:
        raise MessageTooLarge(
            Code.MESSAGE_TOO_LARGE, f"a body of {len(body)} bytes is over this broker's limit of {limit}"
        )


class BodyBatcher:
    """Gathers bodies, one after another, into portions worth a system call."""

    __slots__ = ("_bodies", "_enough", "_limit", "_overhead", "_size")

    def __init__(self, overhead: int, limit: int, enough: int = PORTION) -> None:
        """`overhead` is what a frame adds to its body; `limit` is the longest body that the broker takes."""
        self._overhead, self._limit, self._enough = overhead, limit, enough
        self._bodies: list[bytes] = []
        self._size = 0

    def add(self, body: Body) -> bool:
        """Take a body; True if the portion is full. Raises TypeError, MessageTooLarge."""
        if type(body) is not bytes:
            body = as_bytes(body)
        length = len(body)
        if length > self._limit:
            check_size(body, self._limit)
        self._bodies.append(body)
        self._size += self._overhead + length
        return self._size >= self._enough

    def take(self) -> list[bytes]:
        """Return what was gathered and start anew."""
        bodies, self._bodies, self._size = self._bodies, [], 0
        return bodies


def portions(
    bodies: Iterable[Body], overhead: int, limit: int, enough: int = PORTION
) -> Generator[list[bytes], None, None]:
    """Yield the bodies in portions. Whatever goes wrong is raised after all bodies before it have been yielded."""
    if isinstance(bodies, list):
        done = 0
        for portion in _slices(bodies, overhead, limit, enough):
            yield portion
            done += len(portion)
        bodies = islice(bodies, done, None)
    portioner = BodyBatcher(overhead, limit, enough)
    failure: Exception | None = None
    try:
        for body in bodies:
            if portioner.add(body):
                yield portioner.take()
    except Exception as error:
        failure = error
    if rest := portioner.take():
        yield rest
    if failure is not None:
        raise failure


def _slices(bodies: list[Any], overhead: int, limit: int, enough: int) -> Iterator[list[bytes]]:
    """Yield portions of a list without a look at each body, while those are bytes and none is too long."""
    at, count = 0, enough // (overhead + LIKELY) + 1
    while portion := bodies[at : at + count]:
        if set(map(type, portion)) != {bytes}:
            return
        sizes = list(map(len, portion))
        size = sum(sizes)
        if max(sizes) > limit:
            return
        if size > 2 * enough and len(portion) > 1:
            count = max(1, count // 4)
            continue
        yield portion
        at += len(portion)
        count = enough // (overhead + size // len(portion)) + 1
