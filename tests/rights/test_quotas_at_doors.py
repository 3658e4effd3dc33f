"""Quotas as peers meet them, by every door."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import trio

from qb import AsyncBrokerClient, Message, QuotaExceeded
from qb.core.broker import storage_use
from qb.core.rights.known_users import KnownUsers
from qb.core.rights.principals import Principal, Quotas
from qb.core.rights.quotas import BURST
from qb.core.rights.users_file import UsersFile, hash_of, parse_users, write_users
from qb.core.wire.frames import MessageType
from qb.doors.pace import LEAST_READ, Pace
from qb.doors.transport import Transport

TOKEN, OTHER = "qb_billing", "qb_other"
BEARER = {"authorization": f"Bearer {TOKEN}"}


def broker_of(a_broker: Any, tmp_path: Path, quotas: str, addresses: str = "", **settings: Any) -> Any:
    """Return a broker with a user that may do everything within these quotas, and one without quotas."""
    text = f"user billing sha256:{hash_of(TOKEN)} publish:* read:* consume:* manage:* {quotas}\n"
    text += f"user other sha256:{hash_of(OTHER)} admin:*\n{addresses}\n"
    known = parse_users(text.encode(), "f")
    write_users(str(tmp_path / "users"), known.users.values(), known.addresses)
    return a_broker(security={"users_file": str(tmp_path / "users")}, **settings)


async def frames(connect: Any, token: str = TOKEN) -> Any:
    peer = await connect()
    answer = await peer.ask(MessageType.HELLO, 1, protocol="1", token=token)
    assert answer.properties["status"] == "success", answer.properties
    return peer


async def lines(connect: Any) -> Any:
    peer = await connect.lines()
    await peer.data("auth", token=TOKEN)
    return peer


async def test_connections_of_a_user_are_counted_over_all_doors_and_free_again_when_they_end(
    a_broker: Any, tmp_path: Path
) -> None:
    with trio.fail_after(30):
        async with broker_of(a_broker, tmp_path, "connections:3") as connect:
            held = [await frames(connect), await lines(connect)]
            http = await connect.http()
            assert (await http.ask("GET", "/topics", headers=BEARER)).status == 200
            late = await connect()
            refused = await late.ask(MessageType.HELLO, 1, protocol="1", token=TOKEN)
            assert refused.properties["code"] == "QUOTA_EXCEEDED"
            assert refused.properties["retry_after"] == "1"
            assert (await late.receive()).type == MessageType.GOODBYE
            assert "may have 3" in await (await connect.lines()).error("auth", token=TOKEN)
            answer = await (await connect.http()).ask("GET", "/topics", headers=BEARER)
            assert (answer.status, answer.json["code"]) == (429, "QUOTA_EXCEEDED")
            assert answer.headers["retry-after"] == "1"
            await frames(connect, OTHER)  # another user is not concerned
            assert (await http.ask("GET", "/topics", headers=BEARER)).status == 200  # the one that it has is kept
            await trio.aclose_forcefully(held[0].stream)
            while True:
                peer = await connect()
                answer = await peer.ask(MessageType.HELLO, 1, protocol="1", token=TOKEN)
                if answer.properties["status"] == "success":
                    break


async def test_connections_of_an_address_are_refused_before_they_say_anything(a_broker: Any, tmp_path: Path) -> None:
    address = "address 127.0.0.1 connections:2"
    with trio.fail_after(30):
        async with broker_of(a_broker, tmp_path, "", address) as connect:
            await frames(connect)
            await frames(connect, OTHER)
            refused = await (await connect()).receive()
            assert refused.properties["code"] == "QUOTA_EXCEEDED"
            assert "address 127.0.0.1 has 2 connections" in refused.properties["error"]
            assert "may have 2" in (await (await connect.lines()).receive())["error"]
            http = await connect.http()
            assert (await http.finish()).status == 429


async def test_topics_and_partitions_count_for_the_user_that_made_them_by_whichever_door(
    a_broker: Any, tmp_path: Path
) -> None:
    with trio.fail_after(30):
        async with broker_of(a_broker, tmp_path, "topics:4 partitions:6", auto_create_topics=True) as connect:
            peer, line, http = await frames(connect), await lines(connect), await connect.http()
            assert (await peer.ask(MessageType.CREATE_TOPIC, 2, topic="by-frame")).properties["status"] == "success"
            await peer.call("create_topic", topic="by-method")
            await line.data("createTopic", topic="by-line")
            made = {topic.topic: topic.maker for topic in connect.broker.engine.topics().values()}
            assert made == dict.fromkeys(("by-frame", "by-method", "by-line"), "billing")
            assert await peer.call("add_partitions", topic="by-line", partitions=5) == "QUOTA_EXCEEDED"
            answer = await http.ask("POST", "/topics", {"name": "by-route", "partitions": 4}, headers=BEARER)
            assert (answer.status, answer.json["code"]) == (429, "QUOTA_EXCEEDED")
            assert answer.json["retry_after"] > 0
            assert (await http.ask("POST", "/topics", {"name": "by-route"}, headers=BEARER)).status == 201
            # The fifth topic, by whatever makes one
            assert (await peer.ask(MessageType.CREATE_TOPIC, 3, topic="z")).properties["code"] == "QUOTA_EXCEEDED"
            assert await peer.call("create_topic", topic="z") == "QUOTA_EXCEEDED"
            assert (await peer.publish("z")).properties["code"] == "QUOTA_EXCEEDED"
            assert "may have 4" in await line.error("createTopic", topic="z")
            assert "may have 4" in await line.error("produce", topic="z", value="v")
            sent = await http.ask("POST", "/topics/z/messages", {"value": "v"}, headers=BEARER)
            assert sent.status == 429
            stage = (await peer.call("begin_transaction", transaction="t"))["stage"]
            place = {"stage": stage, "topic": "z", "partition": "0", "first": "0"}
            assert (await peer.ask(MessageType.STAGE, 7, b"", **place)).properties["code"] == "QUOTA_EXCEEDED"
            assert "z" not in connect.broker.engine.topics()
            assert (await (await frames(connect, OTHER)).publish("z")).properties["status"] == "success"
            await peer.call("delete_topic", topic="by-line")
            await peer.call("create_topic", topic="y")


async def test_a_client_raises_what_was_exceeded_and_when_to_ask_again(a_broker: Any, tmp_path: Path) -> None:
    with trio.fail_after(30):
        async with broker_of(a_broker, tmp_path, "topics:1") as connect:
            port = connect.listening[0].listeners[0].getsockname()[1]
            async with AsyncBrokerClient(port=port, token=TOKEN) as client:
                await client.create_topic("a")
                with pytest.raises(QuotaExceeded, match="user 'billing' has 1 topics, and may have 1") as caught:
                    await client.create_topic("b")
                assert caught.value.retry_after == 60


async def test_subscriptions_count_for_the_user_that_made_them_and_still_after_a_start(
    a_broker: Any, tmp_path: Path
) -> None:
    with trio.fail_after(60):
        async with broker_of(a_broker, tmp_path, "subscriptions:5") as connect:
            peer, line, http = await frames(connect), await lines(connect), await connect.http()
            await peer.call("create_topic", topic="t")
            asked = await peer.ask(MessageType.CREATE_SUBSCRIPTION, 2, subscription_id="a", topic="t")
            assert asked.properties["status"] == "success"
            await peer.call("create_subscription", subscription_id="b", topic="t")
            await peer.call("fork", subscription_id="b", new_id="c")
            await line.data("createSubscription", subscription="d", topic="t")
            body = {"subscription_id": "e", "topic": "t"}
            assert (await http.ask("POST", "/subscriptions", body, headers=BEARER)).status == 201
            assert (await http.ask("POST", "/subscriptions", body, headers=BEARER)).status == 201  # the same again
        async with broker_of(a_broker, tmp_path, "subscriptions:5") as connect:
            peer, line, http = await frames(connect), await lines(connect), await connect.http()
            asked = await peer.ask(MessageType.CREATE_SUBSCRIPTION, 2, subscription_id="x", topic="t")
            assert asked.properties["code"] == "QUOTA_EXCEEDED"
            assert await peer.call("create_subscription", subscription_id="x", topic="t") == "QUOTA_EXCEEDED"
            assert await peer.call("fork", subscription_id="b", new_id="x") == "QUOTA_EXCEEDED"
            assert "may have 5" in await line.error("createSubscription", subscription="x", topic="t")
            body = {"subscription_id": "x", "topic": "t"}
            assert (await http.ask("POST", "/subscriptions", body, headers=BEARER)).status == 429
            assert (await http.ask("POST", "/subscriptions/b/fork", {"new_id": "x"}, headers=BEARER)).status == 429
            await peer.call("delete_subscription", subscription_id="a")
            await peer.call("create_subscription", subscription_id="x", topic="t")


async def test_messages_in_flight_are_shared_by_the_subscribers_of_a_user(a_broker: Any, tmp_path: Path) -> None:
    with trio.fail_after(30):
        async with broker_of(a_broker, tmp_path, "in_flight:4") as connect:
            peer, line, http = await frames(connect), await lines(connect), await connect.http()
            for name in ("s", "u", "v"):
                await peer.call("create_topic", topic=name)
                await peer.call("create_subscription", subscription_id=name, topic=name)
            subscriber = await frames(connect)
            joined = await subscriber.ask(MessageType.SUBSCRIBE, 3, subscription_id="s", window="100")
            assert joined.properties["window"] == "4"
            await line.data("subscribe", subscription="u")
            active = connect.broker.subscriptions.active
            windows = [active(name).subscription.window(next(iter(active(name).sinks))) for name in ("s", "u")]
            assert windows == [2, 2]
            streams = [await connect.http() for _ in range(3)]
            for each in streams[:2]:
                await each.open_stream("/subscriptions/v/stream", **BEARER)
            refused = await streams[2].ask(
                "GET", "/subscriptions/v/stream", headers={**BEARER, "accept": "text/event-stream"}
            )
            assert (refused.status, refused.json["code"]) == (429, "QUOTA_EXCEEDED")
            assert len(active("v").sinks) == 2
            await peer.call("delete_subscription", subscription_id="v")
            await line.data("unsubscribe", subscription="u")
            assert active("s").subscription.window(next(iter(active("s").sinks))) == 4
            assert (await http.ask("GET", "/topics", headers=BEARER)).status == 200


async def test_a_topic_takes_no_more_than_its_maker_may_store_from_any_user(
    a_broker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_use, "INTERVAL", 3_600.0)  # it is measured when the test says so
    with trio.fail_after(30):
        async with broker_of(a_broker, tmp_path, "storage:4KiB") as connect:
            peer, line, http = await frames(connect), await lines(connect), await connect.http()
            other = await frames(connect, OTHER)
            await peer.call("create_topic", topic="mine")
            await other.call("create_topic", topic="theirs")
            code, stored = "", 0
            while not code:
                answer = await other.ask(MessageType.PUBLISH, 9, bytes(500), topic="mine")
                code = answer.properties.get("code", "")
                stored += not code
            assert (code, stored) == ("QUOTA_EXCEEDED", 8)
            assert "bytes of storage" in await line.error("produce", topic="mine", value="v")
            sent = await http.ask("POST", "/topics/mine/messages", {"value": "v"}, headers=BEARER)
            assert (sent.status, sent.json["code"]) == (429, "QUOTA_EXCEEDED")
            stage = (await peer.call("begin_transaction", transaction="t"))["stage"]
            place = {"stage": stage, "topic": "mine", "partition": "0", "first": "0"}
            assert (await peer.ask(MessageType.STAGE, 7, b"", **place)).properties["code"] == "QUOTA_EXCEEDED"
            answer = await peer.ask(MessageType.PUBLISH, 11, bytes(9_000), topic="theirs")
            assert answer.properties["status"] == "success"
            await peer.call("delete_topic", topic="mine")
            await peer.call("create_topic", topic="mine")
            answer = await peer.ask(MessageType.PUBLISH, 12, b"x", topic="mine")
            assert answer.properties["code"] == "QUOTA_EXCEEDED"
            await connect.broker.storage_use.measure()
            answer = await peer.ask(MessageType.PUBLISH, 12, b"x", topic="mine")
            assert answer.properties["status"] == "success"


async def test_a_peer_that_sends_too_fast_is_read_at_its_rate_and_loses_nothing() -> None:
    rate, sent = 65_536, 200_000
    users = UsersFile({"a": Principal(name="a", tokens=("9f" * 32,), quotas=Quotas(rate=rate))})
    known = KnownUsers(known=users)
    ours, theirs = socket.socketpair()
    taken: list[tuple[float, int]] = []

    def take(data: memoryview) -> bool:
        taken.append((trio.current_time(), len(data)))
        return sum(size for _, size in taken) < sent

    with theirs, trio.fail_after(30):
        transport = Transport(ours)
        transport.pace = Pace(known.of_address("127.0.0.1"))
        transport.pace.belongs_to(known.of_user("a"))
        theirs.setblocking(False)
        writer = trio.socket.from_stdlib_socket(theirs)
        async with trio.open_nursery() as nursery:

            async def write() -> None:
                left = memoryview(bytes(sent))
                while left:
                    left = left[await writer.send(left) :]

            nursery.start_soon(write)
            began = trio.current_time()
            while sum(size for _, size in taken) < sent:
                assert await transport.attend(take) or sum(size for _, size in taken) == sent
        transport.close()
    passed = 0
    for at, size in taken:
        passed += size
        assert size <= max(LEAST_READ, rate // 10)
        assert passed <= rate * (BURST + at - began) + size
    assert passed == sent


async def test_a_user_at_its_rate_is_served_slowly_by_every_door_and_never_cut_off(
    a_broker: Any, tmp_path: Path
) -> None:
    """The heartbeats, deadlines and time limits are far shorter than what the rate makes it wait."""
    short = {"heartbeat_interval": 0.5, "frame_deadline": 0.3}
    answers: list[object] = []
    with trio.fail_after(60):
        async with broker_of(a_broker, tmp_path, "rate:128KiB/s", **short) as connect:
            port = connect.listening[0].listeners[0].getsockname()[1]
            async with AsyncBrokerClient(port=port, token=TOKEN) as client, trio.open_nursery() as nursery:
                await client.create_topic("t")
                line, http = await lines(connect), await connect.http()

                async def by_frames() -> None:
                    answers.append((await client.publish("t", bytes(150_000))).topic)

                async def by_lines() -> None:
                    answers.append((await line.data("produce", topic="t", value="x" * 60_000))["value"][:1])

                async def by_http() -> None:
                    headers = {**BEARER, "content-type": "application/octet-stream"}
                    sent = await http.ask("POST", "/topics/t/messages", body=bytes(60_000), headers=headers)
                    answers.append(sent.status)

                for each in (by_frames, by_lines, by_http):
                    nursery.start_soon(each)
            assert sorted(map(str, answers)) == ["200", "t", "x"]
            async with AsyncBrokerClient(port=port, token=TOKEN) as client:
                got = await client.fetch("t", 0, 0, max_bytes=1 << 20)
                assert sorted(len(each.body) for each in got) == [60_000, 60_000, 150_000]
                await client.create_subscription("s", "t")
                handled = trio.Event()
                sizes: list[int] = []

                async def handle(message: Message) -> None:
                    sizes.append(len(message.body))
                    if len(sizes) == 3:
                        handled.set()

                async with await client.subscribe_to_subscription("s", handle):
                    await handled.wait()
                assert sorted(sizes) == [60_000, 60_000, 150_000]
