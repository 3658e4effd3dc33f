"""PUBLISH_RUN frames."""

from __future__ import annotations

from collections.abc import Sequence

from qb.core.wire.runs.publish_table import publish_run

ENOUGH = 1 << 30

Message = tuple[bytes, bytes, int]  # properties, body, timestamp


def run_of(number: int, messages: Sequence[Message], noise: int = 0) -> bytes:
    """Return a PUBLISH_RUN; what the broker does not read of its heads is filled with noise."""
    bodies = [len(body) for _, body, _ in messages]
    properties = [len(encoded) for encoded, _, _ in messages]
    junk = bytes([noise])
    frames = [junk * 16 + time.to_bytes(8) + junk * 4 + encoded + junk * 4 + body for encoded, body, time in messages]
    return publish_run(number, bodies, properties, ENOUGH) + b"".join(frames)
