"""Following a JetStream stream: a pull consumer that is made again whenever it is lost.

A pull waits for the next record, and ends with what is there then. Between two pulls a reader may let records gather:
then neither it nor a server is woken for each of them.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

import msgspec
import trio

from qb.replication.jetstream.jetstream_api import PAUSE, JetStreamRefused, call
from qb.replication.journal.journal_store import StoredRecord
from qb.replication.nats.nats_client import NatsClient
from qb.replication.nats.nats_protocol import NatsError, NatsMessage
from qb.storage.signals import Signal

PULL = 256  # messages that are asked for at a time
PULL_BYTES = 4 << 20
EXPIRES = 2.0  # seconds after which an unanswered pull ends
INACTIVE = 60.0  # seconds after which the server drops a consumer that is not used
# With no_wait and a time, a pull waits for the first message, and ends when there are no more.
PULL_REQUEST = msgspec.json.encode(
    {"batch": PULL, "expires": int(EXPIRES * 1e9), "max_bytes": PULL_BYTES, "no_wait": True}
)
_NO_MORE, _TIMED_OUT, _TOO_LARGE = 404, 408, 409


class StreamPull:
    """What has come of the newest pull, and whether it has ended."""

    def __init__(self) -> None:
        self.records: list[StoredRecord] = []
        self.is_over = self.is_broken = False
        self.has_all = False  # did it end because there was nothing more?
        self._came = self._wanted = 0
        self.changed = Signal()

    def begin(self, wanted: int = PULL) -> None:
        """A request for so many messages is sent."""
        self.is_over = self.is_broken = self.has_all = False
        self._came, self._wanted = 0, wanted

    def replied(self, reply: NatsMessage) -> None:
        """Take one of its answers."""
        if not reply.status:
            self.records.append(StoredRecord(_position(reply.reply), reply.payload))
            self._came += 1
            self.is_over = self._came == self._wanted
        else:
            self.is_over = True
            self.has_all = reply.status in (_NO_MORE, _TIMED_OUT)
            self.is_broken = reply.status not in (_NO_MORE, _TIMED_OUT, _TOO_LARGE)
        self.changed.set()

    def take(self) -> list[StoredRecord]:
        """Return what has come."""
        taken, self.records = self.records, []
        return taken


def _position(reply: str) -> int:
    """Return the stream sequence of a message, which stands in its reply subject; newer servers name an account too."""
    fields = reply.split(".")
    return int(fields[5] if len(fields) < 11 else fields[7])


async def follow_stream(
    client: NatsClient, stream: str, first: int, gather: float = 0.0
) -> AsyncGenerator[Sequence[StoredRecord], None]:
    """Yield all records from a position on, for ever: as they come, or those of `gather` seconds together."""
    pull = StreamPull()
    inbox = client.new_inbox()
    sid = client.subscribe(inbox, pull.replied)
    try:
        while True:
            consumer = await _new_consumer(client, stream, first)
            start = first
            while consumer is not None and client.is_connected:
                begun = first
                pull.begin()
                client.publish(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}", PULL_REQUEST, reply=inbox)
                while records := await _next(pull, gather):
                    whole = _unbroken(records, records[0].position if first == start else first)
                    if whole:
                        first = whole[-1].position + 1
                        yield whole
                    if len(whole) < len(records):
                        pull.is_broken = True  # messages were lost on the way: begin again behind the last one
                        break
                if pull.is_broken:
                    break
                if pull.has_all and first != begun:
                    await trio.sleep(gather)
            await trio.sleep(PAUSE)
    finally:
        client.unsubscribe(sid)


def _unbroken(records: list[StoredRecord], first: int) -> list[StoredRecord]:
    """Return the records from a position on up to where one is missing."""
    for number, each in enumerate(records):
        if each.position != first + number:
            return records[:number]
    return records


async def _next(pull: StreamPull, gather: float) -> list[StoredRecord]:
    """Return what comes next, with what comes within `gather` seconds of it, or an empty list when the pull is over."""
    with trio.move_on_after(EXPIRES * 2):
        while not pull.records and not pull.is_over:
            await pull.changed.wait()
    if not pull.is_over:
        with trio.move_on_after(gather):
            while not pull.is_over:
                await pull.changed.wait()
    if not pull.records and not pull.is_over:
        pull.is_broken = True  # the server said nothing, not even that the time is over
    return pull.take()


def consumer_config(first: int) -> dict[str, object]:
    """Return how a consumer is made that lives in the memory of one server, and reads that server's copy."""
    return {
        "deliver_policy": "by_start_sequence",
        "opt_start_seq": first,
        "ack_policy": "none",
        "inactive_threshold": int(INACTIVE * 1e9),
        "num_replicas": 1,
        "mem_storage": True,
    }


async def _new_consumer(client: NatsClient, stream: str, first: int) -> str | None:
    """Make a consumer; returns its name, or None if that failed."""
    config = consumer_config(first)
    try:
        made = await call(client, f"CONSUMER.CREATE.{stream}", {"stream_name": stream, "config": config})
    except (JetStreamRefused, NatsError, trio.TooSlowError):
        return None
    return str(made["name"])
