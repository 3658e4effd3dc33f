"""A journal's store on a JetStream stream: positions are stream sequences."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Sequence
from functools import partial

import msgspec

from qb.replication.jetstream.answer_limit import AnswerLimit
from qb.replication.jetstream.jetstream_api import PAUSE, call, call_when_ready, judge, open_stream
from qb.replication.jetstream.stream_follower import follow_stream
from qb.replication.journal.journal_records import MOST_RECORD_BYTES
from qb.replication.journal.journal_store import Answered, Found, StoredRecord, Timers
from qb.replication.nats.nats_client import NatsClient
from qb.replication.nats.nats_conversation import Replied
from qb.replication.nats.nats_protocol import NatsError, NatsMessage

TIME_OUT = 5.0  # seconds after which a write or a read is answered with "unknown"
READ_BYTES = 8 << 20  # at most, in one read
_HEADERS_BYTES = 1024  # room for the headers of a message, which count as its payload
_END, _NOTHING = 204, 404


class JetStreamStore:
    """Belongs to the event loop's thread. The client must be running, and the timers too."""

    def __init__(self, client: NatsClient, timers: Timers, cell: str) -> None:
        self._client, self._timers, self._limit = client, timers, AnswerLimit(timers, TIME_OUT)
        self.stream, self._subject = f"QB_{cell}", f"qb.{cell}.j"
        self._subjects = [f"qb.{cell}.>"]
        self.most_bytes = MOST_RECORD_BYTES
        self.identity = ""  # of the stream, once it is open: another one of the same name has another

    async def open(self, *, replicas: int = 3) -> None:
        """Make the stream if it is not there, and check it and the server's limit.

        Raises StreamUnfit, JetStreamRefused, trio.TooSlowError.
        """
        server = await self._client.wait_connected()
        self.most_bytes = min(MOST_RECORD_BYTES, server.max_payload - _HEADERS_BYTES)
        self.identity = await open_stream(self._client, self.stream, self._subjects, replicas=replicas)

    def write(self, after: int, records: Sequence[bytes], answered: Answered) -> None:
        """As JournalStore says: one message, or one atomic batch."""
        headers: dict[str, object] = {"Nats-Expected-Last-Sequence": after}
        if len(records) > 1:
            headers = self._begin_batch(headers, records)
        self._ask(self._subject, records[-1], partial(_judged, answered, after + len(records)), headers)

    def _begin_batch(self, expectation: dict[str, object], records: Sequence[bytes]) -> dict[str, object]:
        """Send all records but the last; returns the headers of that one, with which JetStream stores them all."""
        batch: dict[str, object] = {"Nats-Batch-Id": secrets.token_hex(16)}
        for number, data in enumerate(records[:-1], 1):
            headers = {**batch, "Nats-Batch-Sequence": number, **(expectation if number == 1 else {})}
            self._client.publish(self._subject, data, headers)
        return {**batch, "Nats-Batch-Sequence": len(records), "Nats-Batch-Commit": 1}

    def look(self, first: int, most: int, found: Found) -> None:
        """As JournalStore says: any replica answers."""
        records: list[StoredRecord] = []

        def replied(reply: NatsMessage | NatsError) -> None:
            if isinstance(reply, NatsMessage) and not reply.status:
                records.append(StoredRecord(int(reply.headers["Nats-Sequence"]), reply.payload))
                return
            whole = isinstance(reply, NatsMessage) and reply.status in (_END, _NOTHING)
            found(records if whole else None)

        request = msgspec.json.encode({"seq": first, "batch": most, "max_bytes": READ_BYTES})
        self._ask(f"$JS.API.DIRECT.GET.{self.stream}", request, replied, many=True)

    def _ask(
        self,
        subject: str,
        payload: bytes,
        replied: Replied,
        headers: dict[str, object] | None = None,
        *,
        many: bool = False,
    ) -> None:
        """Send a request. It is answered once, or with many messages and then a status; in any case after a while."""

        def take(reply: NatsMessage | NatsError) -> None:
            if token is not None and not (many and isinstance(reply, NatsMessage) and not reply.status):
                self._client.forget(token)
                self._limit.answered(token)
            replied(reply)

        def give_up() -> None:
            if token is not None:
                self._client.forget(token)
            replied(NatsError("NATS did not answer"))

        token = self._client.send_request(subject, payload, take, headers, many=many)
        if token is None:
            self._timers.call_later(PAUSE, give_up)
        else:
            self._limit.add(token, give_up)

    def follow(self, first: int, gather: float = 0.0) -> AsyncGenerator[Sequence[StoredRecord], None]:
        """As JournalStore says."""
        return follow_stream(self._client, self.stream, first, gather)

    async def trim(self, before: int) -> None:
        """Remove the records below a position. Raises JetStreamRefused, trio.TooSlowError."""
        await call_when_ready(self._client, f"STREAM.PURGE.{self.stream}", {"seq": before})

    async def last_position(self) -> int:
        """Return the end as the leader knows it, for tools; decide nothing by it. Raises NatsError."""
        found = await call(self._client, f"STREAM.INFO.{self.stream}")
        return int(found["state"]["last_seq"])


def _judged(answered: Answered, last: int, reply: NatsMessage | NatsError) -> None:
    answered(judge(reply, last))
