"""Publishing messages that are whole frames already, for those who build them in bulk."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from time import monotonic

from qb.clients.blocking.client import BrokerClient
from qb.clients.protocol.publish_frames import Body, PublishForm
from qb.clients.protocol.publish_tally import PublishTally
from qb.core.wire.frames import TYPE_AND_SEQUENCE, Frames, MessageType, frame_length
from qb.core.wire.runs.uniform_frames import UniformFrames


class PreparedFrames(PublishForm):
    """Frames, back to back, that lack nothing but their type and number."""

    __slots__ = ("_data",)

    def __init__(self, data: Body) -> None:
        self._data = data

    def frames(self, first_number: int, bodies: Sequence[bytes], type: int = MessageType.PUBLISH) -> Frames:
        """Return the frames, numbered from `first_number` on; `bodies` only says how many there are."""
        data, at, patch = bytearray(self._data), 0, TYPE_AND_SEQUENCE.pack_into
        rows = UniformFrames.at(data, 0, len(data)).sharing((0, 8)) if data else None
        if rows and rows.count == len(bodies):
            rows.fill(4, type.to_bytes(4))
            rows.number(first_number)
            return data
        for number in range(first_number, first_number + len(bodies)):
            patch(data, at + 4, type, number)
            at += frame_length(data, at)
        return data

    def publishes(self, first_number: int, bodies: Sequence[bytes], longest_run: int) -> Frames:
        """Return the frames, as they are."""
        return self.frames(first_number, bodies)


def publish_frames(client: BrokerClient, runs: Iterable[tuple[Body, int]]) -> int:
    """Publish runs of whole frames, each given with how many there are, in order; return how many there were in all.

    Each frame has the properties `topic`, first, and `partition`. Blocks until all are durable. Raises PublishFailed,
    PublishUncertain, and unchanged what the iterable raises; runs before the failure are published.
    """
    tally, answered, link, patience = PublishTally(), threading.Semaphore(0), client._link, client._request_timeout
    with link.attended():
        try:
            for data, count in runs:
                deadline = monotonic() + patience
                tally.add(link.publish(PreparedFrames(data), [b""] * count, answered, deadline, tally.check))
        except Exception as error:
            tally.fail(tally.sent, error)
        while tally.pending and answered.acquire(timeout=0 if tally.hopeless else patience):
            tally.collect()
        for _, batch in tally.pending:
            link.abandon(batch)
    return len(tally.offsets())
