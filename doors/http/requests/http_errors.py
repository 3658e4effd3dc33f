"""How a refusal looks over HTTP: a status, a stable code, a text, and facts where there are some."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import msgspec

from qb.core.wire.errors import REPLIES, BrokerError, OffsetOutOfRange

# On every answer. A browser neither guesses what it is, nor shows it in a frame, nor keeps it (it is out of date at
# once), nor runs or loads anything but the files of this door.
CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
ANSWER_HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": CONTENT_POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
}


class HttpError(Exception):
    """A request that is refused before it reaches the broker."""

    def __init__(self, status: int, code: str, text: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(text)
        self.status, self.code, self.headers = status, code, headers or {}


class PartlyStored(Exception):
    """A request of which some messages were stored and others not.

    Args:
        error: Why the others were not.
        stored: The receipts of those that were, as a list or as its JSON.
    """

    def __init__(self, error: HttpError | BrokerError, stored: list[Any] | msgspec.Raw) -> None:
        super().__init__(str(error))
        self.error, self.stored = error, stored


def bad_request(text: str) -> HttpError:
    """Return the refusal of what makes no sense."""
    return HttpError(400, "BAD_REQUEST", text)


def no_such_route(path: str) -> HttpError:
    """Return the refusal of a path that leads nowhere."""
    return HttpError(404, "NO_SUCH_ROUTE", f"there is nothing at {path[:200]}; GET / lists what there is")


def refusal(error: HttpError | BrokerError | PartlyStored) -> tuple[int, dict[str, Any]]:
    """Return the status and the body that answer a failure."""
    if isinstance(error, HttpError):
        return error.status, {"error": str(error), "code": error.code}
    if isinstance(error, PartlyStored):
        status, body = refusal(error.error)
        return status, {**body, "stored": error.stored}
    reply = REPLIES[type(error)]
    body = {"error": str(error), "code": reply.code.value}
    if isinstance(error, OffsetOutOfRange):
        body |= {"first_offset": error.first, "end_offset": error.end}
    return reply.http_status, body


def raw_response(status: int, body: Mapping[str, Any]) -> bytes:
    """Return a whole response after which the connection closes, for peers that are not served otherwise."""
    encoded, headers = last_answer(body)
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + encoded


def last_answer(body: Mapping[str, Any]) -> tuple[bytes, dict[str, str]]:
    """Return the bytes and the headers of an answer after which the connection closes."""
    encoded = msgspec.json.encode(body)
    length = {"content-type": "application/json", "content-length": str(len(encoded))}
    return encoded, {**length, "connection": "close", **ANSWER_HEADERS}
