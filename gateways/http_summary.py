"""gateways.http_summary: everything that the live page shows at a glance, in one answer.

May import: core.broker, core.live, core.group_view, core.subscriptions.report, core.version,
    gateways.http_rows, gateways.http_service, gateways.http_views, storage.measures, msgspec, the standard library.
Never: trio, sockets, files.

Gathered in one step of the event loop, without reading a log: it may be asked for every second.
"""

from __future__ import annotations

import msgspec

from core.broker import MessageBroker
from core.group_view import GroupView
from core.live import Live
from core.subscriptions.report import Description
from core.version import __version__
from gateways.http_rows import Answer, Call, Row
from gateways.http_service import Status, readiness
from gateways.http_views import TopicView, topic_view
from storage.measures import Histogram


class TopicNumbers(msgspec.Struct, frozen=True, kw_only=True):
    """A topic, and how much of it was published since the broker's start."""

    topic: TopicView
    published_messages: int
    published_bytes: int


class SubscriptionNumbers(msgspec.Struct, frozen=True, kw_only=True):
    """A subscription, and how much of it was done since the broker's start."""

    topic: str
    numbers: Description
    delivered_messages: int
    acked_messages: int
    fault: str | None  # why it stands still, if its log cannot be read


class Latency(msgspec.Struct, frozen=True):
    """How many were at most as long as each bound, in seconds; the last count is of those that were longer."""

    bounds: tuple[float, ...]
    counts: list[int]


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The broker at a glance. Counts begin at zero when it starts."""

    version: str
    status: Status
    topics: list[TopicNumbers]
    subscriptions: list[SubscriptionNumbers]
    groups: list[GroupView]
    fsync: Latency
    connections: dict[str, int]


async def summary(call: Call) -> Answer:
    broker = call.broker
    return Answer(
        Summary(
            version=__version__,
            status=readiness(broker),
            topics=[_topic(broker, name) for name in sorted(broker.engine.topics())],
            subscriptions=[_subscription(each) for each in sorted(broker.subscriptions.deliveries, key=_name)],
            groups=broker.groups.views(),
            fsync=_latency(broker.engine.measures.sync_seconds),
            connections=dict(broker.metrics.connections),
        )
    )


def _topic(broker: MessageBroker, name: str) -> TopicNumbers:
    topic = broker.engine.topics()[name]
    logs = [broker.engine.log(name, number) for number in range(topic.partitions)]
    return TopicNumbers(
        topic=topic_view(topic, [log.state() for log in logs]),
        published_messages=sum(log.published_messages for log in logs),
        published_bytes=sum(log.published_bytes for log in logs),
    )


def _subscription(live: Live) -> SubscriptionNumbers:
    return SubscriptionNumbers(
        topic=live.topic,
        numbers=live.subscription.describe(live.ends()),
        delivered_messages=live.delivered_messages,
        acked_messages=live.subscription.acked,
        fault=live.fault,
    )


def _name(live: Live) -> str:
    return live.name


def _latency(histogram: Histogram) -> Latency:
    return Latency(histogram.bounds, list(histogram.counts))


ROWS = [Row("GET", "/summary", "everything at a glance, for the live page", summary, answer=Summary)]
