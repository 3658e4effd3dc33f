"""Whole frames become the body of one COMPRESSED frame, and frames again.

What comes from the network is inflated in portions, never beyond
the size that its frame declares, and with a window of at most MAX_WINDOW bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from qb.core.wire.errors import PeerMisbehaved
from qb.core.wire.frames import Frame, MessageType, encode_frame
from qb.core.wire.whole_numbers import whole_number

Buffer = bytes | bytearray | memoryview

SMALLEST = 1_024  # bytes of frames that are worth compressing
PORTION = 262_144  # bytes that are compressed or inflated in one step
MAX_WINDOW = 8 << 20  # of zstd: how far back a frame may refer; every decoder supports so much
MAX_FRAME = 256 << 20  # bytes that a client inflates of one frame


def compress(codec: str, parts: Sequence[Buffer], number: int = 0) -> bytes | None:
    """Return frames as one COMPRESSED frame, or None if they are short or do not become shorter.

    Takes about 2 ms for each MiB.
    """
    size = sum(map(len, parts))
    if size < SMALLEST:
        return None
    deflater = Deflater(codec, size)
    for portion in portions_of(parts):
        deflater.add(portion)
    return deflater.frame(number)


def portions_of(parts: Iterable[Buffer]) -> Iterator[memoryview]:
    """Return the same bytes in portions that are compressed in one step each."""
    for part in parts:
        for at in range(0, len(part), PORTION):
            yield memoryview(part)[at : at + PORTION]


class Deflater:
    """Makes one COMPRESSED frame from whole frames, a portion at a time."""

    def __init__(self, codec: str, size: int) -> None:
        """`size`: of all portions together."""
        self._codec, self._size = codec, size
        self._compressed: list[bytes] = []
        self._compressor: Any
        if codec == "lz4":
            from lz4.frame import LZ4FrameCompressor

            self._compressor = LZ4FrameCompressor()
            self._compressed.append(self._compressor.begin(size))
        else:
            import zstandard

            self._compressor = zstandard.ZstdCompressor(level=1).compressobj(
                size=size
            )  # as good for runs of JSON, quicker

    def add(self, portion: memoryview) -> None:
        """Compress the next portion."""
        self._compressed.append(self._compressor.compress(portion))

    def frame(self, number: int = 0) -> bytes | None:
        """Return the COMPRESSED frame, or None if it is no shorter than what is in it."""
        self._compressed.append(self._compressor.flush())
        properties = {"codec": self._codec, "size": str(self._size)}
        frame = encode_frame(MessageType.COMPRESSED, number, 0, properties, b"".join(self._compressed))
        return frame if len(frame) < self._size else None


class Inflater:
    """The frames in one COMPRESSED frame, a portion at a time."""

    def __init__(self, frame: Frame, accepted: Iterable[str], max_size: int) -> None:
        """Raises PeerMisbehaved for a codec that is not `accepted`, and for a size that is not to be inflated."""
        codec, size = frame.properties.get("codec", ""), frame.properties.get("size", "")
        if codec not in accepted:
            raise PeerMisbehaved(f"a compressed frame of codec {codec[:40]!r}, which was not agreed in HELLO")
        declared = whole_number(size, least=1)
        if declared is None or declared > max_size:
            raise PeerMisbehaved(f"the size of a compressed frame is {size[:40]!r}, not between 1 and {max_size}")
        self.left = declared  # bytes that are not inflated yet
        self._source: _Source = _Lz4Source(frame.body) if codec == "lz4" else _ZstdSource(frame.body)

    def read(self, most: int = PORTION) -> bytes:
        """Return the next bytes, at most so many; b"" at the end. Raises PeerMisbehaved."""
        wanted = min(most, self.left)
        try:
            data = self._source.read(wanted)
            self.left -= len(data)
            ended = self.left > 0 or not self._source.read(1)
        except Exception as error:  # the packages have exceptions of their own, and RuntimeError and MemoryError
            raise PeerMisbehaved(f"the body of a compressed frame cannot be inflated: {error}") from None
        if len(data) < wanted or not ended:
            raise PeerMisbehaved("the body of a compressed frame does not have the size that the frame says")
        return data


class _Source(Protocol):
    def read(self, most: int, /) -> bytes: ...


class _ZstdSource:
    def __init__(self, data: bytes) -> None:
        import zstandard

        self._reader: Any = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW).stream_reader(data)

    def read(self, most: int, /) -> bytes:
        return bytes(self._reader.read(most))


class _Lz4Source:
    def __init__(self, data: bytes) -> None:
        from lz4.frame import LZ4FrameDecompressor

        self._decompressor, self._data = LZ4FrameDecompressor(), data

    def read(self, most: int, /) -> bytes:
        parts: list[bytes] = []
        while most and not self._decompressor.eof:
            part = self._decompressor.decompress(self._data, most)
            self._data = b""
            if not part and self._decompressor.needs_input:
                break
            parts.append(part)
            most -= len(part)
        return b"".join(parts) or (self._decompressor.unused_data or b"" if most else b"")


def inflate(frame: Frame, accepted: Iterable[str], max_size: int = MAX_FRAME) -> bytes:
    """Return all frames in a COMPRESSED frame at once. Raises PeerMisbehaved."""
    inflater = Inflater(frame, accepted, max_size)
    return inflater.read(inflater.left)
