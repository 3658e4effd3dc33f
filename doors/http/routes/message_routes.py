"""Publishing: one message, a list of them, lines of them, or one as it is."""

from __future__ import annotations

import binascii
from base64 import b64decode
from collections.abc import Callable, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from qb.core.broker.outgoing_messages import BadBatchMessage, OutgoingMessage, StoredReceipt
from qb.core.pacing import AT_ONCE, MOST_AT_ONCE, portions
from qb.core.rights import needs
from qb.core.wire.clock import now_ms
from qb.core.wire.errors import BrokerError
from qb.doors.http.reports.http_views import ReceiptView, receipt_view
from qb.doors.http.requests.http_errors import HttpError, PartlyStored, bad_request, refusal
from qb.doors.http.requests.line_body import LineBody, LinePortion
from qb.doors.http.requests.request_bodies import LINES, RAW, decode, decode_all
from qb.doors.http.routes.route_table import Fields, RouteAnswer, RouteCall, RouteRow
from qb.doors.json_lines.json_answers import iso_time

MOST = MOST_AT_ONCE  # messages in one JSON text; lines may be more, as they are stored in portions
BYTES_AT_ONCE = 1 << 17  # of lines that are decoded between two checkpoints; a line may hold many headers

Acks = Annotated[Literal["none", "leader", "all"], Meta(description="none: answer before the message is durable")]
Partition = Annotated[int, Meta(ge=0, lt=2**31)]
Headers = Annotated[dict[str, str], Meta(max_length=MOST_AT_ONCE)]
Encoding = Literal["base64"]


class MessageBody(Fields):
    """One of several."""

    value: str
    key: str | None = None
    partition: Partition | None = None
    headers: Headers = msgspec.field(default_factory=dict)
    encoding: Encoding | None = None


class PublishBody(Fields):
    """One message, or `messages`."""

    value: str | UnsetType = UNSET
    key: str | None = None
    partition: Partition | None = None
    headers: Headers = msgspec.field(default_factory=dict)
    encoding: Encoding | None = None
    messages: list[MessageBody] | UnsetType = UNSET
    acks: Acks = "all"


class PublishQuery(Fields):
    """`acks` of any body; the rest is for a message that is sent as it is, and has no other place for it."""

    acks: Acks | None = None
    key: str | None = None
    partition: Partition | None = None
    headers: Annotated[str | None, Meta(description="a JSON object of texts")] = None


class StoredBody(msgspec.Struct, frozen=True):
    messages: list[ReceiptView]


_line = msgspec.json.Decoder(MessageBody)
_headers = msgspec.json.Decoder(Headers)
Where = Callable[[int], str]  # says which message of a request is meant, given its index


async def publish(call: RouteCall) -> RouteAnswer:
    body: PublishBody | LineBody | bytes = call.body
    if isinstance(body, bytes):
        return await _publish_raw(call, body)
    if call.query.key is not None or call.query.partition is not None or call.query.headers is not None:
        raise bad_request(f"query: `key`, `partition` and `headers` belong to a body of {RAW}")
    if isinstance(body, LineBody):
        return await _publish_lines(call, body)
    return await _publish_object(call, body)


async def _publish_object(call: RouteCall, body: PublishBody) -> RouteAnswer:
    acks = call.query.acks or body.acks
    messages, alone = _from_object(body)
    if len(messages) > MOST:
        what = f"{len(messages)} messages in one JSON text; {MOST} are the most, and more can come as {LINES}"
        raise HttpError(413, "BODY_TOO_LARGE", what)
    where: Where = (lambda index: "") if alone else "messages[{}]: ".format
    receipts = await _store(call, await _outgoing(messages, where), where, wait=acks != "none")
    return RouteAnswer(receipts[0] if alone else StoredBody(receipts), 202 if acks == "none" else 200)


async def _publish_raw(call: RouteCall, body: bytes) -> RouteAnswer:
    """Store a body as it is, as one message."""
    query: PublishQuery = call.query
    headers = {} if query.headers is None else decode(query.headers.encode(), _headers, "query: headers: ")
    message = OutgoingMessage(body, query.partition, query.key, headers)
    receipts = await _store(call, [message], lambda index: "", wait=query.acks != "none")
    return RouteAnswer(receipts[0], 202 if query.acks == "none" else 200)


async def _publish_lines(call: RouteCall, body: LineBody) -> RouteAnswer:
    """Store each portion of lines before the next one is read: a long body is never held as a whole."""
    wait = call.query.acks != "none"
    await call.broker.appends.open_topic(call.path["topic"], made_by=call.principal.name)
    stored: list[bytes] = []  # receipts as JSON: as objects, they would take several times as much
    try:
        more = True
        while more:
            async with body.portion() as lines:
                more = lines is not None
                if lines is not None and lines.texts:
                    stored.append(_items(await _store_lines(call, lines, wait)))
    except PartlyStored as error:
        raise PartlyStored(error.error, _list([*stored, _items(error.stored)])) from None
    except (HttpError, BrokerError) as error:
        raise PartlyStored(error, _list(stored)) if stored else error from None
    return RouteAnswer(b'{"messages":%s}' % _list(stored), 200 if wait else 202)


async def _store_lines(call: RouteCall, lines: LinePortion, wait: bool) -> list[ReceiptView]:
    def where(index: int) -> str:
        return f"line {lines.numbers[index]}: "

    return await _store(call, await _outgoing(await _from_lines(lines, where), where), where, wait=wait)


def _items(receipts: object) -> bytes:
    """Return a list of receipts as JSON, without its brackets."""
    return msgspec.json.encode(receipts)[1:-1]


def _list(items: Sequence[bytes]) -> msgspec.Raw:
    return msgspec.Raw(b"[%s]" % b",".join(items))


async def _store(call: RouteCall, outgoing: list[OutgoingMessage], where: Where, *, wait: bool) -> list[ReceiptView]:
    """Store messages and return their receipts. Raises HttpError, BrokerError, PartlyStored."""
    timestamp_ms = now_ms()
    try:
        outcomes = await call.broker.appends.publish_many(
            call.path["topic"], outgoing, timestamp_ms, wait=wait, made_by=call.principal.name
        )
    except BadBatchMessage as bad:
        raise _refused(bad, where(bad.index)) from None
    shown, stored = iso_time(timestamp_ms), []
    async for portion in portions(outcomes):
        stored += [receipt_view(each, shown, wait) for each in portion if isinstance(each, StoredReceipt)]
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


async def _from_lines(lines: LinePortion, where: Where) -> list[MessageBody]:
    """Return the messages of lines of JSON. Raises HttpError that names the line."""
    messages: list[MessageBody] = []
    size = 1 + sum(map(len, lines.texts))
    async for portion in portions(lines.texts, min(AT_ONCE, 1 + len(lines.texts) * BYTES_AT_ONCE // size)):
        messages += decode_all(portion, _line, where, len(messages))
    return messages


async def _outgoing(messages: Sequence[MessageBody], where: Where) -> list[OutgoingMessage]:
    """Return messages as the broker takes them. Raises HttpError that names the one at fault."""
    outgoing: list[OutgoingMessage] = []
    async for portion in portions(messages):
        try:
            for message in portion:
                text, coded = message.value, message.encoding is not None
                body = b64decode(text, validate=True) if coded else text.encode()
                outgoing.append(OutgoingMessage(body, message.partition, message.key, message.headers))
        except (binascii.Error, ValueError) as error:
            what = f"value is not {message.encoding or 'text'}: {error}"
            raise bad_request(f"{where(len(outgoing))}{what}") from None
    return outgoing


def _refused(bad: BadBatchMessage, where: str) -> HttpError | BrokerError:
    """Return why messages were refused, with the one that is at fault in the words."""
    if not where:
        return bad.error
    status, body = refusal(bad.error)
    return HttpError(status, body["code"], f"{where}{bad.error}")


ROWS = [
    RouteRow(
        "POST",
        "/topics/{topic}/messages",
        "publish one message or many",
        publish,
        needs.publish(),
        query=PublishQuery,
        body=PublishBody,
        media_types=(LINES, RAW),
        unacked_status=202,
        answer=(ReceiptView, StoredBody),
        refusals=(404, 413, 429, 507, 503),
    ),
]
