"""The table of routes as an ASGI application: every request checked, every failure answered."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import trio
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from qb.core.broker.message_broker import MessageBroker
from qb.core.pacing import working_on
from qb.core.settings import ServerSettings
from qb.core.wire.errors import BrokerError, Internal
from qb.doors.http.requests.browser_rules import check_host, check_origin, host_name
from qb.doors.http.requests.http_errors import ANSWER_HEADERS, HttpError, PartlyStored, no_such_route, refusal
from qb.doors.http.requests.line_body import LineBody
from qb.doors.http.requests.request_bodies import (
    JSON,
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
    message_routes,
    page_routes,
    service_routes,
    subscription_routes,
    summary_routes,
    topic_routes,
)
from qb.doors.http.routes.route_table import Fields, NoFields, OpenWaits, RouteAnswer, RouteCall, RouteContext, RouteRow
from qb.doors.http.streams.stream_registry import StreamRegistry

log = logging.getLogger("qb.http")

ROWS: tuple[RouteRow, ...] = (
    *service_routes.ROWS,
    *topic_routes.ROWS,
    *message_routes.ROWS,
    *group_routes.ROWS,
    *subscription_routes.ROWS,
    *summary_routes.ROWS,
    *page_routes.ROWS,
)
SMALL_BODY = 1 << 20  # bytes; bodies of messages may be longer: see body_limit()
ADVICE = f"; send a long message as {RAW}, and many messages as {LINES}"


def make_service(broker: MessageBroker) -> RouteContext:
    """Return what the routes work with."""
    return RouteContext(broker, StreamRegistry(broker), OpenWaits(), ROWS)


def make_app(service: RouteContext) -> Starlette:
    """Return the application."""
    reader = BodyReader()
    by_path: dict[str, dict[str, RouteRow]] = {}
    for row in service.rows:
        by_path.setdefault(row.path, {})[row.method] = row
    routes = [Route(path, Endpoint(service, rows, reader)) for path, rows in by_path.items()]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _nowhere})
    app.router.redirect_slashes = False
    return app


async def _nowhere(request: Request, error: Exception) -> Response:
    return _refuse(no_such_route(request.url.path))


def body_limit(row: RouteRow, media_type: str, settings: ServerSettings) -> BodyLimit:
    """Return how long the body of a request may be."""
    if media_type == RAW:
        return BodyLimit(settings.max_message_size, ", the longest message (QB_MAX_MESSAGE_SIZE)")
    if not row.media_types:
        return BodyLimit(min(SMALL_BODY, settings.max_json_bytes))
    return BodyLimit(settings.max_json_bytes, f" of JSON (QB_MAX_JSON_BYTES){ADVICE}")


class Endpoint:
    """All routes of one path."""

    def __init__(self, service: RouteContext, rows: Mapping[str, RouteRow], reader: BodyReader) -> None:
        self._service = service
        self._rows = rows
        self._reader = reader
        settings = service.broker.settings.http
        self._host_names = {host_name(name) for name in (settings.host, *settings.hosts)}
        self._decoders: dict[str, msgspec.json.Decoder[Fields]] = {
            method: msgspec.json.Decoder(row.body) for method, row in rows.items() if row.body
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await self._respond(scope, receive)
        except PeerGone:
            return
        except PartlyStored as error:
            response = _Discarding(_refuse(error))
        except (HttpError, BrokerError) as error:
            response = _refuse(error)
        except Exception:
            log.exception("%s %s failed by a fault of ours", scope["method"], scope["path"])
            response = _refuse(Internal("internal error; the broker's log has the details"))
        status = getattr(response, "status_code", 200)
        path = next(iter(self._rows.values())).path
        method = scope["method"] if scope["method"] in self._methods else "other"
        self._service.broker.metrics.requests[method, path, status] += 1
        await response(scope, receive, send)

    async def _respond(self, scope: Scope, receive: Receive) -> Any:
        headers = Headers(scope=scope)
        check_host(headers, self._host_names)
        check_origin(headers)
        row = self._row(scope["method"])
        query = parse_query(scope["query_string"], row.query)
        peer = scope["state"]["peer"]
        call = RouteCall(self._service, scope["path_params"], query, None, headers, peer)
        working_on("http", peer.address, scope["method"], row.path)
        if row.body is None:
            return _respond(await row.carry_out(call))
        async with self._body(row, headers, BodyParts(receive, peer)) as body:
            working_on("http", peer.address, scope["method"], row.path)
            return _respond(await row.carry_out(call._replace(body=body)))

    @asynccontextmanager
    async def _body(self, row: RouteRow, headers: Headers, parts: BodyParts) -> AsyncIterator[Any]:
        """Lend the body as what its route takes: checked JSON, lines that are still to be read, or bytes."""
        check_encoding(headers)
        kind = media_type(headers)
        limit = body_limit(row, kind, self._service.broker.settings.server)
        if kind == LINES and LINES in row.media_types:
            yield LineBody(parts, limit, self._reader.room)
            return
        async with self._reader.read(parts, headers, limit) as body:
            yield body if kind in row.media_types else self._decode(row, headers, body)

    def _row(self, method: str) -> RouteRow:
        row = self._rows.get("GET" if method == "HEAD" else method)
        if row is None or (row.streams and method == "HEAD"):
            allowed = ", ".join(self._methods)
            raise HttpError(405, "METHOD_NOT_ALLOWED", f"{method[:20]} is not one of {allowed}", {"allow": allowed})
        return row

    @property
    def _methods(self) -> list[str]:
        can_head = "GET" in self._rows and not self._rows["GET"].streams
        return [*self._rows, *(["HEAD"] if can_head else [])]

    def _decode(self, row: RouteRow, headers: Headers, body: bytes) -> Fields:
        if row.body is NoFields and not body:
            return NoFields()
        check_media_type(headers, JSON, *row.media_types)
        return decode(body, self._decoders[row.method])


class _Discarding:
    """A long answer to a body that was not read to its end, which is discarded meanwhile.

    A peer that reads no answer before it has sent everything would wait for us, and we for it.
    """

    def __init__(self, response: Response) -> None:
        self.status_code = response.status_code
        self._response = response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_discard, receive)
            await self._response(scope, receive, send)
            nursery.cancel_scope.cancel()


async def _discard(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _respond(answer: Any) -> Any:
    """Return an answer as a response; one that goes on and on is one already."""
    if not isinstance(answer, RouteAnswer):
        return answer
    content = answer.data if isinstance(answer.data, bytes) else msgspec.json.encode(answer.data)
    return Response(content, answer.status, ANSWER_HEADERS, answer.media_type)


def _refuse(error: HttpError | BrokerError | PartlyStored) -> Response:
    status, body = refusal(error)
    headers = dict(error.headers) if isinstance(error, HttpError) else {}
    return Response(msgspec.json.encode(body), status, {**ANSWER_HEADERS, **headers}, "application/json")
