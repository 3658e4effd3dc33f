"""The client's side of the protocol, bytes in and events out.

A conversation outlives its connections: it knows the producer id and its secret, counts the publishes and keeps those
that are not answered, and likewise what was staged for transactions. On each new connection send open(); after Welcome
send unanswered(), before anything else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

from qb.clients.client_compression import ClientCompression
from qb.clients.credentials import Credentials
from qb.clients.protocol.client_errors import (
    ConnectionLost,
    NotOwner,
    OffsetOutOfRange,
    PublishUncertain,
    QuotaExceeded,
    RequestRefused,
    refusal,
)
from qb.clients.protocol.publish_frames import Body, PublishForm
from qb.clients.protocol.unacked_publishes import (
    Answer,
    HeldStageFrame,
    RefusedPublishes,
    StoredPublishes,
    UnackedBatch,
    UnackedPublishes,
)
from qb.core.wire.errors import Code, PeerMisbehaved
from qb.core.wire.frames import (
    HEAD,
    LENGTH,
    LENGTH_AND_TYPE,
    OVERHEAD,
    PROBE,
    Frame,
    Frames,
    MessageType,
    decode_frame,
    encode_frame,
    frame_length,
)
from qb.core.wire.runs.publish_table import FEATURE, MOST_BYTES, as_publishes, is_publish_run

PROTOCOL = "1"
FIRST_REQUEST = 2**63  # publishes are numbered from 1 up, everything else from here up
WINDOW_NUMBERS = 131_072  # the broker remembers 262,144 numbers of a producer
WINDOW_BYTES = 16 * 1024 * 1024
MAX_FRAME = 256 * 1024 * 1024  # longer than any broker sends: a peer that claims more is not one
LONG_FRAME = 128 * 1024  # one that is longer gets a buffer of its own, which is read into and not copied again


ACK, COMPRESSED = int(MessageType.ACK), int(MessageType.COMPRESSED)
_ACK_TYPE = ACK.to_bytes(LENGTH_AND_TYPE.size - LENGTH.size)
_STORED = re.compile(
    rb"status=success\0topic=[A-Za-z0-9._-]+\0partition=(\d{1,20})\0offset=(\d{1,20})\0"
    rb"durability=([a-z]+)\0count=(\d{1,20})\0(duplicate=true\0)?(unverified=true\0)?"
)


class Welcome(NamedTuple):
    """The broker has accepted this connection."""

    server: str
    uncertain: Sequence[UnackedBatch] = ()  # of a producer that we are no longer: they are not sent again


class TurnedAway(NamedTuple):
    """The broker does not want this connection; it closes it."""

    error: RequestRefused


class RequestAnswered(NamedTuple):
    """The reply to a request or a ping of ours; see answer_of(). The body of a long one is a memoryview."""

    number: int
    frame: Frame


class PublishesSettled(NamedTuple):
    """Everything in these batches has its answer now."""

    batches: list[UnackedBatch]


class BytesToSend(NamedTuple):
    """Bytes that the broker waits for."""

    data: bytes


class Goodbye(NamedTuple):
    """The broker is going away; nothing follows on this connection."""

    reason: str
    owner: str = ""  # the address of the broker of the cluster that takes over, if it is known


class PushedFrame(NamedTuple):
    """A frame that answers nothing: a delivery, for the listener."""

    frame: Frame


Event = Welcome | TurnedAway | RequestAnswered | PublishesSettled | BytesToSend | Goodbye | PushedFrame


class Conversation:
    """What a client knows of its broker. Does no I/O; not safe to share between threads without a lock."""

    def __init__(
        self,
        client_id: str | None = None,
        *,
        idempotent: bool = True,
        window_numbers: int = WINDOW_NUMBERS,
        window_bytes: int = WINDOW_BYTES,
        compression: str | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        self.compression = ClientCompression(compression)
        self.credentials = credentials or Credentials()
        self.max_message_size = 2**32 - 1  # until the broker says
        self._longest_run = 0  # bytes of a PUBLISH_RUN that the broker takes; 0: it is not known to take one
        self.transaction_bytes = 0  # that a TRANSACTION frame may carry; 0: the broker is not known to take one
        self.producer_id: int | None = None
        self._producer_secret: str | None = None  # older brokers give none
        self.epoch = 0  # the highest that a broker of a cluster has said: what has a lower one is outdated
        self.silence = inf  # seconds without a sign of life after which a broker of a cluster is asked for one
        self._client_id, self._idempotent = client_id, idempotent
        self._window = UnackedPublishes(window_numbers, window_bytes)
        self._staged = UnackedPublishes(FIRST_REQUEST, window_bytes)
        self._next_publish = 1
        self._next_request = FIRST_REQUEST
        self._hello: int | None = None  # the number of a HELLO that is not answered yet
        self._buffer = bytearray()
        self._position = 0
        self._long: bytearray | None = None  # a long frame of which not all has come yet
        self._filled = 0  # so much of it has

    def open(self) -> bytes:
        """Return what to send first on a new connection."""
        self._buffer, self._position, self._long = bytearray(), 0, None
        properties = {"protocol": PROTOCOL, "features": f"redirect,{FEATURE}", **self.compression.hello()}
        token = self.credentials.token()
        if token is not None:
            properties["token"] = token
        if self._client_id is not None:
            properties["client_id"] = self._client_id
        if self._idempotent:
            properties["producer_id"] = "new" if self.producer_id is None else str(self.producer_id)
            if self._producer_secret is not None:
                properties["producer_secret"] = self._producer_secret
        self._hello = self._request_number()
        return encode_frame(MessageType.HELLO, self._hello, properties=properties)

    def unanswered(self) -> list[Frames]:
        """Return what to send again after Welcome, in order and byte for byte."""
        unanswered = self._window.unanswered() + self._staged.unanswered()
        return [
            self.compression.packed(codec, self._understood(frames), number) for codec, frames, number in unanswered
        ]

    def lost(self) -> list[UnackedBatch]:
        """Note that the connection is gone; return the batches whose fate cannot be found out any more.

        Those of a producer that the broker knows are kept, and those for stages: sent again, they cannot be stored
        twice.
        """
        if self.producer_id is not None:
            return []
        return self._give_up_publishes("the connection was lost before the broker answered")

    def give_up(self, why: str) -> list[UnackedBatch]:
        """Stop waiting for answers to publishes and stagings; return the batches that were waiting, as uncertain."""
        return self._give_up_publishes(why) + self._staged.abandon_all(ConnectionLost(why))

    def _give_up_publishes(self, why: str) -> list[UnackedBatch]:
        return self._window.abandon_all(PublishUncertain(f"{why}: the message may or may not be stored"))

    def request(self, method: str, arguments: Mapping[str, Any]) -> tuple[int, bytes]:
        """Return the number and the bytes of a request; arguments that are None are left out."""
        number = self._request_number()
        body = json.dumps({name: value for name, value in arguments.items() if value is not None}).encode()
        return number, encode_frame(MessageType.REQUEST, number, properties={"method": method}, body=body)

    def compose(self, type: MessageType, properties: Mapping[str, str], body: Body = b"") -> tuple[int, bytes]:
        """Return the number and the bytes of any other frame; numbers only ever grow."""
        number = self._request_number()
        return number, encode_frame(type, number, properties=properties, body=body)

    def ping(self) -> tuple[int, bytes]:
        """Return the number and the bytes of a HEARTBEAT that will be Answered."""
        number = self._request_number()
        return number, encode_frame(MessageType.HEARTBEAT, number)

    def heartbeat(self) -> bytes:
        """Return a HEARTBEAT whose answer is only a sign of life."""
        return encode_frame(MessageType.HEARTBEAT)

    @property
    def has_room(self) -> bool:
        """False while too much is unanswered to send more."""
        return self._window.has_room(self._next_publish) and self._staged.has_room(self._next_request)

    @property
    def awaits_acks(self) -> bool:
        """Are publishes on their way?"""
        return not self._window.is_empty

    def publish(
        self, form: PublishForm, bodies: Sequence[bytes], waiter: Any = None, codec: str | None = None
    ) -> UnackedBatch:
        """Number the bodies and return them as a batch, which is to be sent as to_send(), in the order of these calls.

        `codec`: what it is compressed with, in place of the one of the conversation.
        """
        data = form.publishes(self._next_publish, bodies, self._longest_run)
        codec = codec or self.compression.codec
        batch = UnackedBatch(self._next_publish, len(bodies), data, waiter, codec)
        self._next_publish += batch.count
        self._window.add(batch)
        return batch

    def to_send(self, batch: UnackedBatch) -> Frames:
        """Return a batch as it travels on the connection that there is now."""
        data = self._understood(batch.data)
        return data if batch.codec is None else self.compression.packed(batch.codec, data, batch.first)

    def _understood(self, frames: Frames) -> Frames:
        """Return frames as the broker that we are connected with understands them."""
        if len(frames) > self._longest_run and is_publish_run(frames):
            return as_publishes(frames)
        return frames

    def stage(self, properties: Mapping[str, str], frames: Body, waiter: Any = None) -> UnackedBatch:
        """Return a STAGE frame as a batch of one, which is to be sent as to_send()."""
        number, data = self.compose(MessageType.STAGE, properties, frames)
        batch = UnackedBatch(number, 1, data, waiter, self.compression.codec)
        self._staged.add(batch)
        return batch

    def abandon(self, batch: UnackedBatch) -> None:
        """Forget a batch that its caller does not wait for any more."""
        for window in (self._window, self._staged):
            window.abandon(batch)

    def room(self) -> memoryview | None:
        """Return where the bytes that come next may be read into, if they belong to a long frame: filled() follows."""
        return None if self._long is None else memoryview(self._long)[self._filled :]

    def filled(self, size: int) -> None:
        """Note that so many bytes were read into the room."""
        self._filled += size

    def receive(self, data: bytes) -> None:
        """Keep bytes for next_event() to parse."""
        if self._long is not None and (room := self.room()) is not None:
            mine = data[: len(room)]
            room[: len(mine)] = mine
            self.filled(len(mine))
            data = data[len(mine) :]
        if self._position:
            del self._buffer[: self._position]
            self._position = 0
        self._buffer += data

    def take_acks(self, data: bytes) -> tuple[list[UnackedBatch], bytes]:
        """Read the acks of publishes at the front of what has come, unless something before it is unread.

        Returns the batches that have all their answers now, and the bytes that are left for receive().
        """
        if self.unread or data[LENGTH.size : LENGTH_AND_TYPE.size] != _ACK_TYPE:
            return [], data
        self.receive(data)
        settled: list[UnackedBatch] = []
        while (stored := self._next_stored()) is not None:
            settled += self._window.answer(stored)
        left, self._buffer, self._position = bytes(self._buffer[self._position :]), bytearray(), 0
        return settled, left

    @property
    def unread(self) -> int:
        """How many bytes have come that are not part of an event yet."""
        return self._filled if self._long is not None else len(self._buffer) - self._position

    def next_event(self) -> Event | None:
        """Return one event, or None if it needs more bytes. Raises PeerMisbehaved: drop the connection then."""
        while (stored := self._next_stored()) is not None:
            if complete := self._window.answer(stored):
                return PublishesSettled(complete)
        while (frame := self._next_frame()) is not None:
            if frame.type == COMPRESSED:
                frame = self.compression.inflated(frame)
            read = _READERS.get(frame.type)
            event = read(self, frame) if read else PushedFrame(frame)
            if event is not None:
                return event
        return None

    def _next_stored(self) -> StoredPublishes | None:
        """Return what is at the front if it says that publishes are stored, in the words that our brokers use for it.

        That is what a publisher waits for, so it is read in one go. All else is left to the general way.
        """
        buffer, at = self._buffer, self._position
        available = len(buffer) - at
        if available < OVERHEAD or self._long is not None:
            return None
        total, kind, number, timestamp, length = HEAD.unpack_from(buffer, at)
        if kind != ACK or number >= FIRST_REQUEST or total != OVERHEAD + length or total > available:
            return None
        end = at + HEAD.size + length
        found = _STORED.fullmatch(buffer, at + HEAD.size, end)
        if found is None or not number or LENGTH.unpack_from(buffer, end)[0]:
            return None
        self._position = at + total
        partition, offset, durability, count, duplicate, unverified = found.groups()
        where = number, int(count), int(partition), int(offset), timestamp, str(durability, "ascii")
        return StoredPublishes(*where, bool(duplicate), bool(unverified))

    def _next_frame(self) -> Frame | None:
        if self._long is not None:
            return self._long_frame()
        available = len(self._buffer) - self._position
        if available < LENGTH.size:
            return None
        length = frame_length(self._buffer, self._position)
        if not OVERHEAD <= length <= MAX_FRAME:
            raise PeerMisbehaved(f"what answers is not a QB broker: its bytes claim a frame of {length} bytes")
        if available < length:
            if length > LONG_FRAME:
                self._begin_long(length)
            return None
        frame = decode_frame(self._buffer, self._position)
        self._position += length
        return frame

    def _begin_long(self, length: int) -> None:
        begun, self._long = self._buffer[self._position :], bytearray(length)
        self._long[: len(begun)] = begun
        self._filled, self._buffer, self._position = len(begun), bytearray(), 0

    def _long_frame(self) -> Frame | None:
        """Return the long frame if it is whole. Only the body of an answer is lent: others may be kept for long."""
        whole = self._long
        if whole is None or self._filled < len(whole):
            return None
        self._long = None
        return decode_frame(whole, lend=LENGTH_AND_TYPE.unpack_from(whole)[1] == MessageType.ACK)

    def _read_ack(self, frame: Frame) -> Event | None:
        if frame.sequence_number == self._hello:
            return self._read_welcome(frame)
        if frame.sequence_number in self._staged:
            return self._read_stage_answer(frame)
        if frame.sequence_number >= FIRST_REQUEST:
            return RequestAnswered(frame.sequence_number, frame)
        if frame.sequence_number == 0:
            return TurnedAway(_refusal_in(frame))
        return self._read_publish_answer(frame)

    def _read_welcome(self, frame: Frame) -> Event:
        self._hello = None
        if frame.properties.get("status") != "success":
            error = _refusal_in(frame)
            if error.code == Code.PRODUCER_FENCED:
                self._forget_producer()
            return TurnedAway(error)
        if outdated := self._outdated(frame):
            return TurnedAway(outdated)
        self.silence = _number(frame, "lease_ttl") / 3 if "lease_ttl" in frame.properties else inf
        self.max_message_size = _number(frame, "max_message_size")
        self.transaction_bytes = _number(frame, "transaction_bytes") if "transaction_bytes" in frame.properties else 0
        takes_runs = FEATURE in frame.properties.get("features", "").split(",")
        self._longest_run = min(MOST_BYTES, self.max_message_size) if takes_runs else 0
        self.compression.welcomed(frame.properties, self.max_message_size)
        uncertain = self._continue_as(frame) if self._idempotent else ()
        return Welcome(frame.properties.get("server", "unknown"), uncertain)

    def _outdated(self, frame: Frame) -> RequestRefused | None:
        """Return why what this frame comes from is an owner no more, if it is not; else take note of its epoch."""
        epoch = _number(frame, "epoch") if "epoch" in frame.properties else self.epoch
        if epoch < self.epoch:
            return NotOwner(Code.NOT_OWNER, f"it says that it owns the cell in epoch {epoch}, which is over")
        self.epoch = epoch
        return None

    def _continue_as(self, frame: Frame) -> Sequence[UnackedBatch]:
        """Be the producer that the broker says; return what another one has sent, which cannot be sent again."""
        before, self.producer_id = self.producer_id, _number(frame, "producer_id")
        self._producer_secret = frame.properties.get("producer_secret")
        if before in (None, self.producer_id):
            return ()
        return self._give_up_publishes(f"the broker does not let this client continue as producer {before}")

    def _forget_producer(self) -> None:
        """Ask for a new producer id next time; lost() gives up what is unanswered."""
        self.producer_id = self._producer_secret = None

    def _read_stage_answer(self, frame: Frame) -> Event:
        answer: Answer
        if frame.properties.get("status") == "success":
            answer = HeldStageFrame(frame.sequence_number, 1, _number(frame, "messages"))
        else:
            error = _refusal_in(frame)
            if error.code == Code.SHUTTING_DOWN:
                return Goodbye(error.text)  # not staged: it will be sent again on the next connection
            answer = RefusedPublishes(frame.sequence_number, 1, error)
        return PublishesSettled(self._staged.answer(answer))

    def _read_publish_answer(self, frame: Frame) -> Event | None:
        properties = frame.properties
        count = _number(frame, "count") if "count" in properties else 1
        answer: Answer
        if properties.get("status") == "success":
            answer = StoredPublishes(
                frame.sequence_number,
                count,
                _number(frame, "partition"),
                _number(frame, "offset"),
                frame.timestamp,
                properties.get("durability", ""),
                properties.get("duplicate") == "true",
                properties.get("unverified") == "true",
            )
        else:
            error = _refusal_in(frame)
            if error.code == Code.SHUTTING_DOWN and self.producer_id is not None:
                return Goodbye(error.text)  # not stored: it will be sent again on the next connection
            if error.code == Code.PRODUCER_FENCED:
                self._forget_producer()  # never continue as a producer that another connection is now
            answer = RefusedPublishes(frame.sequence_number, count, error)
        complete = self._window.answer(answer)
        return PublishesSettled(complete) if complete else None

    def _read_heartbeat(self, frame: Frame) -> Event | None:
        if frame.sequence_number == PROBE:
            return BytesToSend(encode_frame(MessageType.HEARTBEAT, PROBE))
        return RequestAnswered(frame.sequence_number, frame) if frame.sequence_number else None

    def _read_goodbye(self, frame: Frame) -> Event:
        return Goodbye(frame.properties.get("reason", "the broker is going away"), frame.properties.get("owner", ""))

    def _read_deliver(self, frame: Frame) -> Event:
        if error := self._outdated(frame):
            raise error
        return PushedFrame(frame)

    def _request_number(self) -> int:
        number = self._next_request
        self._next_request += 1
        return number


_READERS: dict[int, Callable[[Conversation, Frame], Event | None]] = {
    MessageType.ACK: Conversation._read_ack,
    MessageType.HEARTBEAT: Conversation._read_heartbeat,
    MessageType.GOODBYE: Conversation._read_goodbye,
    MessageType.DELIVER: Conversation._read_deliver,
}


def check_success(frame: Frame) -> None:
    """Raise RequestRefused if the reply is a refusal."""
    if frame.type == MessageType.ACK and frame.properties.get("status") != "success":
        raise _refusal_in(frame)


def answer_of(frame: Frame) -> Any:
    """Return the JSON value in the reply to a request. Raises RequestRefused, or PeerMisbehaved."""
    check_success(frame)
    try:
        return json.loads(str(frame.body, "utf-8")) if frame.body else None
    except ValueError:
        raise PeerMisbehaved("a reply's body is not JSON") from None


def _refusal_in(frame: Frame) -> RequestRefused:
    error = refusal(
        frame.properties.get("code", Code.INTERNAL), frame.properties.get("error", "refused without a reason")
    )
    if isinstance(error, OffsetOutOfRange) and "first" in frame.properties:
        error.first, error.end = _number(frame, "first"), _number(frame, "end")
    if isinstance(error, QuotaExceeded):
        error.retry_after = _seconds(frame.properties.get("retry_after", ""))
    if isinstance(error, NotOwner):
        error.owner = frame.properties.get("owner", "")
    return error


def _seconds(text: str) -> float | None:
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if 0 <= seconds < inf else None


def _number(frame: Frame, name: str) -> int:
    value = frame.properties.get(name, "")
    if not (value.isascii() and value.isdigit() and len(value) <= 20):
        raise PeerMisbehaved(f"an ACK's property {name} is {value[:40]!r}, which is not a number")
    return int(value)
