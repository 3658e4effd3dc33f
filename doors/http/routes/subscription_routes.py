"""The routes of subscriptions, their dead letters and their streams."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from qb.core.pacing import portions
from qb.core.rights import needs
from qb.core.subscriptions.subscription_options import SubscriptionOptions
from qb.doors.binary.methods import sees_subscription
from qb.doors.http.requests.browser_rules import check_join
from qb.doors.http.routes.listings import PageQuery, page
from qb.doors.http.routes.route_table import Fields, NoFields, RouteAnswer, RouteCall, RouteRow
from qb.doors.http.routes.topic_routes import DeletedBody
from qb.doors.http.streams.event_stream import EventStream

SETTLED = 10_000  # acks, and nacks, in one request
Offset = Annotated[int, Meta(ge=0, le=2**63 - 1)]
PartitionNumber = Annotated[int, Meta(ge=0, lt=2**31)]
Place = Annotated[int | str, Meta(description="an offset, earliest, latest or a time")]
Seconds = Annotated[float, Meta(ge=0, le=604_800)]


class CreateSubscriptionBody(Fields):
    subscription_id: str
    topic: str
    start_offset: Place = 0
    options: SubscriptionOptions | None = None


class ListSubscriptionsQuery(PageQuery):
    topic: str | None = None
    detail: bool = False  # with the numbers of each, of all its partitions together


class SeekBody(Fields):
    to: Place
    partition: PartitionNumber | None = None


class ForkBody(Fields):
    new_id: str


class ExplainQuery(Fields):
    offset: Offset
    partition: PartitionNumber = 0


class ListLettersQuery(Fields):
    max: Annotated[int, Meta(ge=1, le=10_000)] = 100


class ChooseLettersBody(Fields):
    numbers: list[Offset] | None = None  # all of them if it is left out


class StreamQuery(Fields):
    auto_ack: bool = False
    window: Annotated[int | None, Meta(description="messages in flight; 100 if it is left out")] = None


class AckBody(Fields):
    partition: PartitionNumber
    offset: Offset


class NackBody(Fields):
    partition: PartitionNumber
    offset: Offset
    reason: str = ""
    delay_seconds: Seconds | None = None


class SettleRequestBody(Fields):
    stream: str | None = None  # as its first event says; not needed if it is the only one
    acks: Annotated[list[AckBody], Meta(max_length=SETTLED)] = msgspec.field(default_factory=list)
    nacks: Annotated[list[NackBody], Meta(max_length=SETTLED)] = msgspec.field(default_factory=list)


class SettleAnswer(msgspec.Struct, frozen=True):
    """How many of them the stream still held; the others were ignored."""

    acked: int
    nacked: int


class SubscriptionsBody(msgspec.Struct, frozen=True, omit_defaults=True):
    subscriptions: list[dict[str, Any]]
    next_after: str | None = None  # there are more: ask with `after`


class ExplanationBody(msgspec.Struct, frozen=True):
    text: str


class LettersBody(msgspec.Struct, frozen=True):
    dead_letters: list[dict[str, Any]]


async def create(call: RouteCall) -> RouteAnswer:
    wanted: CreateSubscriptionBody = call.body
    options = None if wanted.options is None else msgspec.to_builtins(wanted.options)
    made = await call.broker.subscriptions.create(
        wanted.subscription_id, wanted.topic, wanted.start_offset, options, call.principal.name
    )
    return RouteAnswer(made, 201)


async def list_all(call: RouteCall) -> RouteAnswer:
    manager = call.broker.subscriptions
    listing = manager.list_totals if call.query.detail else manager.list_all
    seen = [each for each in await listing(call.query.topic) if sees_subscription(call.principal, each)]
    listed, next_after = page(seen, call.query, lambda subscription: str(subscription["subscription_id"]))
    return RouteAnswer(SubscriptionsBody(listed, next_after))


async def describe(call: RouteCall) -> RouteAnswer:
    return RouteAnswer(await call.broker.subscriptions.describe(_id(call)))


async def delete(call: RouteCall) -> RouteAnswer:
    await call.broker.subscriptions.delete(_id(call))
    return RouteAnswer(DeletedBody(True))


async def seek(call: RouteCall) -> RouteAnswer:
    return RouteAnswer(await call.broker.subscriptions.seek(_id(call), call.body.to, call.body.partition))


async def pause(call: RouteCall) -> RouteAnswer:
    return RouteAnswer(await call.broker.subscriptions.pause(_id(call)))


async def resume(call: RouteCall) -> RouteAnswer:
    return RouteAnswer(await call.broker.subscriptions.resume(_id(call)))


async def fork(call: RouteCall) -> RouteAnswer:
    return RouteAnswer(await call.broker.subscriptions.fork(_id(call), call.body.new_id, call.principal.name), 201)


async def explain(call: RouteCall) -> RouteAnswer:
    return RouteAnswer(await call.broker.subscriptions.explain(_id(call), call.query.offset, call.query.partition))


async def dead_letters(call: RouteCall) -> RouteAnswer:
    letters = await call.broker.subscriptions.dead_letters(_id(call), call.query.max)
    return RouteAnswer(LettersBody(msgspec.to_builtins(letters)))


async def retry(call: RouteCall) -> RouteAnswer:
    return RouteAnswer(await call.broker.subscriptions.retry_dead_letters(_id(call), call.body.numbers))


async def purge(call: RouteCall) -> RouteAnswer:
    return RouteAnswer(await call.broker.subscriptions.purge_dead_letters(_id(call), call.body.numbers))


async def stream(call: RouteCall) -> EventStream:
    check_join(call.headers)
    return call.service.streams.join(
        _id(call),
        call.peer,
        window=call.query.window,
        auto_ack=call.query.auto_ack,
        last_event_id=call.headers.get("last-event-id", ""),
    )


async def settle(call: RouteCall) -> RouteAnswer:
    wanted: SettleRequestBody = call.body
    held = call.service.streams.find(_id(call), wanted.stream, call.principal)
    acked = nacked = 0
    async for acks in portions(wanted.acks):
        by_partition: dict[int, list[range]] = {}
        for each in acks:
            by_partition.setdefault(each.partition, []).append(range(each.offset, each.offset + 1))
        acked += sum([held.ack(partition, runs) for partition, runs in by_partition.items()])
    async for nacks in portions(wanted.nacks):
        nacked += sum([held.nack(each.partition, each.offset, each.reason, each.delay_seconds) for each in nacks])
    return RouteAnswer(SettleAnswer(acked, nacked))


def _id(call: RouteCall) -> str:
    return call.path["subscription"]


NAME = "subscription"
ONE = "/subscriptions/{subscription}"
ANY = dict[str, Any]
ROWS = [
    RouteRow(
        "POST",
        "/subscriptions",
        "make a subscription; the same again if it exists",
        create,
        needs.all_of(needs.create_subscription(letters="options.dead_letter_topic"), needs.read()),
        body=CreateSubscriptionBody,
        status=201,
        answer=ANY,
        refusals=(404, 409),
    ),
    RouteRow(
        "GET",
        "/subscriptions",
        "subscriptions by name",
        list_all,
        needs.see_topic(),
        query=ListSubscriptionsQuery,
        answer=SubscriptionsBody,
    ),
    RouteRow(
        "GET", ONE, "a subscription in numbers", describe, needs.see_subscription(NAME), answer=ANY, refusals=(404,)
    ),
    RouteRow(
        "DELETE",
        ONE,
        "remove a subscription",
        delete,
        needs.manage_subscription(NAME),
        answer=DeletedBody,
        refusals=(404,),
    ),
    RouteRow(
        "POST",
        f"{ONE}/seek",
        "begin anew at an offset or a time",
        seek,
        needs.manage_subscription(NAME),
        body=SeekBody,
        answer=ANY,
        refusals=(404,),
    ),
    RouteRow(
        "POST",
        f"{ONE}/pause",
        "deliver nothing until resumed",
        pause,
        needs.manage_subscription(NAME),
        body=NoFields,
        answer=ANY,
        refusals=(404,),
    ),
    RouteRow(
        "POST",
        f"{ONE}/resume",
        "deliver again",
        resume,
        needs.manage_subscription(NAME),
        body=NoFields,
        answer=ANY,
        refusals=(404,),
    ),
    RouteRow(
        "POST",
        f"{ONE}/fork",
        "make another one that stands where this one stands",
        fork,
        needs.all_of(needs.manage_subscription(NAME), needs.inspect(NAME), needs.create_subscription("new_id")),
        body=ForkBody,
        status=201,
        answer=ANY,
        refusals=(404, 409),
    ),
    RouteRow(
        "GET",
        f"{ONE}/explain",
        "why a message is where it is, in words",
        explain,
        needs.inspect(NAME),
        query=ExplainQuery,
        answer=ExplanationBody,
        refusals=(404,),
    ),
    RouteRow(
        "GET",
        f"{ONE}/dead-letters",
        "messages that were given up",
        dead_letters,
        needs.inspect(NAME),
        query=ListLettersQuery,
        answer=LettersBody,
        refusals=(404,),
    ),
    RouteRow(
        "POST",
        f"{ONE}/dead-letters/retry",
        "deliver dead letters again",
        retry,
        needs.manage_subscription(NAME),
        body=ChooseLettersBody,
        answer=dict[str, int],
        refusals=(404,),
    ),
    RouteRow(
        "POST",
        f"{ONE}/dead-letters/purge",
        "forget dead letters",
        purge,
        needs.manage_subscription(NAME),
        body=ChooseLettersBody,
        answer=dict[str, int],
        refusals=(404,),
    ),
    RouteRow(
        "GET",
        f"{ONE}/stream",
        "join, and get messages as Server-Sent Events",
        stream,
        needs.consume(NAME),
        query=StreamQuery,
        media_type="text/event-stream",
        refusals=(403, 404, 406, 409, 503),
        streams=True,
    ),
    RouteRow(
        "POST",
        f"{ONE}/acks",
        "ack or nack what a stream has got",
        settle,
        needs.consume(NAME),
        body=SettleRequestBody,
        answer=SettleAnswer,
        refusals=(404, 409),
    ),
]
