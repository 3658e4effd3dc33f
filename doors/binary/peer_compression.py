"""Compression between the broker and one peer: what was agreed in HELLO, both ways, and what it spares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

import trio

from qb.core.broker.broker_metrics import BrokerMetrics
from qb.core.pacing import current
from qb.core.wire.compression.codecs import installed_codecs
from qb.core.wire.compression.compressed_frames import PORTION, Deflater, Inflater, compress, portions_of
from qb.core.wire.frames import MAX_PROPERTIES, OVERHEAD, Frame

Parts = tuple[bytes | memoryview, ...]
Pack = Callable[..., Parts]  # takes the parts of a frame and returns what to send in its place

LONGEST_PUSH = 2 << 20  # bytes of a delivery, which is compressed in one step; one with a longer message is not
MOST_PUSHED = 16 << 20  # bytes of deliveries that are compressed in one pass of the event loop, for all peers: 20 ms


def unpacked(*parts: bytes | memoryview) -> Parts:
    """Return them as they are."""
    return parts


class PushPace:
    """How many bytes of deliveries were compressed in this pass of the event loop."""

    def __init__(self) -> None:
        self._pass, self._bytes = 0.0, 0

    def allows(self, size: int) -> bool:
        """Count so many bytes, and say whether they may be compressed. All may where passes are not measured."""
        if self._pass != current.pass_began or current.pass_began == inf:
            self._pass, self._bytes = current.pass_began, 0
        self._bytes += size
        return self._bytes <= MOST_PUSHED


_pace = PushPace()  # of this process, as the event loop is


class PeerCompression:
    """What one peer may send compressed, and what it is sent compressed. Nothing, until it has said so in HELLO."""

    __slots__ = ("_accepted", "_allowed", "_max_size", "_metrics", "_wanted")

    def __init__(self, metrics: BrokerMetrics, allowed: Sequence[str], max_message_size: int) -> None:
        self._metrics, self._allowed = metrics, allowed
        self._max_size = max_message_size + MAX_PROPERTIES + OVERHEAD
        self._accepted: Sequence[str] = ()
        self._wanted: str | None = None  # the codec of what it is sent

    def agree(self, hello: Frame) -> dict[str, str]:
        """Take note of what a HELLO offers and wants; returns what the answer says about it."""
        offered = hello.properties.get("compression", "").split(",")
        self._accepted = [codec for codec in installed_codecs() if codec in offered and codec in self._allowed]
        wanted = hello.properties.get("compressed_answers")
        self._wanted = wanted if wanted in self._accepted else None
        answer = {"compression": ",".join(self._accepted)} if self._accepted else {}
        return answer | ({"compressed_answers": self._wanted} if self._wanted else {})

    def inflater(self, frame: Frame) -> Inflater:
        """Return what inflates a COMPRESSED frame. Raises PeerMisbehaved."""
        inflater = Inflater(frame, self._accepted, self._max_size)
        self._count("in", len(frame.body), inflater.left)
        return inflater

    def pushed(self, *parts: bytes | memoryview) -> Parts:
        """Return what to send in place of a frame that the peer did not ask for, in one step."""
        if self._wanted is None:
            return parts
        size = sum(map(len, parts))
        if size > LONGEST_PUSH or not _pace.allows(size):
            return parts
        return self._counted(parts, compress(self._wanted, parts))

    async def answered(self, *parts: bytes | memoryview) -> Parts:
        """Return what to send in place of an answer; other tasks run between its portions."""
        if self._wanted is None:
            return parts
        size = sum(map(len, parts))
        if size <= PORTION:
            return self._counted(parts, compress(self._wanted, parts))
        deflater = Deflater(self._wanted, size)
        for portion in portions_of(parts):
            deflater.add(portion)
            await trio.lowlevel.checkpoint()
        return self._counted(parts, deflater.frame())

    def _counted(self, parts: Parts, made: bytes | None) -> Parts:
        if made is None:
            return parts
        self._count("out", len(made), sum(map(len, parts)))
        return (made,)

    def _count(self, direction: str, on_the_wire: int, inflated: int) -> None:
        self._metrics.compressed_bytes[direction] += on_the_wire
        self._metrics.inflated_bytes[direction] += inflated
