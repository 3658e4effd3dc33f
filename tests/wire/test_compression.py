"""Frames become one COMPRESSED frame and the same frames again, and nothing is inflated beyond what is declared."""

from __future__ import annotations

import subprocess
import sys

import pytest
import zstandard

from qb.core.wire.compression import codecs
from qb.core.wire.compression.codecs import check_codec, installed_codecs
from qb.core.wire.compression.compressed_frames import MAX_WINDOW, SMALLEST, Inflater, compress, inflate
from qb.core.wire.errors import PeerMisbehaved
from qb.core.wire.frames import Frame, MessageType, decode_frame

CODECS = ["zstd", "lz4"]
PLAIN = b'{"id": 7, "item": "tea"}' * 100_000


def made(body: bytes, size: int, codec: str = "zstd") -> Frame:
    return Frame(MessageType.COMPRESSED, 1, 0, {"codec": codec, "size": str(size)}, body)


@pytest.mark.parametrize("codec", CODECS)
def test_what_was_compressed_is_inflated_in_portions_or_at_once(codec):
    frame = compress(codec, (PLAIN[:1_000], PLAIN[1_000:]), 7)
    assert frame is not None
    assert len(frame) * 4 < len(PLAIN)
    decoded = decode_frame(frame)
    assert (decoded.type, decoded.sequence_number) == (MessageType.COMPRESSED, 7)
    assert inflate(decoded, CODECS) == PLAIN
    inflater, portions = Inflater(decoded, CODECS, len(PLAIN)), []
    while inflater.left:
        portions.append(inflater.read(999_999))
    assert [len(portion) for portion in portions] == [999_999, 999_999, len(PLAIN) - 2 * 999_999]
    assert b"".join(portions) == PLAIN


@pytest.mark.parametrize("codec", CODECS)
def test_what_is_short_or_does_not_become_shorter_is_left_as_it_is(codec):
    assert compress(codec, (b"a" * (SMALLEST - 1),)) is None
    noise = b"".join(bytes([n * n * 7919 % 251, n * 31 % 256, n // 7 % 256]) for n in range(0, 4_000, 3))
    assert compress(codec, (zstandard.ZstdCompressor(level=19).compress(noise * 3)[:1_100],)) is None


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    ("spoil", "declared"),
    [
        (lambda body: body, len(PLAIN) - 1),
        (lambda body: body, len(PLAIN) + 1),
        (lambda body: body[: len(body) // 2], len(PLAIN)),
        (lambda body: b"", len(PLAIN)),
        (lambda body: b"garbage" * 50, len(PLAIN)),
        (lambda body: body + body, len(PLAIN)),
        (lambda body: body + b"more", len(PLAIN)),
    ],
    ids=["too small", "too large", "truncated", "empty", "garbage", "twice", "bytes behind it"],
)
def test_a_body_that_is_not_what_its_frame_says_is_refused(codec, spoil, declared):
    frame = compress(codec, (PLAIN,))
    assert frame is not None
    with pytest.raises(PeerMisbehaved):
        inflate(made(spoil(decode_frame(frame).body), declared, codec), CODECS)


@pytest.mark.parametrize("size", ["", "-1", "0", "1e9", "²", "9" * 30, str(2**40)])
def test_a_declared_size_that_is_no_number_or_over_the_limit_is_refused_before_anything_is_inflated(size):
    frame = Frame(MessageType.COMPRESSED, 1, 0, {"codec": "zstd", "size": size}, b"")
    with pytest.raises(PeerMisbehaved, match="size of a compressed frame"):
        Inflater(frame, CODECS, 1 << 20)


def test_a_window_over_the_limit_is_refused():
    wide = zstandard.ZstdCompressionParameters.from_level(3, window_log=MAX_WINDOW.bit_length())
    made_wide = zstandard.ZstdCompressor(compression_params=wide).compressobj()
    body = made_wide.compress(PLAIN) + made_wide.flush()
    with pytest.raises(PeerMisbehaved, match="too much memory"):
        inflate(made(body, len(PLAIN)), CODECS)


def test_a_codec_that_was_not_agreed_is_refused():
    frame = compress("zstd", (PLAIN,))
    assert frame is not None
    with pytest.raises(PeerMisbehaved, match="not agreed"):
        inflate(decode_frame(frame), ["lz4"])


def test_an_unknown_codec_and_a_missing_package_are_refused_in_a_sentence(monkeypatch):
    with pytest.raises(ValueError, match="compression must be one of 'zstd', 'lz4' or None, not 'gzip'"):
        check_codec("gzip")
    monkeypatch.setattr(codecs, "installed_codecs", lambda: ("lz4",))
    with pytest.raises(ImportError, match=r"needs the package zstandard: .* pip install 'qb-broker\[compression\]'"):
        check_codec("zstd")


def test_no_package_is_imported_before_it_is_used():
    loaded = "import sys, qb; qb.BrokerClient(); print(sorted({'zstandard', 'lz4', 'opentelemetry'} & {*sys.modules}))"
    run = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, timeout=30, check=True)
    assert run.stdout.strip() == "[]"
    assert installed_codecs() == ("zstd", "lz4")
