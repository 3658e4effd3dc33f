"""gateways.http_consumers: the routes of consumer groups and their offsets.

May import: core.consumers, core.errors, gateways.http_errors, gateways.http_rows, gateways.http_topics,
    gateways.json_answers, msgspec, the standard library.
Never: trio, sockets, files.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from core.consumers import GroupCommit
from gateways.http_errors import bad_request
from gateways.http_rows import Answer, Call, Fields, Row
from gateways.http_topics import Deleted
from gateways.json_answers import iso_time

Offset = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class MakeGroup(Fields):
    topic_name: str | None = None


class CommitOffset(Fields):
    topic_name: str
    partition: Annotated[int, Meta(ge=0, lt=2**31)]
    offset: Offset


class OfTopic(Fields):
    topic: str | None = None


class Group(msgspec.Struct, frozen=True):
    group_id: str
    topic_name: str
    partitions: int
    created_at: str


class Committed(msgspec.Struct, frozen=True):
    committed: bool


class CommittedOffset(msgspec.Struct, frozen=True):
    topic: str
    partition: int
    offset: int
    updated_at: str


class CommittedOffsets(msgspec.Struct, frozen=True):
    offsets: list[CommittedOffset]


class Groups(msgspec.Struct, frozen=True):
    groups: list[dict[str, Any]]


async def list_groups(call: Call) -> Answer:
    return Answer(Groups(msgspec.to_builtins(await call.broker.groups.list_all())))


async def describe_group(call: Call) -> Answer:
    return Answer(msgspec.to_builtins(await call.broker.groups.describe(call.path["group"])))


async def delete_group(call: Call) -> Answer:
    await call.broker.groups.delete(call.path["group"])
    return Answer(Deleted(True))


async def make_group(call: Call) -> Answer:
    group, topic = call.path["group"], call.body.topic_name
    if not topic:
        raise bad_request("Missing topic_name")
    known = call.broker.topic(topic)
    made_ms = await call.broker.groups.make(group, topic)
    return Answer(Group(group, topic, known.partitions, iso_time(made_ms)), 201)


async def commit(call: Call) -> Answer:
    wanted: CommitOffset = call.body
    call.broker.log(wanted.topic_name, wanted.partition)
    await call.broker.groups.commit(
        call.path["group"], [GroupCommit(wanted.topic_name, wanted.partition, wanted.offset)]
    )
    return Answer(Committed(True))


async def committed(call: Call) -> Answer:
    group, topic = call.path["group"], call.query.topic
    if topic is not None:
        call.broker.topic(topic)
    call.broker.groups.check_known(group)
    found = await call.broker.groups.committed(group, topic)
    return Answer(
        CommittedOffsets(
            [
                CommittedOffset(each["topic"], each["partition"], each["offset"], iso_time(each["updated_ms"]))
                for each in found
            ]
        )
    )


ROWS = [
    Row("GET", "/consumers", "every group", list_groups, answer=Groups),
    Row(
        "GET",
        "/consumers/{group}",
        "members, assignment and lag of a group",
        describe_group,
        answer=dict[str, Any],
        refusals=(404,),
    ),
    Row(
        "DELETE",
        "/consumers/{group}",
        "forget a group and its offsets",
        delete_group,
        answer=Deleted,
        refusals=(404, 409),
    ),
    Row(
        "POST",
        "/consumers/{group}/groups",
        "make a group for a topic; the same again if it exists",
        make_group,
        body=MakeGroup,
        status=201,
        answer=Group,
        refusals=(404,),
    ),
    Row(
        "POST",
        "/consumers/{group}/offsets",
        "commit the next offset to handle",
        commit,
        body=CommitOffset,
        answer=Committed,
        refusals=(404, 416),
    ),
    Row(
        "GET",
        "/consumers/{group}/offsets",
        "what a group has committed",
        committed,
        query=OfTopic,
        answer=CommittedOffsets,
        refusals=(404,),
    ),
]
