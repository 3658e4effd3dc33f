"""What a broker that passes a peer on says to the owner: a first line about the peer, then its bytes in pieces.

The owner answers with the bytes for the peer and nothing else. Pieces let the relay say in between how much of them the
peer's TCP has acknowledged, which for a peer that knows only types 1 to 9 is what counts as delivered.
"""

from __future__ import annotations

import struct

import msgspec

FIRST = b"QB-RELAY 1 "
MOST_LINE = 4096  # bytes of the first line
_DATA, _ACKED, _END = 0, 1, 2
_PIECE = struct.Struct(">BI")
_COUNT = struct.Struct(">Q")


class RelayRefused(Exception):
    """What came is no relay of this cell."""


class RelayPreamble(msgspec.Struct, frozen=True):
    """Whom the relay speaks for."""

    cell: str
    epoch: int  # of the owner that is meant; another one closes
    door: str  # "frames", "json" or "http"
    host: str  # the peer's address
    port: int
    principal: str | None = None  # the common name of the peer's certificate; tokens are among its bytes


def encode_preamble(preamble: RelayPreamble) -> bytes:
    """Return the first line."""
    return FIRST + msgspec.json.encode(preamble) + b"\n"


def decode_preamble(line: bytes) -> RelayPreamble:
    """Return what a first line says. Raises RelayRefused."""
    if not line.startswith(FIRST):
        raise RelayRefused("its first line is not that of a relay")
    try:
        return msgspec.json.decode(line[len(FIRST) :], type=RelayPreamble)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise RelayRefused("its first line cannot be read") from None


def encode_data(data: bytes) -> bytes:
    """Return bytes of the peer as a piece."""
    return _PIECE.pack(_DATA, len(data)) + data


def encode_acked(count: int) -> bytes:
    """Return the piece that says how many bytes in all the peer has acknowledged."""
    return _PIECE.pack(_ACKED, _COUNT.size) + _COUNT.pack(count)


def encode_end() -> bytes:
    """Return the piece that says that the peer sends no more; it may still be answered."""
    return _PIECE.pack(_END, 0)


class RelayReader:
    """The owner's side: pieces in, the peer's bytes out."""

    def __init__(self) -> None:
        self._rest = bytearray()  # of a head or an acknowledgement that is not whole
        self._left = 0  # bytes of the current piece of data that have not come
        self.acked = 0
        self.ended = False  # will the peer send no more?

    def take(self, received: bytes | memoryview) -> bytes:
        """Return what the peer has sent, as far as it has come. Raises RelayRefused."""
        self._rest += received
        found: list[bytes] = []
        at = 0
        while at < len(self._rest):
            if self._left:
                part = bytes(self._rest[at : at + self._left])
                found.append(part)
                at += len(part)
                self._left -= len(part)
                continue
            if len(self._rest) - at < _PIECE.size:
                break
            kind, size = _PIECE.unpack_from(self._rest, at)
            if kind == _DATA:
                at, self._left = at + _PIECE.size, size
            elif kind == _ACKED and size == _COUNT.size:
                if len(self._rest) - at < _PIECE.size + size:
                    break
                (self.acked,) = _COUNT.unpack_from(self._rest, at + _PIECE.size)
                at += _PIECE.size + size
            elif kind == _END and not size:
                at, self.ended = at + _PIECE.size, True
            else:
                raise RelayRefused(f"a piece of kind {kind} with {size} bytes is not known")
        del self._rest[:at]
        return b"".join(found)
