"""The parts of the JetStream API that the journal and the lease use: requests, answers, the state of a stream."""

from __future__ import annotations

from typing import Any

import msgspec
import trio

from qb.replication.journal.journal_store import Answer, JournalError
from qb.replication.nats.nats_client import NatsClient
from qb.replication.nats.nats_protocol import NatsError, NatsMessage

WRONG_LAST_SEQUENCE = (10071, 10164)
NO_STREAM = 10059
SETTLING = 30.0  # seconds that a cluster may take to elect its leaders
PAUSE = 0.1  # seconds before a request is sent again to a cluster that is not ready


class StreamUnfit(JournalError):
    """The stream is set so that the journal could lose records."""


class ApiError(msgspec.Struct, frozen=True):
    """Why JetStream refused something."""

    code: int = 0
    err_code: int = 0
    description: str = ""


class PublishAck(msgspec.Struct, frozen=True):
    """JetStream's answer to a message, or to a batch."""

    error: ApiError | None = None
    seq: int = 0


class JetStreamRefused(NatsError):
    """JetStream answered a request with an error."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(f"JetStream refuses: {error.description} ({error.err_code})")
        self.error = error


_ACKS = msgspec.json.Decoder(PublishAck)


def judge(reply: NatsMessage | NatsError, last: int) -> Answer:
    """Return what an answer to a publish means if all of it should end at position `last`."""
    if isinstance(reply, NatsError):
        return Answer.UNKNOWN
    try:
        ack = _ACKS.decode(reply.payload)
    except msgspec.DecodeError:
        return Answer.UNKNOWN
    if ack.error is not None:
        return Answer.REFUSED if ack.error.err_code in WRONG_LAST_SEQUENCE else Answer.UNKNOWN
    return Answer.STORED if ack.seq == last else Answer.UNKNOWN


async def call(client: NatsClient, method: str, request: Any = None, *, timeout: float = 5.0) -> dict[str, Any]:
    """Call a method of the API, as "STREAM.INFO.name". Raises JetStreamRefused, NatsError, trio.TooSlowError."""
    payload = b"" if request is None else msgspec.json.encode(request)
    reply = await client.request(f"$JS.API.{method}", payload, timeout=timeout)
    answer: dict[str, Any] = msgspec.json.decode(reply.payload)
    if "error" in answer:
        raise JetStreamRefused(msgspec.convert(answer["error"], ApiError, strict=False))
    return answer


async def call_when_ready(client: NatsClient, method: str, request: Any = None) -> dict[str, Any]:
    """As call(), but wait for a cluster that is starting or electing. Raises JetStreamRefused, trio.TooSlowError."""
    with trio.fail_after(SETTLING):
        while True:
            try:
                await client.wait_connected()
                return await call(client, method, request, timeout=2.0)
            except JetStreamRefused as refused:
                if refused.error.code < 500:
                    raise
            except (NatsError, trio.TooSlowError):
                pass
            await trio.sleep(PAUSE)


def stream_config(name: str, subjects: list[str], replicas: int) -> dict[str, Any]:
    """Return how a journal's stream is made: in files, with no limit that drops anything, with atomic batches."""
    return {
        "name": name,
        "subjects": subjects,
        "num_replicas": replicas,
        "storage": "file",
        "retention": "limits",
        "discard": "new",
        "max_msgs": -1,
        "max_bytes": -1,
        "max_age": 0,
        "max_msgs_per_subject": -1,
        "duplicate_window": 100_000_000,  # nanoseconds; the least that there is
        "allow_atomic": True,
        "allow_direct": True,
    }


def check_stream(config: dict[str, Any], subjects: list[str], replicas: int) -> None:
    """Raise StreamUnfit unless the stream keeps every record of a journal, and takes a fence as a whole."""
    name = config["name"]
    faults = {
        "allow_atomic must be true, else a fence cannot be written as a whole": not config.get("allow_atomic"),
        "allow_direct must be true, for reading": not config.get("allow_direct"),
        f"it must have {replicas} replicas, not {config['num_replicas']}": config["num_replicas"] < replicas,
        "it must be stored in files": config["storage"] != "file",
        "retention must be limits": config["retention"] != "limits",
        "no limit may drop records (max_age, max_msgs, max_bytes, max_msgs_per_subject)": any(
            config.get(limit, -1) > 0 for limit in ("max_age", "max_msgs", "max_bytes", "max_msgs_per_subject")
        ),
        "persist_mode must not be async": config.get("persist_mode") == "async",
        "it must not be sealed": config.get("sealed", False),
        f"it must take {', '.join(subjects)}": sorted(config.get("subjects", ())) != sorted(subjects),
    }
    found = [fault for fault, is_there in faults.items() if is_there]
    if found:
        raise StreamUnfit(f"stream {name} cannot be used as a journal: {'; '.join(found)}")


async def open_stream(client: NatsClient, name: str, subjects: list[str], *, replicas: int = 3) -> str:
    """Make a journal's stream if it is not there, and check it. Returns its identity: a namesake has another one.

    Raises StreamUnfit, JetStreamRefused, TooSlowError.
    """
    try:
        found = await call_when_ready(client, f"STREAM.INFO.{name}")
    except JetStreamRefused as refused:
        if refused.error.err_code != NO_STREAM:
            raise
        found = await call_when_ready(client, f"STREAM.CREATE.{name}", stream_config(name, subjects, replicas))
    check_stream(found["config"], subjects, replicas)
    return f"{name} {found['created']}"
