"""What a line of JSON may ask for, checked, and the words for what is wrong with it."""

from __future__ import annotations

import re
from typing import Annotated, Literal, TypeVar, get_args

import msgspec
from msgspec import Meta

from qb.core.groups.group_coordinator import SESSION_TIMEOUT
from qb.core.wire.argument_errors import first_bad_byte
from qb.core.wire.errors import BadRequest, PeerMisbehaved

SHOWN = 80  # characters of a peer's own text in an error
LONG = 1 << 20  # bytes: no request but `produce` needs a longer line
MOST_STRINGS = 100_000  # in a long line: one decoding cannot be interrupted, and takes about 1 µs for each of them
_HTTP = re.compile(rb"[A-Z]{1,20} .*HTTP/1\.[01]\s*\Z|host:", re.IGNORECASE)  # its first line, or a header it must have

# A description ends the sentence "<field> must be ...".
Text = Annotated[str, Meta(description="a string")]
Whole = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1, description="a whole number")]
Count = Annotated[int, Meta(ge=1, le=10_000, description="a whole number from 1 to 10000")]
Wait = Annotated[int, Meta(ge=0, le=60_000, description="a whole number from 0 to 60000")]
Flag = Annotated[bool, Meta(description="true or false")]
Encoding = Annotated[Literal["base64"], Meta(description='"base64"')]
Texts = Annotated[dict[str, str], Meta(description="an object of strings")]
Start = Annotated[int | str, Meta(description="an offset, earliest, latest or a time")]


class RequestLine(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, rename="camel"):
    """The fields that a type takes; those without a default are required."""

    type: Text


class AuthLine(RequestLine):
    token: Text


class CreateTopicLine(RequestLine):
    topic: Text
    partitions: Whole = 1


class ProduceLine(RequestLine):
    topic: Text
    value: Text
    key: Text | None = None
    partition: Whole | None = None
    properties: Texts | None = None
    encoding: Encoding | None = None


class LongLine(msgspec.Struct, forbid_unknown_fields=True):
    """A long line, which can only be a `produce`: anything else in it ends its decoding, and is not skipped."""

    type: Text | None = None
    topic: Text | None = None
    value: Text | None = None
    key: Text | None = None
    partition: Whole | None = None
    properties: Texts | None = None
    encoding: Encoding | None = None


class FetchLine(RequestLine):
    topic: Text
    partition: Whole
    offset: Whole
    max: Count = 100
    max_wait_ms: Wait = 0


class CommitLine(RequestLine):
    group_id: Text
    topic: Text
    partition: Whole
    offset: Whole


class MetricsLine(RequestLine):
    topic: Text
    partition: Whole
    group_id: Text | None = None


class ListTopicsLine(RequestLine):
    pass


class JoinGroupLine(RequestLine):
    group_id: Text
    topic: Text
    consumer_id: Text
    session_timeout_ms: Whole = int(SESSION_TIMEOUT * 1000)


class MemberLine(RequestLine):
    group_id: Text
    consumer_id: Text


class CreateSubscriptionLine(RequestLine):
    subscription: Text
    topic: Text
    start_offset: Start = 0


class SubscribeLine(RequestLine):
    subscription: Text
    auto_ack: Flag = False
    window: Whole | None = None


class SubscriptionLine(RequestLine):
    subscription: Text


class AckLine(RequestLine):
    subscription: Text
    partition: Whole
    offset: Whole


class NackLine(AckLine):
    reason: Text = ""
    delay_ms: Whole | None = None


R = TypeVar("R", bound=RequestLine)
S = TypeVar("S", bound=msgspec.Struct)


class _Opening(msgspec.Struct):
    """As much of a line as says what the rest has to be."""

    type: Text | None = None


def type_of(line: bytes) -> str:
    """Return what a line asks for. Raises BadRequest unless it is an object that says so.

    Raises PeerMisbehaved for HTTP: a web page can make a browser post to this port, and then the body, which the page
    has written, must not be carried out.
    """
    if _HTTP.match(line):
        raise PeerMisbehaved("this door speaks JSON lines, not HTTP")
    opening: _Opening | LongLine
    try:
        if len(line) <= LONG:
            line.decode()  # strings that are skipped are not looked at below
            opening = _decode(line, _Opening)
        else:
            _check_strings(line)
            opening = _decode(line, LongLine)
    except UnicodeDecodeError as error:
        raise BadRequest(f"Invalid JSON: not UTF-8 (byte {error.start})") from None
    except msgspec.ValidationError as error:
        raise BadRequest(_opening_error(str(error), long=len(line) > LONG)) from None
    if opening.type is None:
        raise BadRequest("Missing type")
    return opening.type


def _opening_error(text: str, long: bool) -> str:
    if "- at `$.type`" in text:
        return "type must be a string"
    if not long or ("got `" in text and " - at " not in text):
        return "a request must be an object"
    return f"{_argument_error(text, ProduceLine, '')}; a line of more than {LONG} bytes is a produce"


def parse(line: bytes, kind: type[R], missing: str) -> R:
    """Return the request in a line that type_of() has seen. Raises BadRequest, saying `missing` if a field is."""
    try:
        return _decode(line, kind)
    except msgspec.ValidationError as error:
        raise BadRequest(_argument_error(str(error), kind, missing)) from None


def check_long(line: bytes, name: str) -> None:
    """Raises BadRequest if no line of this type is so long."""
    if len(line) > LONG and name != "produce":
        raise BadRequest(f"Line too long: a {name} has at most {LONG} bytes")


def _check_strings(line: bytes) -> None:
    """Raises BadRequest if there are so many that decoding takes too long."""
    if line.count(b'"') - line.count(b'\\"') > 2 * MOST_STRINGS:
        raise BadRequest(f"Line too long: one of more than {LONG} bytes holds at most {MOST_STRINGS} strings")


def _decode(line: bytes, kind: type[S]) -> S:
    """Return the line as that kind. Raises BadRequest if it is no JSON, ValidationError if it is of another kind."""
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError as error:
        what = str(error).removeprefix("JSON is malformed: ")
        if what.startswith("Input data was truncated"):
            what = f"it ends too early (byte {len(line)})"
        raise BadRequest(f"Invalid JSON: {what}") from None
    except UnicodeDecodeError:
        raise BadRequest(f"Invalid JSON: not UTF-8 (byte {first_bad_byte(line)})") from None
    except RecursionError:
        raise BadRequest("Invalid JSON: too deeply nested") from None


def _argument_error(text: str, kind: type[RequestLine], missing: str) -> str:
    """Return msgspec's error text in our words."""
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    at_fault = re.search(r" - at `\$\.(\w+)", text)
    if at_fault is None:
        if text.startswith("Object missing required field"):
            return missing
        name = text.partition("`")[2].removesuffix("`")
        return f"Unknown field: {name[:SHOWN]}; there are: {', '.join(fields)}"
    field = fields[at_fault[1]]
    if field.required and text.startswith("Expected") and "got `null`" in text:
        return missing
    return f"{field.encode_name} must be {_description(field.type)}"


def _description(kind: object) -> str:
    """Return the description in a field's type, which may be optional."""
    for part in (kind, *get_args(kind)):
        for meta in getattr(part, "__metadata__", ()):
            return str(meta.description)
    raise TypeError(f"{kind} has no description")
