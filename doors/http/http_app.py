"""The table of routes at work: every request checked, every failure answered."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import cache
from typing import Any
from urllib.parse import unquote

import msgspec
import trio

from qb.core.broker.message_broker import MessageBroker
from qb.core.pacing import working_on
from qb.core.settings import ServerSettings
from qb.core.wire.errors import BrokerError, Internal
from qb.doors.http.http_connection import HttpRequest
from qb.doors.http.requests.browser_rules import check_host, check_origin, host_name
from qb.doors.http.requests.http_answers import JSON, HttpAnswer
from qb.doors.http.requests.http_errors import HttpError, PartlyStored, answer_of, no_such_route
from qb.doors.http.requests.line_body import LineBody
from qb.doors.http.requests.page_logins import PageLogins, check_csrf
from qb.doors.http.requests.request_bodies import (
    LINES,
    RAW,
    BodyLimit,
    BodyParts,
    BodyReader,
    PeerGone,
    check_encoding,
    check_media_type,
    decode,
    media_type,
    parse_query,
)
from qb.doors.http.routes import (
    group_routes,
    login_routes,
    message_routes,
    page_routes,
    service_routes,
    subscription_routes,
    summary_routes,
    topic_routes,
)
from qb.doors.http.routes.route_paths import PathTable, RoutePath
from qb.doors.http.routes.route_table import Fields, NoFields, OpenWaits, RouteAnswer, RouteCall, RouteContext, RouteRow
from qb.doors.http.streams.event_stream import EventStream
from qb.doors.http.streams.stream_registry import StreamRegistry

log = logging.getLogger("qb.http")

ROWS: tuple[RouteRow, ...] = (
    *service_routes.ROWS,
    *topic_routes.ROWS,
    *message_routes.ROWS,
    *group_routes.ROWS,
    *subscription_routes.ROWS,
    *summary_routes.ROWS,
    *login_routes.ROWS,
    *page_routes.ROWS,
)
SMALL_BODY = 1 << 20  # bytes; bodies of messages may be longer: see body_limit()
ADVICE = f"; send a long message as {RAW}, and many messages as {LINES}"


def make_service(broker: MessageBroker) -> RouteContext:
    """Return what the routes work with."""
    return RouteContext(broker, StreamRegistry(broker), OpenWaits(), ROWS, PageLogins())


def body_limit(row: RouteRow, media_type: str, settings: ServerSettings) -> BodyLimit:
    """Return how long the body of a request may be."""
    if media_type == RAW:
        return BodyLimit(settings.max_message_size, ", the longest message (QB_MAX_MESSAGE_SIZE)")
    if not row.media_types:
        return BodyLimit(min(SMALL_BODY, settings.max_json_bytes))
    return BodyLimit(settings.max_json_bytes, f" of JSON (QB_MAX_JSON_BYTES){ADVICE}")


class HttpApp:
    """Answers requests."""

    def __init__(self, service: RouteContext) -> None:
        settings = service.broker.settings.http
        self._service = service
        self._host_names = {host_name(name) for name in (settings.host, *settings.hosts)}
        self._reader = BodyReader()
        self._paths = PathTable(service.rows)

    async def respond(self, request: HttpRequest) -> HttpAnswer | EventStream:
        """Return what answers a request. Raises PeerGone.

        Every request of every route passes here with its headers, before anything is looked up or read of its body.
        """
        head = request.head
        found = self._paths.find(head.path)
        try:
            check_host(head.headers, self._host_names)
            check_origin(head.headers)
            await self._log_in(request)
            if found is None:
                raise no_such_route(unquote(head.path.decode("ascii", "replace")))
            answer = await self._carry_out(request, *found)
        except (HttpError, BrokerError, PartlyStored) as error:
            answer = answer_of(error)
        except PeerGone:
            raise
        except Exception:
            log.exception("%s %r failed by a fault of ours", head.method, head.path)
            answer = answer_of(Internal("internal error; the broker's log has the details"))
        if found is not None:
            method = head.method if head.method in found[0].methods else "other"
            status = answer.status if isinstance(answer, HttpAnswer) else 200
            self._service.broker.metrics.requests[method, found[0].path, status] += 1
        return answer

    async def _log_in(self, request: HttpRequest) -> None:
        """Find out who asks: by its token, else by the cookie of the page. Raises Unauthenticated, Forbidden."""
        head = request.head
        token = bearer_token(head.headers)
        login = None if token else self._service.logins.find(head.headers, trio.current_time())
        if login is not None:
            check_csrf(login, head.method, head.headers)
        await request.peer.log_in(token or (login.token if login else ""))

    async def _carry_out(
        self, request: HttpRequest, path: RoutePath, parameters: Mapping[str, str]
    ) -> HttpAnswer | EventStream:
        """Check what the row says of a request, and carry it out."""
        head, peer = request.head, request.peer
        row = path.row(head.method)
        query = parse_query(head.query, row.query)
        call = RouteCall(self._service, parameters, query, None, head.headers, peer)
        working_on("http", peer.address, head.method, row.path)
        action, names = f"{head.method} {row.path}", {**msgspec.structs.asdict(query), **parameters}
        peer.identity.check(row.needs, names, action)
        if row.body is None:
            return _encoded(await row.carry_out(call))
        async with self._body(row, head.headers, BodyParts(request.receive, peer)) as body:
            working_on("http", peer.address, head.method, row.path)
            if isinstance(body, msgspec.Struct):
                peer.identity.check(row.needs, {**msgspec.structs.asdict(body), **names}, action)
            return _encoded(await row.carry_out(call._replace(body=body)))

    @asynccontextmanager
    async def _body(self, row: RouteRow, headers: Mapping[str, str], parts: BodyParts) -> AsyncIterator[Any]:
        """Lend the body as what its route takes: checked JSON, lines that are still to be read, or bytes."""
        check_encoding(headers)
        kind = media_type(headers)
        limit = body_limit(row, kind, self._service.broker.settings.server)
        if kind == LINES and LINES in row.media_types:
            yield LineBody(parts, limit, self._reader.room)
            return
        async with self._reader.read(parts, headers, limit) as body:
            yield body if kind in row.media_types else _decode(row, headers, body)


def _decode(row: RouteRow, headers: Mapping[str, str], body: bytes) -> Fields:
    if row.body is NoFields and not body:
        return NoFields()
    check_media_type(headers, JSON, *row.media_types)
    return decode(body, decoder_of(row))


def bearer_token(headers: Mapping[str, str]) -> str:
    """Return the token of a request, empty if it has none."""
    scheme, _, token = headers.get("authorization", "").strip().partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


@cache
def decoder_of(row: RouteRow) -> msgspec.json.Decoder[Fields]:
    """Return what decodes the JSON body of a route."""
    return msgspec.json.Decoder(row.body or NoFields)


def _encoded(answer: RouteAnswer | EventStream) -> HttpAnswer | EventStream:
    """Return an answer with its data as JSON; one without end as it is."""
    if not isinstance(answer, RouteAnswer):
        return answer
    content = answer.data if isinstance(answer.data, bytes) else msgspec.json.encode(answer.data)
    return HttpAnswer(answer.status, content, answer.media_type, answer.headers)
