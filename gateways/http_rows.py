"""gateways.http_rows: what a route is: how it is reached, what it takes, what it answers, and who carries it out.

May import: core.broker, gateways.http_streams, msgspec, trio, the standard library.
Never: sockets, storage, starlette.

The table of rows is the API: requests are checked by it, and /openapi.json is made from it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
import trio

from core.broker import MessageBroker
from gateways.http_streams import Streams


class Fields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What a body or a query may have; anything else is refused by name."""


class Nothing(Fields):
    """No field at all."""


class Waits:
    """Requests that wait for something to happen, until the broker drains."""

    def __init__(self) -> None:
        self._scopes: set[trio.CancelScope] = set()
        self._ended = False

    @contextmanager
    def waiting(self) -> Iterator[trio.CancelScope]:
        """Lend a scope to wait in; end() cancels it."""
        with trio.CancelScope() as scope:
            if self._ended:
                scope.cancel()
            self._scopes.add(scope)
            try:
                yield scope
            finally:
                self._scopes.discard(scope)

    def end(self) -> None:
        """Let nobody wait any longer."""
        self._ended = True
        for scope in self._scopes:
            scope.cancel()


class Service(NamedTuple):
    """What the routes work with."""

    broker: MessageBroker
    streams: Streams
    waits: Waits
    rows: Sequence[Row]


class Call(NamedTuple):
    """One request, checked."""

    service: Service
    path: Mapping[str, str]
    query: Any  # of the row's kind, as is the body
    body: Any
    headers: Mapping[str, str]
    peer: Any = None  # the connection that it came by

    @property
    def broker(self) -> MessageBroker:
        return self.service.broker


class Answer(NamedTuple):
    """What a request is answered with; bytes go out as they are."""

    data: Any
    status: int = 200
    media_type: str = "application/json"


# Called to send an answer that goes on and on, as an ASGI application is.
Streaming = Callable[[Any, Any, Any], Awaitable[None]]


class Row(NamedTuple):
    """One route."""

    method: str
    path: str
    summary: str
    carry_out: Callable[[Call], Awaitable[Answer | Streaming]]
    query: type[Fields] = Nothing
    body: type[Fields] | None = None  # None: it has none
    lines: bool = False  # may the body come as lines of JSON as well?
    status: int = 200
    unacked_status: int | None = None  # of an answer that promises nothing yet
    answer: Any = None  # the type of the answer's data, or a tuple of them; None: not JSON
    media_type: str = "application/json"
    refusals: tuple[int, ...] = ()
    streams: bool = False
