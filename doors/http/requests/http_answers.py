"""How an answer looks on the wire."""

from __future__ import annotations

from collections.abc import Mapping
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import NamedTuple

from qb.core.wire.clock import now_ms

JSON = "application/json"

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


class HttpAnswer(NamedTuple):
    """A whole answer."""

    status: int
    body: bytes
    media_type: str = JSON
    headers: Mapping[str, str] = {}


def encode_answer(answer: HttpAnswer, *, keeps_alive: bool, is_head: bool = False) -> bytes:
    """Return an answer as it is sent. `is_head`: its body is described and left out."""
    headers = {**answer.headers, "content-length": str(len(answer.body))}
    head = encode_head(answer.status, answer.media_type, headers, keeps_alive=keeps_alive)
    return head if is_head else head + answer.body


def encode_head(status: int, media_type: str, headers: Mapping[str, str], *, keeps_alive: bool) -> bytes:
    """Return the head of an answer."""
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    text = f"{_opening(status, media_type, keeps_alive)}date: {_date(now_ms() // 1000)}\r\n{lines}\r\n"
    return text.encode("latin-1", "replace")


@lru_cache(maxsize=256)
def _opening(status: int, media_type: str, keeps_alive: bool) -> str:
    """Return the lines that all answers of a kind share."""
    connection = {} if keeps_alive else {"connection": "close"}
    headers = {"content-type": media_type, **connection, **ANSWER_HEADERS}
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", *(f"{name}: {value}" for name, value in headers.items())]
    return "".join([f"{line}\r\n" for line in lines])


@lru_cache(maxsize=1)
def _date(second: int) -> str:
    return formatdate(second, usegmt=True)
