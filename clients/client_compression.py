"""Compression between a client and its broker: what HELLO offers, what the broker has agreed to, frames both ways."""

from __future__ import annotations

from collections.abc import Mapping

from qb.core.wire.compression.codecs import check_codec, installed_codecs
from qb.core.wire.compression.compressed_frames import compress, inflate
from qb.core.wire.errors import PeerMisbehaved
from qb.core.wire.frames import LENGTH_AND_TYPE, MAX_PROPERTIES, OVERHEAD, Frame, Frames, MessageType, decode_frame


class ClientCompression:
    """What may be compressed on the connection that there is now; without one, nothing."""

    def __init__(self, codec: str | None = None) -> None:
        """`codec`: of all that is published and received. Raises ValueError, ImportError if it is not to be had."""
        self.codec = check_codec(codec)
        self._agreed: tuple[str, ...] = ()
        self._max_message_size = 0  # of the broker

    def hello(self) -> dict[str, str]:
        """Return the properties of HELLO."""
        offer = {"compression": ",".join(installed_codecs())} if installed_codecs() else {}
        return offer | ({"compressed_answers": self.codec} if self.codec else {})

    def welcomed(self, properties: Mapping[str, str], max_message_size: int) -> None:
        """Take note of the broker's answer to HELLO."""
        self._agreed = tuple(properties.get("compression", "").split(","))
        self._max_message_size = max_message_size

    def packed(self, codec: str | None, frames: Frames, number: int) -> Frames:
        """Return frames as they travel: compressed, if that is wanted, agreed and worth it."""
        longest = self._max_message_size + MAX_PROPERTIES + OVERHEAD  # that the broker inflates
        if codec is None or codec not in self._agreed or len(frames) > longest:
            return frames
        made = compress(codec, (frames,), number)
        return frames if made is None or len(made) > self._max_message_size else made

    def inflated(self, frame: Frame) -> Frame:
        """Return the one frame in a COMPRESSED frame. Raises PeerMisbehaved."""
        whole = inflate(frame, self._agreed)
        if len(whole) < OVERHEAD or LENGTH_AND_TYPE.unpack_from(whole)[0] != len(whole):
            raise PeerMisbehaved("a compressed frame does not hold one whole frame")
        return decode_frame(whole, lend=LENGTH_AND_TYPE.unpack_from(whole)[1] == MessageType.ACK)
