"""The routes of consumer groups and their offsets."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from qb.core.groups.group_manager import GroupCommit
from qb.core.rights import needs
from qb.core.rights.needs import ANY_USER
from qb.doors.http.requests.http_errors import bad_request
from qb.doors.http.routes.listings import PageQuery, page
from qb.doors.http.routes.route_table import Fields, RouteAnswer, RouteCall, RouteRow
from qb.doors.http.routes.topic_routes import DeletedBody
from qb.doors.json_lines.json_answers import iso_time

Offset = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class CreateGroupBody(Fields):
    topic_name: str | None = None


class CommitOffsetBody(Fields):
    topic_name: str
    partition: Annotated[int, Meta(ge=0, lt=2**31)]
    offset: Offset


class TopicQuery(Fields):
    topic: str | None = None


class GroupBody(msgspec.Struct, frozen=True):
    group_id: str
    topic_name: str
    partitions: int
    created_at: str


class CommitAnswer(msgspec.Struct, frozen=True):
    committed: bool


class CommittedOffsetBody(msgspec.Struct, frozen=True):
    topic: str
    partition: int
    offset: int
    updated_at: str


class CommittedOffsetsBody(msgspec.Struct, frozen=True):
    offsets: list[CommittedOffsetBody]


class GroupsBody(msgspec.Struct, frozen=True, omit_defaults=True):
    groups: list[dict[str, Any]]
    next_after: str | None = None  # there are more: ask with `after`


async def list_groups(call: RouteCall) -> RouteAnswer:
    seen = [group for group in await call.broker.groups.list_all() if call.principal.sees_consumer(group.group)]
    groups, next_after = page(seen, call.query, lambda group: str(group.group))
    return RouteAnswer(GroupsBody(msgspec.to_builtins(groups), next_after))


async def describe_group(call: RouteCall) -> RouteAnswer:
    return RouteAnswer(msgspec.to_builtins(await call.broker.groups.describe(call.path["group"])))


async def delete_group(call: RouteCall) -> RouteAnswer:
    await call.broker.groups.delete(call.path["group"])
    return RouteAnswer(DeletedBody(True))


async def make_group(call: RouteCall) -> RouteAnswer:
    group, topic = call.path["group"], call.body.topic_name
    if not topic:
        raise bad_request("Missing topic_name")
    known = call.broker.topics.get(topic)
    made_ms = await call.broker.groups.declare(group, topic)
    return RouteAnswer(GroupBody(group, topic, known.partitions, iso_time(made_ms)), 201)


async def commit(call: RouteCall) -> RouteAnswer:
    wanted: CommitOffsetBody = call.body
    call.broker.topics.log(wanted.topic_name, wanted.partition)
    await call.broker.groups.commit(
        call.path["group"], [GroupCommit(wanted.topic_name, wanted.partition, wanted.offset)]
    )
    return RouteAnswer(CommitAnswer(True))


async def committed(call: RouteCall) -> RouteAnswer:
    group, topic = call.path["group"], call.query.topic
    if topic is not None:
        call.broker.topics.get(topic)
    call.broker.groups.check_known(group)
    found = await call.broker.groups.committed(group, topic)
    return RouteAnswer(
        CommittedOffsetsBody(
            [
                CommittedOffsetBody(each["topic"], each["partition"], each["offset"], iso_time(each["updated_ms"]))
                for each in found
                if call.principal.sees_topic(each["topic"])
            ]
        )
    )


ROWS = [
    RouteRow("GET", "/consumers", "groups by name", list_groups, ANY_USER, query=PageQuery, answer=GroupsBody),
    RouteRow(
        "GET",
        "/consumers/{group}",
        "members, assignment and lag of a group",
        describe_group,
        needs.see_group(),
        answer=dict[str, Any],
        refusals=(404,),
    ),
    RouteRow(
        "DELETE",
        "/consumers/{group}",
        "forget a group and its offsets",
        delete_group,
        needs.manage_group(),
        answer=DeletedBody,
        refusals=(404, 409),
    ),
    RouteRow(
        "POST",
        "/consumers/{group}/groups",
        "make a group for a topic; the same again if it exists",
        make_group,
        needs.all_of(needs.consume_group(), needs.read("topic_name")),
        body=CreateGroupBody,
        status=201,
        answer=GroupBody,
        refusals=(404,),
    ),
    RouteRow(
        "POST",
        "/consumers/{group}/offsets",
        "commit the next offset to handle",
        commit,
        needs.all_of(needs.consume_group(), needs.read("topic_name")),
        body=CommitOffsetBody,
        answer=CommitAnswer,
        refusals=(404, 416),
    ),
    RouteRow(
        "GET",
        "/consumers/{group}/offsets",
        "what a group has committed",
        committed,
        needs.all_of(needs.see_group(), needs.see_topic()),
        query=TopicQuery,
        answer=CommittedOffsetsBody,
        refusals=(404,),
    ),
]
