"""How a refusal looks over HTTP: a status, a stable code, a text, and facts where there are some."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import msgspec

from qb.core.wire.errors import REPLIES, BrokerError, OffsetOutOfRange


class HttpError(Exception):
    """A request that is refused before it reaches the broker."""

    def __init__(self, status: int, code: str, text: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(text)
        self.status, self.code, self.headers = status, code, headers or {}


class PartlyStored(Exception):
    """A batch of which some partitions took their messages and others did not."""

    def __init__(self, error: BrokerError, stored: list[Any]) -> None:
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
    encoded = msgspec.json.encode(body)
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(encoded)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + encoded
