"""gateways.http_app: the table of routes as an ASGI application: every request checked, every failure answered.

May import: core.broker, core.errors, gateways.http_bodies, gateways.http_consumers, gateways.http_errors,
    gateways.http_messages, gateways.http_page, gateways.http_rows, gateways.http_service, gateways.http_streams,
    gateways.http_subscriptions, gateways.http_summary, gateways.http_topics, msgspec, starlette, the standard library.
Never: trio, sockets, files.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from core.broker import MessageBroker
from core.errors import BrokerError, Internal
from gateways import (
    http_consumers,
    http_messages,
    http_page,
    http_service,
    http_subscriptions,
    http_summary,
    http_topics,
)
from gateways.http_bodies import JSON, LINES, BodyReader, PeerGone, check_media_type, decode, parse_query
from gateways.http_errors import HttpError, PartlyStored, no_such_route, refusal
from gateways.http_rows import Answer, Call, Fields, Nothing, Row, Service, Waits
from gateways.http_streams import Streams

log = logging.getLogger("qb.http")

ROWS: Sequence[Row] = [
    *http_service.ROWS,
    *http_topics.ROWS,
    *http_messages.ROWS,
    *http_consumers.ROWS,
    *http_subscriptions.ROWS,
    *http_summary.ROWS,
    *http_page.ROWS,
]
SMALL_BODY = 1 << 20  # bytes; bodies of messages may be longer: see body_limit()
NO_STORE = {"cache-control": "no-store"}  # what is told here is out of date at once


def make_service(broker: MessageBroker) -> Service:
    """Return what the routes work with."""
    return Service(broker, Streams(broker), Waits(), ROWS)


def make_app(service: Service) -> Starlette:
    """Return the application."""
    reader = BodyReader()
    by_path: dict[str, dict[str, Row]] = {}
    for row in service.rows:
        by_path.setdefault(row.path, {})[row.method] = row
    routes = [Route(path, Endpoint(service, rows, reader)) for path, rows in by_path.items()]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _nowhere})
    app.router.redirect_slashes = False
    return app


async def _nowhere(request: Request, error: Exception) -> Response:
    return _refuse(no_such_route(request.url.path))


def body_limit(row: Row, max_message_size: int) -> int:
    """Return how long the body of a request may be: of messages, as much as four of the largest need."""
    return 4 * max_message_size + SMALL_BODY if row.lines else SMALL_BODY


class Endpoint:
    """All routes of one path."""

    def __init__(self, service: Service, rows: Mapping[str, Row], reader: BodyReader) -> None:
        self._service = service
        self._rows = rows
        self._reader = reader
        self._decoders: dict[str, msgspec.json.Decoder[Fields]] = {
            method: msgspec.json.Decoder(row.body) for method, row in rows.items() if row.body
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await self._respond(scope, receive)
        except PeerGone:
            return
        except (HttpError, BrokerError, PartlyStored) as error:
            response = _refuse(error)
        except Exception:
            log.exception("%s %s failed by a fault of ours", scope["method"], scope["path"])
            response = _refuse(Internal("internal error; the broker's log has the details"))
        status = response.status_code if isinstance(response, Response) else 200
        path = next(iter(self._rows.values())).path
        method = scope["method"] if scope["method"] in self._methods else "other"
        self._service.broker.metrics.requests[method, path, status] += 1
        await response(scope, receive, send)

    async def _respond(self, scope: Scope, receive: Receive) -> Any:
        headers = Headers(scope=scope)
        row = self._row(scope["method"])
        check_origin(headers)
        query = parse_query(scope["query_string"], row.query)
        peer = scope["state"].get("peer")
        call = Call(self._service, scope["path_params"], query, None, headers, peer)
        if row.body is None:
            return _respond(await row.carry_out(call))
        limit = body_limit(row, self._service.broker.settings.server.max_message_size)
        async with self._reader.read(receive, headers, limit) as body:
            call = call._replace(body=self._decode(row, headers, body))
            return _respond(await row.carry_out(call))

    def _row(self, method: str) -> Row:
        row = self._rows.get("GET" if method == "HEAD" else method)
        if row is None or (row.streams and method == "HEAD"):
            allowed = ", ".join(self._methods)
            raise HttpError(405, "METHOD_NOT_ALLOWED", f"{method[:20]} is not one of {allowed}", {"allow": allowed})
        return row

    @property
    def _methods(self) -> list[str]:
        can_head = "GET" in self._rows and not self._rows["GET"].streams
        return [*self._rows, *(["HEAD"] if can_head else [])]

    def _decode(self, row: Row, headers: Headers, body: bytes) -> Fields | bytes:
        if row.body is Nothing and not body:
            return Nothing()
        found = check_media_type(headers, JSON, *([LINES] if row.lines else []))
        return body if found == LINES else decode(body, self._decoders[row.method])


def check_origin(headers: Headers) -> None:
    """Refuse what a page of another site asks for: whoever reaches this door may do everything. Raises HttpError."""
    origin, host = headers.get("origin"), headers.get("host", "")
    foreign = origin is not None and urlsplit(origin).netloc.lower() != host.lower()
    if foreign or headers.get("sec-fetch-site") == "cross-site":
        raise HttpError(403, "FOREIGN_ORIGIN", "a page of another site may not use this broker")


def _respond(answer: Any) -> Any:
    """Return an answer as a response; one that goes on and on is one already."""
    if not isinstance(answer, Answer):
        return answer
    content = answer.data if isinstance(answer.data, bytes) else msgspec.json.encode(answer.data)
    return Response(content, answer.status, NO_STORE, answer.media_type)


def _refuse(error: HttpError | BrokerError | PartlyStored) -> Response:
    status, body = refusal(error)
    headers = dict(error.headers) if isinstance(error, HttpError) else {}
    return Response(msgspec.json.encode(body), status, {**NO_STORE, **headers}, "application/json")
