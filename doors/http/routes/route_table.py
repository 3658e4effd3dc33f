"""What a route is: how it is reached, what it takes, what it answers, and who carries it out.

The table of rows is the API: requests are checked by it, and /openapi.json is made from it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
import trio

from qb.core.broker.message_broker import MessageBroker
from qb.core.rights.needs import Needs
from qb.core.rights.principals import Principal
from qb.doors.http.requests.http_peer import HttpPeer
from qb.doors.http.requests.page_logins import PageLogins
from qb.doors.http.streams.event_stream import EventStream
from qb.doors.http.streams.stream_registry import StreamRegistry


class Fields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What a body or a query may have; anything else is refused by name."""


class NoFields(Fields):
    """No field at all."""


class OpenWaits:
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
        """End every wait."""
        self._ended = True
        for scope in self._scopes:
            scope.cancel()


class RouteContext(NamedTuple):
    """What the routes work with."""

    broker: MessageBroker
    streams: StreamRegistry
    waits: OpenWaits
    rows: tuple[RouteRow, ...]
    logins: PageLogins


class RouteCall(NamedTuple):
    """One request, checked."""

    service: RouteContext
    path: Mapping[str, str]
    query: Any  # of the row's kind, as is the body
    body: Any
    headers: Mapping[str, str]
    peer: HttpPeer  # the connection that it came by

    @property
    def principal(self) -> Principal:
        """The user that asks."""
        return self.peer.identity.principal

    @property
    def broker(self) -> MessageBroker:
        return self.service.broker


class RouteAnswer(NamedTuple):
    """What a request is answered with; bytes go out as they are."""

    data: Any
    status: int = 200
    media_type: str = "application/json"
    headers: Mapping[str, str] = {}


class RouteRow(NamedTuple):
    """One route."""

    method: str
    path: str
    summary: str
    carry_out: Callable[[RouteCall], Awaitable[RouteAnswer | EventStream]]
    needs: Needs
    query: type[Fields] = NoFields
    body: type[Fields] | None = None  # None: it has none
    media_types: tuple[str, ...] = ()  # of a body that may come otherwise than as JSON
    status: int = 200
    unacked_status: int | None = None  # of an answer that promises nothing yet
    answer: Any = None  # the type of the answer's data, or a tuple of them; None: not JSON
    media_type: str = "application/json"
    refusals: tuple[int, ...] = ()
    streams: bool = False
