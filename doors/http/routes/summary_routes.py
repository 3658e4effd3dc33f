"""Everything that the live page shows at a glance, in one answer.

Gathered in portions, without reading a log: it may be asked for every second.
"""

from __future__ import annotations

import msgspec

from qb.core.broker.cell_report import CellReport
from qb.core.groups.group_reports import GroupOverview
from qb.core.push.active_subscription import ActiveSubscription
from qb.core.rights.needs import ANY_USER
from qb.core.subscriptions.subscription_report import SubscriptionTotals
from qb.core.wire.version import __version__
from qb.doors.http.reports.http_views import TopicView, topic_view
from qb.doors.http.reports.topic_states import topic_states
from qb.doors.http.routes.listings import LISTED
from qb.doors.http.routes.route_table import RouteAnswer, RouteCall, RouteRow
from qb.doors.http.routes.service_routes import StatusBody, readiness
from qb.storage.engine import LogState, PartitionLog, Topic
from qb.storage.measures import Histogram


class TopicNumbers(msgspec.Struct, frozen=True, kw_only=True):
    """A topic, and how much of it was published since the broker's start."""

    topic: TopicView
    published_messages: int
    published_bytes: int


class SubscriptionNumbers(msgspec.Struct, frozen=True, kw_only=True):
    """A subscription, and how much of it was done since the broker's start."""

    topic: str
    numbers: SubscriptionTotals
    subscribers: int
    delivered_messages: int
    acked_messages: int
    fault: str | None  # why it stands still, if its log cannot be read


class Latency(msgspec.Struct, frozen=True):
    """How many were at most as long as each bound, in seconds; the last count is of those that were longer."""

    bounds: tuple[float, ...]
    counts: list[int]


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The broker at a glance, at most LISTED of each kind by name. Counts begin at zero when it starts."""

    version: str
    status: StatusBody
    topics: list[TopicNumbers]
    subscriptions: list[SubscriptionNumbers]
    groups: list[GroupOverview]
    omitted: dict[str, int]  # how many topics, subscriptions and groups are not listed
    fsync: Latency
    connections: dict[str, int]
    cell: CellReport | None  # of a broker of a cluster, for admins


async def summary(call: RouteCall) -> RouteAnswer:
    broker, user = call.broker, call.principal
    topics = [topic for topic in await broker.topics.list_all() if user.sees_topic(topic.topic)]
    most = LISTED if user.is_admin else None
    totals = await broker.subscriptions.totals(most=most)
    seen = [each for each in totals if user.sees_consumer(each[0].name) and user.sees_topic(each[0].topic)]
    groups = [each for each in await broker.groups.overviews(most=most) if user.sees_consumer(each.group)]
    subscriptions, in_all = seen[:LISTED], (len(seen), len(groups))
    if user.is_admin:
        in_all = len(broker.subscriptions.deliveries), len(broker.groups)
    return RouteAnswer(
        Summary(
            version=__version__,
            status=await readiness(broker, user),
            topics=[_topic(*each) async for each in topic_states(broker, topics[:LISTED])],
            subscriptions=[_subscription(*each) for each in subscriptions],
            groups=groups[:LISTED],
            omitted={
                "topics": max(0, len(topics) - LISTED),
                "subscriptions": max(0, in_all[0] - LISTED),
                "groups": max(0, in_all[1] - LISTED),
            },
            fsync=_latency(broker.engine.measures.sync_seconds),
            connections=dict(broker.metrics.connections),
            cell=broker.ownership.report() if broker.ownership is not None and user.is_admin else None,
        )
    )


def _topic(topic: Topic, logs: list[PartitionLog], states: list[LogState]) -> TopicNumbers:
    return TopicNumbers(
        topic=topic_view(topic, states),
        published_messages=sum([log.published_messages for log in logs]),
        published_bytes=sum([log.published_bytes for log in logs]),
    )


def _subscription(active: ActiveSubscription, numbers: SubscriptionTotals) -> SubscriptionNumbers:
    return SubscriptionNumbers(
        topic=active.topic,
        numbers=numbers,
        subscribers=len(active.sinks),
        delivered_messages=active.delivered_messages,
        acked_messages=active.subscription.acked,
        fault=active.fault,
    )


def _latency(histogram: Histogram) -> Latency:
    return Latency(histogram.bounds, list(histogram.counts))


ROWS = [RouteRow("GET", "/summary", "everything at a glance, for the live page", summary, ANY_USER, answer=Summary)]
