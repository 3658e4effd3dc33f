"""Users that a broker keeps in its metadata: changed by its admins, in force at once, and never open again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from qb.core.broker import user_registry
from qb.core.rights.known_users import KnownUsers, LoggedIn
from qb.core.rights.principals import UNRESTRICTED, Principal
from qb.core.rights.stored_users import MOST_LINE, StoredUsers, entries_of
from qb.core.rights.users_file import hash_of, parse_users
from qb.core.settings import StorageSettings
from qb.core.wire.frames import MessageType as T
from qb.storage.local_engine import LocalEngine
from tests.support.brokers import Doors
from tests.support.peers import TrioPeer

ADMIN, OTHER = "qb_admin", "qb_other"
OPS = {"name": "ops", "words": [f"sha256:{hash_of(ADMIN)}", "admin:*"]}


async def logged_in(connect: Doors, token: str) -> TrioPeer:
    peer = await connect()
    assert (await peer.ask(T.HELLO, 1, protocol="1", token=token)).properties["status"] == "success"
    return peer


async def test_the_first_user_must_be_an_admin_and_from_then_on_every_peer_must_be_a_user(
    a_broker: Callable[..., Any],
) -> None:
    with trio.fail_after(30):
        async with a_broker() as connect:
            others, lines, http = await connect(), await connect.lines(), await connect.http()
            assert await others.call("list_users") == []
            await lines.data("createTopic", topic="t")
            assert (await http.ask("GET", "/topics")).status == 200
            asker = await connect()
            assert await asker.call("add_user", name="a", words=["cert:CN=a", "read:*"]) == "BAD_REQUEST"
            assert await asker.call("add_user", name="anonymous", words=["admin:*"]) == "BAD_REQUEST"
            assert await asker.call("limit_address", network="*", limits=["connections:1"]) == "BAD_REQUEST"
            assert await asker.call("add_user", **OPS) is None, "it is answered before its connection ends"
            for peer in (asker, others):
                assert (await peer.receive()).type == T.GOODBYE
            assert "other rights" in (await lines.receive())["error"]
            assert await lines.receive_bytes() is None
            stranger = await connect()
            assert (await stranger.ask(T.HELLO, 1, protocol="1")).properties["code"] == "UNAUTHENTICATED"
            assert (await (await connect.http()).ask("GET", "/topics")).status == 401
            ops = await logged_in(connect, ADMIN)
            assert [each["topic"] for each in await ops.call("list_topics")] == ["t"]


async def test_an_admin_changes_users_and_only_those_that_changed_lose_their_connections(
    a_broker: Callable[..., Any],
) -> None:
    with trio.fail_after(30):
        async with a_broker() as connect:
            await (await connect()).call("add_user", **OPS)
            ops = await logged_in(connect, ADMIN)
            assert (
                await ops.call("add_user", name="a", words=[f"sha256:{hash_of(OTHER)}", "read:t", "rate:1MiB/s"])
                is None
            )
            for name, words in (("a", ["cert:CN=a", "read:t"]), ("b", [f"sha256:{hash_of(OTHER)}", "read:t"])):
                assert await ops.call("add_user", name=name, words=words) == "BAD_REQUEST"
            a = await logged_in(connect, OTHER)
            assert await a.call("list_users") == "FORBIDDEN"
            assert await ops.call("rotate_user", name="a", sha256=hash_of("new"), keep_old=True) is None
            assert (await a.receive()).type == T.GOODBYE
            a, again = await logged_in(connect, OTHER), await logged_in(connect, "new")
            assert await ops.call("limit_address", network="10.0.0.0/8", limits=["connections:3"]) is None
            assert await ops.call("list_users") == [
                {"name": "a", "log_in": "2 token", "rights": "read:t", "limits": "rate:1MiB/s"},
                {"name": "ops", "log_in": "1 token", "rights": "admin:*", "limits": ""},
                {"name": "address 10.0.0.0/8", "log_in": "", "rights": "", "limits": "connections:3"},
            ]
            assert await ops.call("remove_user", name="ops") == "BAD_REQUEST"
            assert await ops.call("remove_user", name="a") is None
            for peer in (a, again):
                assert (await peer.receive()).type == T.GOODBYE
            assert await ops.call("limit_address", network="10.0.0.0/8", limits=[]) is None
            assert [each["name"] for each in await ops.call("list_users")] == ["ops"]
            long = [f"read:{number:0>190}" for number in range(MOST_LINE // 190 + 1)]
            assert await ops.call("add_user", name="long", words=["cert:CN=l", *long]) == "BAD_REQUEST"


async def test_so_many_users_are_kept_and_no_more(
    a_broker: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_registry, "MOST_USERS", 2)
    async with a_broker() as connect:
        await (await connect()).call("add_user", **OPS)
        ops = await logged_in(connect, ADMIN)
        assert await ops.call("limit_address", network="*", limits=["connections:3"]) is None
        assert await ops.call("add_user", name="a", words=["cert:CN=a", "read:t"]) == "BAD_REQUEST"


async def test_users_survive_a_restart_and_first_users_count_only_while_there_are_none(
    a_broker: Callable[..., Any], tmp_path: Path
) -> None:
    first = tmp_path / "first"
    first.write_text(f"user first sha256:{hash_of('first')} admin:*\naddress 10.0.0.0/8 connections:5\n")
    first.chmod(0o600)
    with trio.fail_after(30):
        async with a_broker(security={"first_users_file": str(first)}) as connect:
            ops = await logged_in(connect, "first")
            await ops.call("add_user", **OPS)
            ops = await logged_in(connect, ADMIN)
            await ops.call("remove_user", name="first")
        for security in ({}, {"first_users_file": str(first)}):
            async with a_broker(security=security) as connect:
                stranger = await connect()
                refused = await stranger.ask(T.HELLO, 1, protocol="1", token="first")
                assert refused.properties["code"] == "UNAUTHENTICATED"
                ops = await logged_in(connect, ADMIN)
                assert [each["name"] for each in await ops.call("list_users")] == ["ops", "address 10.0.0.0/8"]


async def test_users_of_a_file_are_changed_in_the_file_alone(a_broker: Callable[..., Any], tmp_path: Path) -> None:
    users = tmp_path / "users"
    users.write_text(f"user ops sha256:{hash_of(ADMIN)} admin:*\n")
    users.chmod(0o600)
    async with a_broker(security={"users_file": str(users)}) as connect:
        ops = await logged_in(connect, ADMIN)
        assert await ops.call("add_user", name="a", words=["cert:CN=a", "read:t"]) == "BAD_REQUEST"
        assert await ops.call("remove_user", name="ops") == "BAD_REQUEST"
        assert [each["name"] for each in await ops.call("list_users")] == ["ops"]


def test_an_entry_that_cannot_be_read_allows_nothing_and_leaves_the_others(caplog: pytest.LogCaptureFixture) -> None:
    known = KnownUsers()
    stored = StoredUsers(known.replace)
    stored.take({})
    assert known.without_token() is UNRESTRICTED
    text = f"user ops sha256:{hash_of(ADMIN)} admin:*\nuser a sha256:{hash_of(OTHER)} read:x\naddress * connections:3\n"
    stored.take(entries_of(parse_users(text.encode(), "f")))
    assert known.with_token(OTHER).name == "a"
    stored.take({"access/user/a": f"user a sha256:{hash_of(OTHER)} fly:x"})
    assert "access/user/a cannot be read" in caplog.text
    assert list(known.known.users) == ["ops"]
    stored.take({"access/user/ops": None, "access/address/*": None})
    assert known.known.addresses == ()
    assert known.admits_no_peer
    assert known.without_token() != UNRESTRICTED, "a broker that had users is never open again"


def test_what_is_closed_admits_no_peer_before_its_users_are_known() -> None:
    known = KnownUsers(is_closed=True)
    assert known.admits_no_peer
    assert known.without_token().is_stranger
    changed: list[str] = []
    connection = LoggedIn(Principal(name="anonymous"))
    connection.changed = lambda: changed.append("changed")  # type: ignore[method-assign]
    known.watch(connection)
    known.replace(parse_users(b"user anonymous read:x\nuser ops cert:CN=o admin:*\n", "f"))
    assert changed == ["changed"]


def test_a_token_that_stands_in_a_wrong_place_is_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    token = "qb_" + "x" * 43
    for words in (f"sha256:{token}", token, f"read:{token}!", f"rate:{token}"):
        with pytest.raises(ValueError, match="line 1") as refused:
            parse_users(f"user a {words}\n".encode(), "f")
        assert token not in str(refused.value)


async def test_those_who_watch_the_metadata_hear_what_becomes_durable_under_their_prefix(tmp_path: Path) -> None:
    engine = await trio.to_thread.run_sync(LocalEngine.open, StorageSettings(data_dir=str(tmp_path)))
    heard: list[dict[str, Any]] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine.run)
        await engine.metadata.put("a/1", 1)
        engine.metadata.watch("a/", lambda changed: heard.append(dict(changed)))
        await engine.metadata.put_all({"a/2": 2, "b/1": 3})
        await engine.metadata.put("b/2", 4)
        await engine.metadata.delete("a/1", "b/1")
        nursery.cancel_scope.cancel()
    engine.close()
    assert heard == [{"a/1": 1}, {"a/2": 2}, {"a/1": None}]
