"""Every row of every door, with no token, a wrong one, an insufficient one and the right one: made from the tables."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from qb.core.rights import owners
from qb.core.rights.log_in_pace import LogInPace
from qb.core.rights.needs import Needs, Owned
from qb.core.rights.owners import Owners
from qb.core.rights.principals import Principal
from qb.core.rights.users_file import hash_of, parse_user, write_users
from qb.core.wire.errors import Code, Forbidden
from qb.core.wire.frames import MessageType, encode_properties
from qb.doors.binary.frame_requests import HANDLERS, NEEDS
from qb.doors.binary.methods import METHODS
from qb.doors.http.http_app import ROWS as ROUTES
from qb.doors.json_lines.json_methods import ROWS as LINES
from tests.support.brokers import Doors
from tests.support.publish_runs import run_of

ADMIN, OTHER, WRONG = "qb_admin", "qb_other", "qb_wrong"
SECRET, ABSENT = (
    "secret",
    "absent",
)  # names on which OTHER has no right; the first is there
REFUSED = {Code.FORBIDDEN, Code.UNKNOWN_TOPIC, Code.UNKNOWN_SUBSCRIPTION, Code.UNKNOWN_GROUP}
NO_REQUESTS = {"DATA", "ACK", "GOODBYE", "DELIVER", "SEAL"}  # a peer cannot send them
NAMES = {"topic", "subscription_id", "subscription", "group", "group_id", "name", "topic_name", "new_id", "transaction"}
NAMES |= {"network"}
VALUES: dict[str, Any] = {"topics": list, "offsets": list, "member": "m", "consumer_id": "m", "to": "earliest"}
VALUES |= {"stages": [], "token": ADMIN, "value": "v", "generation": 1, "offset": 0, "partition": 0, "first": 0}
VALUES |= {"stage": "0", "partitions": 1, "sha256": hash_of("new"), "limits": [], "words": ["cert:CN=a", "read:x"]}


def user(name: str, token: str, *words: str) -> Principal:
    return parse_user(["user", name, f"sha256:{hash_of(token)}", *words])


@pytest.fixture
def users_file(tmp_path: Path) -> str:
    path = str(tmp_path / "users")
    everywhere = [f"{verb}:other*" for verb in ("publish", "read", "consume", "manage")]
    write_users(path, [user("ops", ADMIN, "admin:*"), user("other", OTHER, *everywhere)])
    return path


@pytest.fixture(params=["users_file", "first_users_file"])
def guarded(a_broker: Callable[..., Any], users_file: str, request: pytest.FixtureRequest) -> Any:
    """A broker with users: of a file, or of its metadata, which such a file has begun."""
    return a_broker(security={request.param: users_file})


@pytest.fixture
def guarded_by_file(a_broker: Callable[..., Any], users_file: str) -> Any:
    return a_broker(security={"users_file": users_file})


def arguments(kind: type[msgspec.Struct], name: str, encoded: bool = False) -> dict[str, Any]:
    """Return the fields that a row requires, and every one that names something."""
    found: dict[str, Any] = {}
    for field in msgspec.structs.fields(kind):
        if field.name == "type" or not (field.required or field.name in NAMES):
            continue
        value = name if field.name in NAMES else VALUES[field.name]
        if value is list:
            value = [name] if field.name == "topics" else [[name, 0, 0]]
        found[field.encode_name if encoded else field.name] = value
    return found


def is_about_a_name(needs: Needs) -> bool:
    return bool(needs.names or needs.is_admin or needs.everywhere)


async def log_in(connect: Doors, token: str | None) -> Any:
    """Return a peer of the binary door and the code with which it was refused, if it was."""
    peer = await connect()
    given = {} if token is None else {"token": token}
    answer = await peer.ask(MessageType.HELLO, 1, protocol="1", **given)
    return peer, answer.properties.get("code")


def test_every_frame_method_type_and_route_says_what_it_needs() -> None:
    assert {int(each) for each in MessageType if each.name not in NO_REQUESTS} == set(NEEDS)
    assert set(HANDLERS) <= set(NEEDS)
    for row in (*METHODS.values(), *LINES.values(), *ROUTES):
        assert isinstance(row.needs, Needs)


def fields_of(owned: Owned | None) -> tuple[str, ...]:
    return () if owned is None else owned.fields


def test_every_need_names_a_field_that_its_row_has() -> None:
    for name, method in METHODS.items():
        assert {need.field.partition(".")[0] for need in method.needs.names} <= set(
            method.arguments.__struct_fields__
        ), name
        assert {*fields_of(method.needs.owns)} <= set(method.arguments.__struct_fields__), name
    for name, line in LINES.items():
        assert {need.field.partition(".")[0] for need in line.needs.names} <= set(line.fields.__struct_fields__), name
        assert {*fields_of(line.needs.owns)} <= set(line.fields.__struct_fields__), name
    for row in ROUTES:
        known = {part[1:-1] for part in row.path.split("/") if part.startswith("{")} | {*row.query.__struct_fields__}
        known |= set(row.body.__struct_fields__) if row.body else set()
        assert {need.field.partition(".")[0] for need in row.needs.names} <= known, row.path


def test_rows_that_name_something_need_a_right_on_it() -> None:
    naming = {name: row for name, row in METHODS.items() if NAMES & {*row.arguments.__struct_fields__}}
    unnamed = {name for name, row in naming.items() if not row.needs.names}
    assert unnamed == {name for name in METHODS if name.endswith("_transaction")}  # these belong to their user
    open_rows = {name for name, row in LINES.items() if NAMES & {*row.fields.__struct_fields__} and not row.needs.names}
    assert open_rows == {"unsubscribe", "ack", "nack"}  # of what the connection itself has joined
    assert [row.path for row in ROUTES if "{" in row.path and not row.needs.names] == []


async def test_every_method_with_each_kind_of_token(guarded: Any) -> None:
    with trio.fail_after(60):
        async with guarded as connect:
            assert (await log_in(connect, None))[1] == "UNAUTHENTICATED"
            peer, code = await log_in(connect, WRONG)
            assert (code, (await peer.receive()) is None or True) == ("UNAUTHENTICATED", True)
            ops, _ = await log_in(connect, ADMIN)
            other, _ = await log_in(connect, OTHER)
            await ops.call("create_topic", topic=SECRET)
            await ops.call("create_subscription", subscription_id=SECRET, topic=SECRET)
            for name, row in METHODS.items():
                if is_about_a_name(row.needs):
                    texts = set()
                    for about in (SECRET, ABSENT):
                        body = msgspec.json.encode(arguments(row.arguments, about))
                        answer = await other.ask(MessageType.REQUEST, 5, body, method=name)
                        assert answer.properties.get("code") in REFUSED, (name, answer.properties)
                        texts.add(answer.properties["error"].replace(about, "X"))
                    assert len(texts) == 1, (name, texts)
                if not name.startswith("delete"):
                    assert await ops.call(name, **arguments(row.arguments, SECRET)) not in (
                        "FORBIDDEN",
                        "UNAUTHENTICATED",
                    )


async def test_every_frame_that_is_no_method_with_each_kind_of_token(guarded: Any) -> None:
    stage = {"topic": SECRET, "stage": "0", "partition": "0", "first": "0"}
    fields = {"topic": SECRET, "subscription_id": SECRET, "offset": "0", "transaction": "t"}

    async def ask(peer: Any, kind: int, properties: dict[str, str]) -> Any:
        if kind != MessageType.PUBLISH_RUN:
            return await peer.ask(kind, 1, b"", **properties)
        await peer.stream.send_all(run_of(1, [(encode_properties({"topic": SECRET}), b"x", 0)]))
        return await peer.receive()

    with trio.fail_after(60):
        async with guarded as connect:
            ops, _ = await log_in(connect, ADMIN)
            await ops.call("create_topic", topic=SECRET)
            for kind in NEEDS:
                if kind in (MessageType.HELLO, MessageType.HEARTBEAT, MessageType.COMPRESSED):
                    continue
                properties = {MessageType.STAGE: stage, MessageType.PUBLISH: {"topic": SECRET}}.get(kind, fields)
                stranger = await connect()  # no HELLO: such a peer is anonymous
                answer = await ask(stranger, kind, properties)
                assert answer.properties["code"] == "UNAUTHENTICATED", kind
                while (last := await stranger.receive()) is not None:  # it is closed, with a goodbye or without
                    assert last.type == MessageType.GOODBYE
                if NEEDS[kind].names:
                    other, _ = await log_in(connect, OTHER)
                    answer = await ask(other, kind, properties)
                    assert answer.properties["code"] in REFUSED, kind


async def test_every_line_with_each_kind_of_token(guarded: Any) -> None:
    async def ask(peer: Any, kind: str, **fields: Any) -> str:
        await peer.send(type=kind, **fields)
        answer = await peer.receive()
        return "" if answer["ok"] else str(answer["error"])

    with trio.fail_after(60):
        async with guarded as connect:
            wrong = await connect.lines()
            assert "of no user" in await ask(wrong, "auth", token=WRONG)
            assert await wrong.receive_bytes() is None
            ops, other = await connect.lines(), await connect.lines()
            assert await ask(ops, "auth", token=ADMIN) == await ask(other, "auth", token=OTHER) == ""
            assert "first line" in await ask(other, "auth", token=ADMIN)
            assert await ask(ops, "createTopic", topic=SECRET) == ""
            for name, row in LINES.items():
                if name == "auth":
                    continue
                stranger = await connect.lines()
                assert "log in" in await ask(stranger, name, **arguments(row.fields, SECRET, encoded=True)), name
                assert await stranger.receive_bytes() is None
                if row.needs.names:
                    texts = set()
                    for about in (SECRET, ABSENT):
                        text = await ask(other, name, **arguments(row.fields, about, encoded=True))
                        assert text, name
                        texts.add(text.replace(about, "X"))
                    assert len(texts) == 1, (name, texts)
                assert "may not" not in await ask(ops, name, **arguments(row.fields, SECRET, encoded=True))
                assert await ask(other, "listTopics") == ""


async def test_every_route_with_each_kind_of_token(guarded: Any) -> None:
    async def ask(token: str | None, row: Any, about: str) -> tuple[int, str]:
        peer = await connect.http()
        path = row.path
        for part in path.split("/"):
            if part.startswith("{"):
                path = path.replace(part, "0" if part == "{partition}" else about)
        query = arguments(row.query, about)
        path += "?" + "&".join(f"{key}={value}" for key, value in query.items()) if query else ""
        headers = {"accept": "text/event-stream"} if row.streams else {}
        headers |= {} if token is None else {"authorization": f"Bearer {token}"}
        data = {"data": arguments(row.body, about)} if row.body is not None else {}
        await peer.send(row.method, path, headers=headers, **data)
        answer = await peer._start() if token == ADMIN and row.streams else await peer.finish()
        await trio.aclose_forcefully(peer.stream)
        text = answer.body.decode() if answer.headers.get("content-type") == "application/json" else ""
        return answer.status, text.replace(about, "X")

    with trio.fail_after(100):
        async with guarded as connect:
            ops, _ = await log_in(connect, ADMIN)
            await ops.call("create_topic", topic=SECRET)
            await ops.call("create_subscription", subscription_id=SECRET, topic=SECRET)
            for row in ROUTES:
                where = f"{row.method} {row.path}"
                connect.broker.access.log_ins = LogInPace()  # or the failures below would slow the others down
                status, text = await ask(None, row, SECRET)
                assert (status == 401) == (not row.needs.is_open), where
                assert row.needs.is_open or json.loads(text)["code"] == "UNAUTHENTICATED"
                assert (await ask(WRONG, row, SECRET))[0] == 401, where
                if is_about_a_name(row.needs):
                    answers = {await ask(OTHER, row, about) for about in (SECRET, ABSENT)}
                    assert len(answers) == 1, (where, answers)
                    assert answers.pop()[0] in (403, 404), where
                if row.method != "DELETE":
                    assert (await ask(ADMIN, row, SECRET))[0] not in (401, 403), where


async def test_listings_show_a_user_what_it_may_see_and_nothing_else(guarded: Any) -> None:
    with trio.fail_after(30):
        async with guarded as connect:
            ops, _ = await log_in(connect, ADMIN)
            other, _ = await log_in(connect, OTHER)
            for name in (SECRET, "other.x"):
                await ops.call("create_topic", topic=name)
                await ops.call("create_subscription", subscription_id=name, topic=name)
                await ops.call("commit_offsets", group=name, offsets=[[name, 0, 0]])
            assert [each["topic"] for each in await other.call("list_topics")] == ["other.x"]
            assert [each["subscription_id"] for each in await other.call("list_subscriptions")] == ["other.x"]
            assert [each["group"] for each in await other.call("list_groups")] == ["other.x"]
            peer, headers = await connect.http(), {"authorization": f"Bearer {OTHER}"}
            for path in ("/topics", "/subscriptions", "/consumers", "/summary"):
                answer = await peer.ask("GET", path, headers=headers)
                assert SECRET not in answer.body.decode(), path
                assert "other.x" in answer.body.decode(), path
            assert (await peer.ask("GET", "/metrics", headers=headers)).status == 403
            assert (
                SECRET
                in (await peer.ask("GET", "/metrics", headers={"authorization": f"Bearer {ADMIN}"})).body.decode()
            )


async def test_what_belongs_to_a_user_cannot_be_taken_over(guarded_by_file: Any, users_file: str) -> None:
    words = [f"{verb}:other*" for verb in ("publish", "read", "consume")]
    made = [user("ops", ADMIN, "admin:*"), user("other", OTHER, *words), user("third", "qb_third", *words)]
    write_users(users_file, made)
    with trio.fail_after(30):
        async with guarded_by_file as connect:
            ops, _ = await log_in(connect, ADMIN)
            await ops.call("create_topic", topic="other.x")
            owner = await connect()
            hello = await owner.ask(MessageType.HELLO, 1, protocol="1", token=OTHER, producer_id="new")
            thief = await connect()
            kept = {name: hello.properties[name] for name in ("producer_id", "producer_secret")}
            stolen = await thief.ask(MessageType.HELLO, 1, protocol="1", token="qb_third", **kept)
            assert stolen.properties["code"] == "PRODUCER_FENCED"
            thief, _ = await log_in(connect, "qb_third")
            stage = (await owner.call("begin_transaction", transaction="t"))["stage"]
            for method in ("begin_transaction", "abort_transaction"):
                assert await thief.call(method, transaction="t") == "FORBIDDEN"
            assert await thief.call("commit_transaction", transaction="t", stages=[]) == "FORBIDDEN"
            place = {"stage": stage, "topic": "other.x", "partition": "0", "first": "0"}
            assert (await thief.ask(MessageType.STAGE, 7, b"", **place)).properties["code"] == "FORBIDDEN"
            assert (await thief.ask(MessageType.TRANSACTION, 8, b"", transaction="t")).properties["code"] == "FORBIDDEN"
            await owner.call("join_group", group="other.g", member="m", topics=["other.x"])
            for method in ("heartbeat_group", "leave_group"):
                assert await thief.call(method, group="other.g", member="m") == "FORBIDDEN"
            assert await thief.call("join_group", group="other.g", member="m", topics=["other.x"]) == "FORBIDDEN"
            assert (await owner.call("heartbeat_group", group="other.g", member="m"))["generation"] > 0


async def test_a_member_of_a_group_belongs_to_its_user_whichever_door_it_came_by(guarded: Any, users_file: str) -> None:
    made = [user(name, token, "read:*", "consume:*") for name, token in (("other", OTHER), ("third", "qb_third"))]
    write_users(users_file, [user("ops", ADMIN, "admin:*"), *made])
    with trio.fail_after(30):
        async with guarded as connect:
            ops, _ = await log_in(connect, ADMIN)
            await ops.call("create_topic", topic="other.x")
            owner, thief = await connect.lines(), await connect.lines()
            await owner.data("auth", token=OTHER)
            await thief.data("auth", token="qb_third")
            await owner.data("joinGroup", groupId="g", topic="other.x", consumerId="m")
            assert "another user" in await thief.error("heartbeat", groupId="g", consumerId="m")
            peer, _ = await log_in(connect, "qb_third")
            assert await peer.call("leave_group", group="g", member="m") == "FORBIDDEN"
            assert await peer.call("commit_offsets", group="g", member="m", offsets=[]) == "FORBIDDEN"


async def test_dead_letters_go_only_to_a_topic_that_the_maker_of_the_subscription_may_publish_to(guarded: Any) -> None:
    with trio.fail_after(30):
        async with guarded as connect:
            ops, _ = await log_in(connect, ADMIN)
            other, _ = await log_in(connect, OTHER)
            for name in (SECRET, "other.x"):
                await ops.call("create_topic", topic=name)
            http, headers = await connect.http(), {"authorization": f"Bearer {OTHER}"}
            for letters in (SECRET, ABSENT):
                wanted = {"subscription_id": "other.s", "topic": "other.x", "options": {"dead_letter_topic": letters}}
                assert await other.call("create_subscription", **wanted) == "FORBIDDEN"
                assert (await http.ask("POST", "/subscriptions", wanted, headers=headers)).status == 403
                given = {"subscription_id": "other.s", "topic": "other.x", "dead_letter_topic": letters}
                answer = await other.ask(MessageType.CREATE_SUBSCRIPTION, 2, b"", **given)
                assert answer.properties["code"] == "FORBIDDEN"
            options = {"dead_letter_topic": "other.letters"}
            made = await other.call("create_subscription", subscription_id="other.s", topic="other.x", options=options)
            assert made["topic"] == "other.x"


def test_what_a_user_owns_is_forgotten_for_no_other_user_who_claims_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners, "MOST", 3)
    kept: dict[str, str] = {}
    known = Owners({"transaction/t": "a"}, kept.__setitem__, lambda owned: kept.pop(owned))
    a, b, ops = Principal(name="a"), Principal(name="b"), user("ops", ADMIN, "admin:*")
    for number in range(10):
        known.claim("member", f"g/{number}", b)
    with pytest.raises(Forbidden):
        known.claim("transaction", "t", b)
    known.claim("transaction", "t", a)
    known.claim("transaction", "t", ops)
    assert list(kept) == ["member/g/7", "member/g/8", "member/g/9"]
    known.claim("member", "g/7", b)  # used again, so that another one is forgotten
    known.claim("member", "g/10", b)
    assert list(kept) == ["member/g/7", "member/g/9", "member/g/10"]


async def test_a_reload_ends_the_connections_of_a_user_that_changed_and_leaves_the_others(
    guarded_by_file: Any, users_file: str
) -> None:
    with trio.fail_after(30):
        async with guarded_by_file as connect:
            ops, _ = await log_in(connect, ADMIN)
            other, _ = await log_in(connect, OTHER)
            line = await connect.lines()
            await line.send(type="auth", token=OTHER)
            assert (await line.receive())["data"] == {"user": "other"}
            write_users(users_file, [user("ops", ADMIN, "admin:*")])
            connect.broker.access.users.reload()
            assert (await other.receive()).type == MessageType.GOODBYE
            assert "other rights" in (await line.receive())["error"]
            assert await ops.call("list_topics") == []
            assert (await log_in(connect, OTHER))[1] == "UNAUTHENTICATED"


async def test_a_publish_is_refused_without_the_right_and_the_connection_goes_on(guarded: Any) -> None:
    with trio.fail_after(30):
        async with guarded as connect:
            ops, _ = await log_in(connect, ADMIN)
            other, _ = await log_in(connect, OTHER)
            for name in (SECRET, "other.x"):
                await ops.call("create_topic", topic=name)
            assert (await other.publish(SECRET)).properties["code"] == "UNKNOWN_TOPIC"
            assert (await other.publish("other.x")).properties["status"] == "success"
            assert (await other.publish(SECRET)).properties["code"] == "UNKNOWN_TOPIC"
