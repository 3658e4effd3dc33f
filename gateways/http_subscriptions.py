"""gateways.http_subscriptions: the routes of subscriptions, their dead letters and their streams.

May import: core.subscriptions.options, gateways.http_rows, gateways.http_topics, msgspec, the standard library.
Never: trio, sockets, files.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from core.subscriptions.options import Options
from gateways.http_rows import Answer, Call, Fields, Nothing, Row, Streaming
from gateways.http_topics import Deleted

Offset = Annotated[int, Meta(ge=0, le=2**63 - 1)]
PartitionNumber = Annotated[int, Meta(ge=0, lt=2**31)]
Place = Annotated[int | str, Meta(description="an offset, earliest, latest or a time")]
Seconds = Annotated[float, Meta(ge=0, le=604_800)]


class CreateSubscription(Fields):
    subscription_id: str
    topic: str
    start_offset: Place = 0
    options: Options | None = None


class ListSubscriptions(Fields):
    topic: str | None = None
    detail: bool = False  # with the numbers of each


class Seek(Fields):
    to: Place
    partition: PartitionNumber | None = None


class Fork(Fields):
    new_id: str


class Explain(Fields):
    offset: Offset
    partition: PartitionNumber = 0


class ListLetters(Fields):
    max: Annotated[int, Meta(ge=1, le=10_000)] = 100


class ChooseLetters(Fields):
    numbers: list[Offset] | None = None  # all of them if it is left out


class Stream(Fields):
    auto_ack: bool = False
    window: Annotated[int | None, Meta(description="messages in flight; 100 if it is left out")] = None


class Ack(Fields):
    partition: PartitionNumber
    offset: Offset


class Nack(Fields):
    partition: PartitionNumber
    offset: Offset
    reason: str = ""
    delay_seconds: Seconds | None = None


class Settle(Fields):
    stream: str | None = None  # as its first event says; not needed if it is the only one
    acks: list[Ack] = msgspec.field(default_factory=list)
    nacks: list[Nack] = msgspec.field(default_factory=list)


class Settled(msgspec.Struct, frozen=True):
    """How many of them the stream still held; the others were ignored."""

    acked: int
    nacked: int


class Subscriptions(msgspec.Struct, frozen=True):
    subscriptions: list[dict[str, Any]]


class Explanation(msgspec.Struct, frozen=True):
    text: str


class Letters(msgspec.Struct, frozen=True):
    dead_letters: list[dict[str, Any]]


async def create(call: Call) -> Answer:
    wanted: CreateSubscription = call.body
    options = None if wanted.options is None else msgspec.to_builtins(wanted.options)
    made = await call.broker.subscriptions.create(wanted.subscription_id, wanted.topic, wanted.start_offset, options)
    return Answer(made, 201)


async def list_all(call: Call) -> Answer:
    manager = call.broker.subscriptions
    listed = await manager.list_all(call.query.topic)
    if call.query.detail:
        listed = [await manager.describe(each["subscription_id"]) for each in listed]
    return Answer(Subscriptions(listed))


async def describe(call: Call) -> Answer:
    return Answer(await call.broker.subscriptions.describe(_id(call)))


async def delete(call: Call) -> Answer:
    await call.broker.subscriptions.delete(_id(call))
    return Answer(Deleted(True))


async def seek(call: Call) -> Answer:
    return Answer(await call.broker.subscriptions.seek(_id(call), call.body.to, call.body.partition))


async def pause(call: Call) -> Answer:
    return Answer(await call.broker.subscriptions.pause(_id(call)))


async def resume(call: Call) -> Answer:
    return Answer(await call.broker.subscriptions.resume(_id(call)))


async def fork(call: Call) -> Answer:
    return Answer(await call.broker.subscriptions.fork(_id(call), call.body.new_id), 201)


async def explain(call: Call) -> Answer:
    return Answer(await call.broker.subscriptions.explain(_id(call), call.query.offset, call.query.partition))


async def dead_letters(call: Call) -> Answer:
    letters = await call.broker.subscriptions.dead_letters(_id(call), call.query.max)
    return Answer(Letters(msgspec.to_builtins(letters)))


async def retry(call: Call) -> Answer:
    return Answer(await call.broker.subscriptions.retry_dead_letters(_id(call), call.body.numbers))


async def purge(call: Call) -> Answer:
    return Answer(await call.broker.subscriptions.purge_dead_letters(_id(call), call.body.numbers))


async def stream(call: Call) -> Streaming:
    return call.service.streams.join(
        _id(call),
        call.peer,
        window=call.query.window,
        auto_ack=call.query.auto_ack,
        last_event_id=call.headers.get("last-event-id", ""),
    )


async def settle(call: Call) -> Answer:
    wanted: Settle = call.body
    held = call.service.streams.find(_id(call), wanted.stream)
    acked = sum([held.ack(each.partition, [range(each.offset, each.offset + 1)]) for each in wanted.acks])
    nacked = sum([held.nack(each.partition, each.offset, each.reason, each.delay_seconds) for each in wanted.nacks])
    return Answer(Settled(acked, nacked))


def _id(call: Call) -> str:
    return call.path["subscription"]


ONE = "/subscriptions/{subscription}"
ANY = dict[str, Any]
ROWS = [
    Row(
        "POST",
        "/subscriptions",
        "make a subscription; the same again if it exists",
        create,
        body=CreateSubscription,
        status=201,
        answer=ANY,
        refusals=(404, 409),
    ),
    Row("GET", "/subscriptions", "every subscription", list_all, query=ListSubscriptions, answer=Subscriptions),
    Row("GET", ONE, "a subscription in numbers", describe, answer=ANY, refusals=(404,)),
    Row("DELETE", ONE, "remove a subscription", delete, answer=Deleted, refusals=(404,)),
    Row("POST", f"{ONE}/seek", "begin anew at an offset or a time", seek, body=Seek, answer=ANY, refusals=(404,)),
    Row("POST", f"{ONE}/pause", "deliver nothing until resumed", pause, body=Nothing, answer=ANY, refusals=(404,)),
    Row("POST", f"{ONE}/resume", "deliver again", resume, body=Nothing, answer=ANY, refusals=(404,)),
    Row(
        "POST",
        f"{ONE}/fork",
        "make another one that stands where this one stands",
        fork,
        body=Fork,
        status=201,
        answer=ANY,
        refusals=(404, 409),
    ),
    Row(
        "GET",
        f"{ONE}/explain",
        "why a message is where it is, in words",
        explain,
        query=Explain,
        answer=Explanation,
        refusals=(404,),
    ),
    Row(
        "GET",
        f"{ONE}/dead-letters",
        "messages that were given up",
        dead_letters,
        query=ListLetters,
        answer=Letters,
        refusals=(404,),
    ),
    Row(
        "POST",
        f"{ONE}/dead-letters/retry",
        "deliver dead letters again",
        retry,
        body=ChooseLetters,
        answer=dict[str, int],
        refusals=(404,),
    ),
    Row(
        "POST",
        f"{ONE}/dead-letters/purge",
        "forget dead letters",
        purge,
        body=ChooseLetters,
        answer=dict[str, int],
        refusals=(404,),
    ),
    Row(
        "GET",
        f"{ONE}/stream",
        "join, and get messages as Server-Sent Events",
        stream,
        query=Stream,
        media_type="text/event-stream",
        refusals=(404, 409, 503),
        streams=True,
    ),
    Row(
        "POST",
        f"{ONE}/acks",
        "ack or nack what a stream has got",
        settle,
        body=Settle,
        answer=Settled,
        refusals=(404, 409),
    ),
]
