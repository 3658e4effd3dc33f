"""How a refusal looks over HTTP: a status, a stable code, a text, and facts where there are some."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

import msgspec

from qb.core.wire.errors import REPLIES, BrokerError, OffsetOutOfRange, QuotaExceeded, Unauthenticated
from qb.doors.http.requests.http_answers import HttpAnswer, encode_answer


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
    if isinstance(error, QuotaExceeded):
        body |= {"retry_after": error.retry_after}
    if isinstance(error, OffsetOutOfRange):
        body |= {"first_offset": error.first, "end_offset": error.end}
    return reply.http_status, body


def answer_of(error: HttpError | BrokerError | PartlyStored) -> HttpAnswer:
    """Return a refusal as an answer."""
    status, body = refusal(error)
    return HttpAnswer(status, msgspec.json.encode(body), headers=_headers(error))


def _headers(error: HttpError | BrokerError | PartlyStored) -> Mapping[str, str]:
    match error:
        case HttpError():
            return error.headers
        case PartlyStored():
            return _headers(error.error)
        case Unauthenticated():
            return {"www-authenticate": "Bearer"}
        case QuotaExceeded():
            return {"retry-after": str(ceil(error.retry_after))}
        case _:
            return {}


def raw_response(status: int, body: Mapping[str, Any]) -> bytes:
    """Return a whole response after which the connection closes, for peers that are not served otherwise."""
    return encode_answer(HttpAnswer(status, msgspec.json.encode(body)), keeps_alive=False)
