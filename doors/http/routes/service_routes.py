"""The routes about the broker itself: is it well, what can it do, how much does it do."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from qb.core.broker.message_broker import MessageBroker
from qb.core.rights.needs import METRICS, OPEN
from qb.core.rights.principals import UNRESTRICTED, Principal
from qb.core.wire.version import __version__
from qb.doors.http.reports.prometheus import MEDIA_TYPE, render
from qb.doors.http.reports.topic_states import topic_states
from qb.doors.http.routes import api_docs, page_routes
from qb.doors.http.routes.openapi import describe
from qb.doors.http.routes.route_table import RouteAnswer, RouteCall, RouteRow

HTML = "text/html; charset=utf-8"


class IndexBody(msgspec.Struct, frozen=True):
    service: str
    version: str
    endpoints: list[str]


class StatusBody(msgspec.Struct, frozen=True, omit_defaults=True):
    """`reason` says why it is not ready; `damaged` lists topics that are not served while the others are.

    `unfinished` lists transactions that are committed and cannot be shown yet, with the reason. In a cluster, `role` is
    the role of the broker that answers, and `cluster` what is wrong with NATS nodes and other brokers.
    """

    status: str
    reason: str | None = None
    damaged: list[str] = []
    unfinished: list[str] = []
    role: str | None = None
    cluster: list[str] = []


async def index(call: RouteCall) -> RouteAnswer:
    if "text/html" in call.headers.get("accept", ""):
        return RouteAnswer(page_routes.INDEX, media_type=HTML)
    endpoints = [f"{row.method} {row.path}" for row in call.service.rows]
    return RouteAnswer(IndexBody("qb", __version__, endpoints))


async def health(call: RouteCall) -> RouteAnswer:
    return RouteAnswer(StatusBody("healthy", unfinished=_for_admins(call.principal, call.broker.transactions.faults)))


async def ready(call: RouteCall) -> RouteAnswer:
    status = await readiness(call.broker, call.principal)
    return RouteAnswer(status, 200 if status.reason is None else 503)


def _for_admins(principal: Principal, texts: list[str]) -> list[str]:
    """Return texts that name topics and transactions: to a user that may know of all of them."""
    return texts if principal.is_admin else []


async def readiness(broker: MessageBroker, principal: Principal = UNRESTRICTED) -> StatusBody:
    """Say whether the broker takes messages for all its topics, and if not, why; only an admin sees names in it."""
    if broker.draining:
        return StatusBody("draining", "the broker is shutting down")
    topics = list(broker.engine.topics().values())
    states = [state async for each in topic_states(broker, topics) for state in each.states if state.status != "ok"]
    damaged = sorted({state.reason for state in states if state.status == "damaged" and state.reason})
    poisoned = next((state.reason for state in states if state.status == "poisoned"), None)
    if poisoned and not principal.is_admin:
        poisoned = "a log takes no messages"
    damaged, unfinished = _for_admins(principal, damaged), _for_admins(principal, broker.transactions.faults)
    cell = broker.ownership.report() if broker.ownership is not None else None
    role, cluster = (cell.role, _for_admins(principal, cell.troubles)) if cell is not None else (None, [])
    return StatusBody("poisoned" if poisoned else "ready", poisoned, damaged, unfinished, role, cluster)


async def metrics(call: RouteCall) -> RouteAnswer:
    return RouteAnswer(await render(call.broker), media_type=MEDIA_TYPE)


async def openapi(call: RouteCall) -> RouteAnswer:
    return RouteAnswer(describe(call.service.rows))


async def docs(call: RouteCall) -> RouteAnswer:
    return RouteAnswer(_docs(call.service.rows), media_type=HTML)


@cache
def _docs(rows: tuple[RouteRow, ...]) -> bytes:
    return api_docs.render(describe(rows))


ROWS = [
    RouteRow("GET", "/", "a page for a browser, what there is for others", index, OPEN, answer=IndexBody),
    RouteRow("GET", "/health", "does the broker answer?", health, OPEN, answer=StatusBody),
    RouteRow("GET", "/ready", "does it take messages?", ready, OPEN, answer=StatusBody, refusals=(503,)),
    RouteRow("GET", "/metrics", "numbers for Prometheus", metrics, METRICS, media_type=MEDIA_TYPE),
    RouteRow("GET", "/openapi.json", "this API, described", openapi, OPEN, answer=dict[str, Any]),
    RouteRow("GET", "/docs", "this API, readable", docs, OPEN, media_type=HTML),
]
