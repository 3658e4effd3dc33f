"""Publishing: one message, a list of them, or lines of them."""

from __future__ import annotations

import binascii
from base64 import b64decode
from typing import Annotated, Literal

import msgspec
import trio
from msgspec import UNSET, Meta, UnsetType

from qb.core.broker.outgoing_messages import BadBatchMessage, OutgoingMessage, StoredReceipt
from qb.core.pacing import AT_ONCE
from qb.core.wire.clock import now_ms
from qb.core.wire.errors import BrokerError
from qb.doors.http.http_errors import HttpError, PartlyStored, bad_request, refusal
from qb.doors.http.http_views import ReceiptView, receipt_view
from qb.doors.http.request_bodies import decode
from qb.doors.http.route_table import Fields, RouteAnswer, RouteCall, RouteRow
from qb.doors.json_lines.json_answers import iso_time

MOST = 100_000  # messages in one request

Acks = Annotated[Literal["none", "leader", "all"], Meta(description="none: answer before the message is durable")]
Partition = Annotated[int, Meta(ge=0, lt=2**31)]
Encoding = Literal["base64"]


class MessageBody(Fields):
    """One of several."""

    value: str
    key: str | None = None
    partition: Partition | None = None
    headers: dict[str, str] = msgspec.field(default_factory=dict)
    encoding: Encoding | None = None


class PublishBody(Fields):
    """One message, or `messages`."""

    value: str | UnsetType = UNSET
    key: str | None = None
    partition: Partition | None = None
    headers: dict[str, str] = msgspec.field(default_factory=dict)
    encoding: Encoding | None = None
    messages: list[MessageBody] | UnsetType = UNSET
    acks: Acks = "all"


class PublishQuery(Fields):
    acks: Acks | None = None  # for lines, which have no other place for it


class StoredBody(msgspec.Struct, frozen=True):
    messages: list[ReceiptView]


_lines = msgspec.json.Decoder(MessageBody)


async def publish(call: RouteCall) -> RouteAnswer:
    body: PublishBody | bytes = call.body
    acks = call.query.acks
    if isinstance(body, bytes):
        messages, alone = await _from_lines(body), False
    else:
        acks = acks or body.acks
        messages, alone = _from_object(body)
    if len(messages) > MOST:
        raise HttpError(413, "BODY_TOO_LARGE", f"{len(messages)} messages in one request; {MOST} are the most")
    receipts = await _store(call, messages, alone, wait=acks != "none")
    return RouteAnswer(receipts[0] if alone else StoredBody(receipts), 202 if acks == "none" else 200)


async def _store(call: RouteCall, messages: list[MessageBody], alone: bool, wait: bool) -> list[ReceiptView]:
    timestamp_ms = now_ms()
    try:
        outgoing = [_outgoing(message, index, alone) for index, message in enumerate(messages)]
        outcomes = await call.broker.appends.publish_many(call.path["topic"], outgoing, timestamp_ms, wait=wait)
    except BadBatchMessage as bad:
        raise (bad.error if alone else _refused(bad)) from None
    shown = iso_time(timestamp_ms)
    stored = [receipt_view(each, shown, wait) for each in outcomes if isinstance(each, StoredReceipt)]
    failed = next((each for each in outcomes if isinstance(each, BrokerError)), None)
    if failed is not None:
        raise PartlyStored(failed, stored) if stored else failed
    return stored


def _from_object(body: PublishBody) -> tuple[list[MessageBody], bool]:
    """Return the messages of a body, and whether it is one alone. Raises HttpError."""
    if body.messages is not UNSET:
        if body.value is not UNSET or body.key is not None or body.partition is not None or body.headers:
            raise bad_request("a body has either `messages` or the fields of one message")
        return body.messages, False
    if body.value is UNSET:
        raise bad_request("Object missing required field `value`, or `messages`")
    fields = {"key": body.key, "partition": body.partition, "headers": body.headers, "encoding": body.encoding}
    return [MessageBody(value=body.value, **fields)], True  # type: ignore[arg-type]


async def _from_lines(body: bytes) -> list[MessageBody]:
    """Return the messages of lines of JSON; blank ones are passed over. Raises HttpError that names the line."""
    messages: list[MessageBody] = []
    for number, line in enumerate(body.split(b"\n"), 1):
        if line and not line.isspace():
            messages.append(decode(line, _lines, f"line {number}: "))
        if number % AT_ONCE == 0:
            await trio.lowlevel.checkpoint()
    return messages


def _outgoing(message: MessageBody, index: int, alone: bool) -> OutgoingMessage:
    try:
        body = message.value.encode() if message.encoding is None else b64decode(message.value, validate=True)
    except (binascii.Error, ValueError) as error:
        which = "" if alone else f"messages[{index}]: "
        raise bad_request(f"{which}value is not {message.encoding or 'text'}: {error}") from None
    return OutgoingMessage(body, message.partition, message.key, message.headers)


def _refused(bad: BadBatchMessage) -> HttpError:
    """Return why a batch was refused, with the message that is at fault in the words."""
    status, body = refusal(bad.error)
    return HttpError(status, body["code"], f"messages[{bad.index}]: {bad.error}")


ROWS = [
    RouteRow(
        "POST",
        "/topics/{topic}/messages",
        "publish one message or many",
        publish,
        query=PublishQuery,
        body=PublishBody,
        lines=True,
        unacked_status=202,
        answer=(ReceiptView, StoredBody),
        refusals=(404, 413, 507, 503),
    ),
]
