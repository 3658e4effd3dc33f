"""gateways.http_service: the routes about the broker itself: is it well, what can it do, how much does it do.

May import: core.broker, core.version, gateways.http_docs, gateways.http_openapi, gateways.http_page,
    gateways.http_rows, gateways.metrics, msgspec, the standard library.
Never: trio, sockets, files.
"""

from __future__ import annotations

from typing import Any

import msgspec

from core.broker import MessageBroker
from core.version import __version__
from gateways import http_docs, http_page
from gateways.http_openapi import describe
from gateways.http_rows import Answer, Call, Row
from gateways.metrics import MEDIA_TYPE, render

HTML = "text/html; charset=utf-8"


class Index(msgspec.Struct, frozen=True):
    service: str
    version: str
    endpoints: list[str]


class Status(msgspec.Struct, frozen=True, omit_defaults=True):
    """`reason` says why it is not ready; `damaged` lists topics that are not served while the others are."""

    status: str
    reason: str | None = None
    damaged: list[str] = []


async def index(call: Call) -> Answer:
    if "text/html" in call.headers.get("accept", ""):
        return Answer(http_page.INDEX, media_type=HTML)
    endpoints = [f"{row.method} {row.path}" for row in call.service.rows]
    return Answer(Index("qb", __version__, endpoints))


async def health(call: Call) -> Answer:
    return Answer(Status("healthy"))


async def ready(call: Call) -> Answer:
    status = readiness(call.broker)
    return Answer(status, 200 if status.reason is None else 503)


def readiness(broker: MessageBroker) -> Status:
    """Say whether the broker takes messages for all its topics, and if not, why."""
    if broker.draining:
        return Status("draining", "the broker is shutting down")
    states = [
        broker.engine.log(name, number).state()
        for name, topic in broker.engine.topics().items()
        for number in range(topic.partitions)
    ]
    damaged = sorted({state.reason for state in states if state.status == "damaged" and state.reason})
    poisoned = next((state.reason for state in states if state.status == "poisoned"), None)
    return Status("poisoned", poisoned, damaged) if poisoned else Status("ready", None, damaged)


async def metrics(call: Call) -> Answer:
    return Answer(await render(call.broker), media_type=MEDIA_TYPE)


async def openapi(call: Call) -> Answer:
    return Answer(describe(call.service.rows))


async def docs(call: Call) -> Answer:
    return Answer(http_docs.render(describe(call.service.rows)), media_type=HTML)


ROWS = [
    Row("GET", "/", "a page for a browser, what there is for others", index, answer=Index),
    Row("GET", "/health", "does the broker answer?", health, answer=Status),
    Row("GET", "/ready", "does it take messages?", ready, answer=Status, refusals=(503,)),
    Row("GET", "/metrics", "numbers for Prometheus", metrics, media_type=MEDIA_TYPE),
    Row("GET", "/openapi.json", "this API, described", openapi, answer=dict[str, Any]),
    Row("GET", "/docs", "this API, readable", docs, media_type=HTML),
]
