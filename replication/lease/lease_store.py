"""The lease in a key of a NATS key-value bucket, changed by compare-and-set on its revision."""

from __future__ import annotations

import msgspec

from qb.replication.jetstream.jetstream_api import (
    NO_STREAM,
    WRONG_LAST_SEQUENCE,
    JetStreamRefused,
    PublishAck,
    call,
    call_when_ready,
)
from qb.replication.lease.lease_state import LeaseRecord
from qb.replication.nats.nats_client import NatsClient
from qb.replication.nats.nats_protocol import NatsError

BUCKET = "QB_LEASES"
NO_MESSAGE = 10037


class LeaseTaken(NatsError):
    """Another broker has changed the lease first."""


class LeaseStore:
    """One cell's lease. Every method may block for as long as `timeout`."""

    def __init__(self, client: NatsClient, cell: str, *, timeout: float = 2.0) -> None:
        self._client, self._timeout = client, timeout
        self._stream, self._subject = f"KV_{BUCKET}", f"$KV.{BUCKET}.{cell}"

    async def open(self, *, replicas: int = 3) -> None:
        """Make the bucket if it is not there. Raises JetStreamRefused, trio.TooSlowError."""
        config = {
            "name": self._stream,
            "subjects": [f"$KV.{BUCKET}.>"],
            "num_replicas": replicas,
            "storage": "file",
            "max_msgs_per_subject": 1,
            "discard": "new",
            "allow_rollup_hdrs": True,
            "deny_delete": True,
        }
        try:
            await call_when_ready(self._client, f"STREAM.INFO.{self._stream}")
        except JetStreamRefused as refused:
            if refused.error.err_code != NO_STREAM:
                raise
            await call_when_ready(self._client, f"STREAM.CREATE.{self._stream}", config)

    async def read(self) -> tuple[int, LeaseRecord | None]:
        """Return the revision and the lease; 0 and None before the first one. Raises NatsError, trio.TooSlowError."""
        request = {"last_by_subj": self._subject}
        try:
            found = await call(self._client, f"STREAM.MSG.GET.{self._stream}", request, timeout=self._timeout)
        except JetStreamRefused as refused:
            if refused.error.err_code != NO_MESSAGE:
                raise
            return 0, None
        message = msgspec.convert(found["message"], StoredLease, strict=False)
        return message.seq, msgspec.json.decode(message.data, type=LeaseRecord)

    async def write(self, revision: int, record: LeaseRecord) -> int:
        """Store the lease if its revision is still this one; returns the new one.

        Raises LeaseTaken if it is not; NatsError or trio.TooSlowError if the outcome is unknown.
        """
        headers = {"Nats-Expected-Last-Subject-Sequence": revision}
        payload = msgspec.json.encode(record)
        reply = await self._client.request(self._subject, payload, timeout=self._timeout, headers=headers)
        ack = msgspec.json.decode(reply.payload, type=PublishAck)
        if ack.error is None:
            return ack.seq
        if ack.error.err_code in WRONG_LAST_SEQUENCE:
            raise LeaseTaken("another broker has changed the lease first")
        raise JetStreamRefused(ack.error)


class StoredLease(msgspec.Struct, frozen=True):
    """The answer of JetStream to a read."""

    seq: int
    data: bytes  # base64 in JSON
