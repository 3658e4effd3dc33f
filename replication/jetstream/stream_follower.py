"""Following a JetStream stream: a pull consumer that is made again whenever it is lost.

A pull waits for the next record, and ends with what is there then. Between two pulls a reader may let records gather:
then neither it nor a server is woken for each of them.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

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
HEARTBEAT = 0.5  # seconds after which a server that has nothing says that it is there
SILENCE = 1.5  # seconds after which a pull is lost of which nothing is heard: its server hangs or has gone
INACTIVE = 60.0  # seconds after which the server drops a consumer that is not used
# With no_wait and a time, a pull waits for the first message, and ends when there are no more.
PULL_REQUEST = msgspec.json.encode(
    {
        "batch": PULL,
        "expires": int(EXPIRES * 1e9),
        "max_bytes": PULL_BYTES,
        "no_wait": True,
        "idle_heartbeat": int(HEARTBEAT * 1e9),
    }
)
_IS_THERE, _NO_MORE, _TIMED_OUT, _TOO_LARGE = 100, 404, 408, 409


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
        if self.is_over:
            return  # the connection was lost, and what comes on the next one is not all that was sent
        if not reply.status:
            self.records.append(StoredRecord(_position(reply.reply), reply.payload))
            self._came += 1
            self.is_over = self._came == self._wanted
        elif reply.status != _IS_THERE:
            self.is_over = True
            self.has_all = reply.status in (_NO_MORE, _TIMED_OUT)
            self.is_broken = reply.status not in (_NO_MORE, _TIMED_OUT, _TOO_LARGE)
        self.changed.set()

    def lost(self) -> None:
        """The connection is gone, and with it what has not come."""
        self.is_over = self.is_broken = True
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
    while True:
        consumer = await _new_consumer(client, stream, first)
        if consumer is not None:
            async with aclosing(_pull_from(client, f"{stream}.{consumer}", first, gather)) as pulling:
                async for records in pulling:
                    first = records[-1].position + 1
                    yield records
        await trio.sleep(PAUSE)


async def _pull_from(
    client: NatsClient, consumer: str, start: int, gather: float
) -> AsyncGenerator[Sequence[StoredRecord], None]:
    """Yield what a consumer gives, until it is lost. It has an inbox of its own: nothing of another one comes there."""
    pull, inbox, first = StreamPull(), client.new_inbox(), start
    sid = client.subscribe(inbox, pull.replied, pull.lost)
    try:
        while client.is_connected and not pull.is_broken:
            begun = first
            pull.begin()
            client.publish(f"$JS.API.CONSUMER.MSG.NEXT.{consumer}", PULL_REQUEST, reply=inbox)
            while records := await _next(pull, gather):
                whole = _unbroken(records, records[0].position if first == start else first)
                if whole:
                    first = whole[-1].position + 1
                    yield whole
                if len(whole) < len(records):
                    return  # messages were lost on the way: begin again behind the last one
            if pull.has_all and first != begun:
                await trio.sleep(gather)
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
    with trio.move_on_after(SILENCE) as silence:
        while not pull.records and not pull.is_over:
            await pull.changed.wait()
            silence.deadline = trio.current_time() + SILENCE
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
