"""The routes of topics and their partitions."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from qb.core.broker.fetching import FetchLimits, messages
from qb.core.pacing import portions
from qb.core.positions import resolve
from qb.core.rights import needs
from qb.core.rights.needs import ANY_USER
from qb.core.wire.errors import UnknownPartition
from qb.core.wire.whole_numbers import whole_number
from qb.doors.http.reports.http_views import (
    HOUR,
    MessageView,
    PartitionView,
    TopicView,
    message_view,
    partition_view,
    topic_view,
)
from qb.doors.http.reports.topic_states import topic_states
from qb.doors.http.requests.http_errors import bad_request
from qb.doors.http.routes.listings import PageQuery, page
from qb.doors.http.routes.route_table import Fields, RouteAnswer, RouteCall, RouteRow
from qb.doors.http.streams.event_stream import EventStream
from qb.doors.http.streams.message_events import parse_event_id
from qb.storage.engine import LogState, PartitionLog, Topic

Size = Annotated[int, Meta(ge=0, lt=2**53)]


class CreateTopicBody(Fields):
    name: str | None = None
    partitions: Annotated[int, Meta(ge=1, le=100_000)] = 1
    retention_seconds: Annotated[float, Meta(ge=0, lt=2**53)] | None = None
    retention_bytes: Size | None = None
    replication_factor: Annotated[int, Meta(ge=1, le=1, description="the local engine keeps one copy")] = 1


class DeleteTopicQuery(Fields):
    if_unused: bool = False


class FetchQuery(Fields):
    offset: Annotated[str, Meta(description="an offset, earliest, latest or a time")] = "0"
    max_records: Annotated[int, Meta(ge=1, le=10_000)] = 100
    max_wait_ms: Annotated[int, Meta(ge=0, le=60_000)] = 0


class TailQuery(Fields):
    partition: Annotated[int | None, Meta(description="all of them if it is left out")] = None
    offset: Annotated[str, Meta(description="an offset, earliest, latest or a time")] = "latest"


class TopicsBody(msgspec.Struct, frozen=True, omit_defaults=True):
    topics: list[TopicView]
    next_after: str | None = None  # there are more: ask with `after`


class TopicDetails(msgspec.Struct, frozen=True):
    topic: TopicView
    partitions: list[PartitionView]


class DeletedBody(msgspec.Struct, frozen=True):
    deleted: bool


class MessagesBody(msgspec.Struct, frozen=True):
    messages: list[MessageView]


class Watermarks(msgspec.Struct, frozen=True):
    """Offsets from `low_watermark` up to, not including, `high_watermark` can be read."""

    high_watermark: int
    low_watermark: int


async def list_topics(call: RouteCall) -> RouteAnswer:
    seen = [topic for topic in await call.broker.topics.list_all() if call.principal.sees_topic(topic.topic)]
    topics, next_after = page(seen, call.query, lambda topic: topic.topic)
    views = [topic_view(each.topic, each.states) async for each in topic_states(call.broker, topics)]
    return RouteAnswer(TopicsBody(views, next_after))


async def create_topic(call: RouteCall) -> RouteAnswer:
    wanted: CreateTopicBody = call.body
    if not wanted.name:
        raise bad_request("Missing topic name")
    hours = None if wanted.retention_seconds is None else wanted.retention_seconds / HOUR
    made = await call.broker.topics.create(
        wanted.name, wanted.partitions, hours, wanted.retention_bytes, call.principal.name
    )
    return RouteAnswer(topic_view(made, _states(call, made)), 201)


async def describe_topic(call: RouteCall) -> RouteAnswer:
    topic = call.broker.topics.get(call.path["topic"])
    states = _states(call, topic)
    return RouteAnswer(TopicDetails(topic_view(topic, states), [partition_view(state) for state in states]))


async def delete_topic(call: RouteCall) -> RouteAnswer:
    await call.broker.topics.delete(call.path["topic"], call.query.if_unused)
    return RouteAnswer(DeletedBody(True))


async def fetch(call: RouteCall) -> RouteAnswer:
    log, wanted = log_of(call), call.query
    offset = await _offset(log, wanted.offset)
    limits = FetchLimits(max_messages=wanted.max_records, max_wait=wanted.max_wait_ms / 1000)
    with call.service.waits.waiting() as waiting:
        chunk = await call.broker.fetch(log.topic, log.partition, offset, limits)
    if waiting.cancelled_caught:
        chunk = await call.broker.fetch(log.topic, log.partition, offset, limits._replace(max_wait=0.0))
    views: list[MessageView] = []
    async for portion in portions(messages(chunk)):
        views += [message_view(each, log.topic, log.partition) for each in portion]
    return RouteAnswer(MessagesBody(views))


async def offsets(call: RouteCall) -> RouteAnswer:
    log = log_of(call)
    return RouteAnswer(Watermarks(log.end_offset, log.first_offset))


async def tail(call: RouteCall) -> EventStream:
    topic, wanted = call.broker.topics.get(call.path["topic"]), call.query
    numbers = range(topic.partitions) if wanted.partition is None else [wanted.partition]
    starts = {number: await resolve(call.broker.topics.log(topic.topic, number), wanted.offset) for number in numbers}
    seen = parse_event_id(call.headers.get("last-event-id", ""))
    if seen and seen[0] in starts:
        log = call.broker.topics.log(topic.topic, seen[0])
        starts[seen[0]] = min(seen[1] + 1, log.end_offset)
    return call.service.streams.tail(topic.topic, starts, call.peer)


def log_of(call: RouteCall) -> PartitionLog:
    """Return the log that the path names. Raises UnknownTopic, UnknownPartition."""
    topic = call.broker.topics.get(call.path["topic"])
    partition = whole_number(call.path["partition"], 0)
    if partition is None:
        raise UnknownPartition(topic.topic, call.path["partition"][:80], topic.partitions)
    return call.broker.topics.log(topic.topic, partition)


async def _offset(log: PartitionLog, text: str) -> int:
    """Return the offset that is meant: a number as it is, or what a word or a time stands for. Raises BadRequest."""
    number = whole_number(text, 0)
    return await resolve(log, text) if number is None else number


def _states(call: RouteCall, topic: Topic) -> list[LogState]:
    return [call.broker.topics.log(topic.topic, number).state() for number in range(topic.partitions)]


ROWS = [
    RouteRow("GET", "/topics", "topics by name", list_topics, ANY_USER, query=PageQuery, answer=TopicsBody),
    RouteRow(
        "POST",
        "/topics",
        "make a topic",
        create_topic,
        needs.create_topic("name"),
        body=CreateTopicBody,
        status=201,
        answer=TopicView,
        refusals=(409, 429, 507),
    ),
    RouteRow(
        "GET",
        "/topics/{topic}",
        "one topic and its partitions",
        describe_topic,
        needs.see_topic(),
        answer=TopicDetails,
        refusals=(404,),
    ),
    RouteRow(
        "DELETE",
        "/topics/{topic}",
        "remove a topic and everything in it",
        delete_topic,
        needs.manage_topic(),
        query=DeleteTopicQuery,
        answer=DeletedBody,
        refusals=(404, 409),
    ),
    RouteRow(
        "GET",
        "/topics/{topic}/partitions/{partition}/messages",
        "messages from an offset on",
        fetch,
        needs.read(),
        query=FetchQuery,
        answer=MessagesBody,
        refusals=(404, 416, 503),
    ),
    RouteRow(
        "GET",
        "/topics/{topic}/partitions/{partition}/offsets",
        "what can be read",
        offsets,
        needs.read(),
        answer=Watermarks,
        refusals=(404,),
    ),
    RouteRow(
        "GET",
        "/topics/{topic}/tail",
        "messages as they come, as Server-Sent Events",
        tail,
        needs.read(),
        query=TailQuery,
        media_type="text/event-stream",
        refusals=(404, 503),
        streams=True,
    ),
]
