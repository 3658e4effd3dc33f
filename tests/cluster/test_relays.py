"""A follower redirects peers that can follow, and passes all others on to the owner, byte for byte."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from qb.core.rights.users_file import hash_of, parse_users, write_users
from qb.core.wire.frames import MessageType as T
from tests.support.peers import TrioPeer
from tests.support.relayed_brokers import EPOCH, Pair, opened_pair
from tests.support.waiting import holds_during, until_true


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    async with opened_pair(tmp_path) as pair:
        yield pair


async def test_a_peer_that_follows_redirects_learns_the_owner_and_its_connection_lives(pair: Pair) -> None:
    pair.announce()
    peer = await pair.follower()
    for number in (1, 2):
        answer = await peer.ask(T.HELLO, number, protocol="1", features="redirect")
        host, port = pair.owner.listening[0].listeners[0].getsockname()
        assert answer.properties["code"] == "NOT_OWNER"
        assert (answer.properties["owner"], answer.properties["cell"]) == (f"{host}:{port}", "main")
        assert answer.properties["epoch"] == str(EPOCH)
    answer = await peer.ask(T.PUBLISH, 3, b"x", topic="a")
    assert answer.properties["code"] == "NOT_OWNER"


async def test_a_follower_says_what_it_knows_of_the_cell(pair: Pair) -> None:
    pair.announce()
    peer = await pair.follower()
    await peer.ask(T.HELLO, 1, protocol="1", features="redirect")
    found = json.loads((await peer.ask(T.REQUEST, 2, method="cluster")).body)
    assert (found["owner"], found["epoch"], found["cell"]) == ("owner", EPOCH, "main")
    assert found["journal"]["error"] == "there is no NATS"


async def test_with_users_a_follower_answers_an_admin_alone(tmp_path: Path) -> None:
    users = tmp_path / "users"
    known = parse_users(f"user ops sha256:{hash_of('secret')} admin:*\n".encode(), "users")
    write_users(str(users), known.users.values(), known.addresses)
    async with opened_pair(tmp_path, users_file=str(users)) as pair:
        pair.announce()
        stranger, admin = await pair.follower(), await pair.follower()
        await stranger.ask(T.HELLO, 1, protocol="1", features="redirect")
        assert (await stranger.ask(T.REQUEST, 2, method="cluster")).properties["code"] == "UNAUTHENTICATED"
        answer = await admin.ask(T.HELLO, 1, protocol="1", features="redirect", token="secret")
        assert answer.properties["code"] == "NOT_OWNER"
        assert (await admin.ask(T.REQUEST, 2, method="cluster")).properties["status"] == "success"


async def test_the_answer_waits_a_moment_for_an_owner(pair: Pair) -> None:
    peer = await pair.follower()
    async with trio.open_nursery() as nursery:

        async def ask() -> None:
            answer = await peer.ask(T.HELLO, 1, protocol="1", features="redirect")
            assert answer.properties["owner"]

        nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        pair.announce()


async def test_a_basic_peer_is_served_through_the_follower(pair: Pair) -> None:
    pair.announce()
    peer = await pair.follower()
    await peer.ask(T.CREATE_TOPIC, 1, topic="a")
    assert (await peer.ask(T.PUBLISH, 2, b"one", topic="a")).properties["offset"] == "0"
    await peer.ask(T.CREATE_SUBSCRIPTION, 3, subscription_id="s", topic="a")
    await peer.ask(T.SUBSCRIBE, 4, subscription_id="s")
    pushed = await peer.receive()
    assert pushed is not None
    assert (pushed.type, pushed.body) == (T.DATA, b"one")
    observer = await pair.owner()

    async def is_delivered() -> bool:  # once the relay has said that the peer's TCP has acknowledged it
        return not (await observer.call("describe_subscription", subscription_id="s"))["lag"]

    await until_true(is_delivered)


async def test_lines_and_http_are_served_through_the_follower(pair: Pair) -> None:
    pair.announce()
    lines = await pair.follower.lines()
    await lines.send(type="createTopic", topic="a")
    assert (await lines.receive())["ok"]
    http = await pair.follower.http()
    answer = await http.ask("GET", "/topics")
    assert answer.status == 200
    assert [topic["name"] for topic in answer.json["topics"]] == ["a"]


async def test_health_is_the_followers_own(pair: Pair) -> None:
    http = await pair.follower.http()  # no owner is known
    assert (await http.ask("GET", "/health")).status == 200


async def test_a_follower_is_ready_while_it_can_pass_peers_on(pair: Pair) -> None:
    answer = await (await pair.follower.http()).ask("GET", "/ready")
    assert (answer.status, answer.json["reason"]) == (503, "no broker owns the cell just now")
    pair.announce()
    answer = await (await pair.follower.http()).ask("GET", "/ready")
    assert (answer.status, answer.json) == (200, {"status": "ready", "role": "follower"})
    pair.view.lose("position 7 holds another record")
    answer = await (await pair.follower.http()).ask("GET", "/ready")
    assert (answer.status, answer.json["reason"]) == (503, "JOURNAL_LOST: position 7 holds another record")


async def test_a_relay_ends_when_the_cell_has_another_owner(pair: Pair) -> None:
    pair.announce()
    lines = await pair.follower.lines()
    await lines.send(type="createTopic", topic="a")
    assert (await lines.receive())["ok"]
    pair.announce(epoch=EPOCH + 1)
    assert await lines.receive_bytes() is None


async def test_an_owner_takes_no_relay_that_means_another_epoch(tmp_path: Path) -> None:
    async with opened_pair(tmp_path, epoch=EPOCH + 1) as pair:
        pair.announce()
        lines = await pair.follower.lines()
        await lines.send(type="createTopic", topic="a")
        assert await lines.receive_bytes() is None
        observer = await pair.owner()
        assert await observer.call("list_topics") == []


async def test_a_follower_that_dies_loses_nothing_that_its_peer_has_not(pair: Pair) -> None:
    pair.announce()
    count, body = 80, b"x" * 100_000  # more than all kernels on the way take
    observer = await pair.owner()
    await observer.ask(T.CREATE_TOPIC, 1, topic="a")
    await observer.ask(T.CREATE_SUBSCRIPTION, 2, subscription_id="s", topic="a")
    for number in range(count):
        await observer.ask(T.PUBLISH, 3, b"%04d" % number + body, topic="a")
    reader = await a_peer_that_does_not_read(pair)
    await reader.ask(T.SUBSCRIBE, 1, subscription_id="s")

    async def described() -> dict[str, Any]:
        found: dict[str, Any] = await observer.call("describe_subscription", subscription_id="s")
        return found

    async def is_on_its_way() -> bool:
        return bool((await described())["in_flight"])

    async def none_is_delivered() -> bool:
        return bool((await described())["lag"] == count)

    await until_true(is_on_its_way)
    await holds_during(0.3, none_is_delivered)  # no message counts as delivered that is only on its way
    pair.life_of_follower.cancel()  # as if its process were killed
    got = await numbers_until(reader, lambda numbers: False)
    assert len(got) < count, "not all of it was in the kernel of the peer"
    other = await pair.owner()
    await other.ask(T.SUBSCRIBE, 1, subscription_id="s")
    with trio.fail_after(20):
        await numbers_until(other, lambda numbers: got | numbers == set(range(count)))


async def a_peer_that_does_not_read(pair: Pair) -> TrioPeer:
    """Connect to the follower with a kernel that takes little for it."""
    sock = trio.socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    await sock.connect(pair.follower.listening[0].listeners[0].getsockname())
    stream = trio.SocketStream(sock)
    pair.follower._streams.append(stream)  # closed with the others
    return TrioPeer(stream)


async def numbers_until(peer: TrioPeer, enough: Callable[[set[int]], bool]) -> set[int]:
    """Return the numbers of the messages that a peer is pushed until that is enough, or it is closed."""
    got: set[int] = set()
    while not enough(got) and (frame := await peer.receive()) is not None:
        if frame.type == T.DATA:
            got.add(int(frame.body[:4]))
    return got


async def test_a_broker_whose_journal_has_lost_records_says_so_at_every_door(pair: Pair) -> None:
    pair.announce()
    pair.view.lose("position 7 holds another record")
    peer = await pair.follower()
    answer = await peer.ask(T.HELLO, 1, protocol="1", features="redirect")
    assert answer.properties["code"] == "JOURNAL_LOST"
    assert "position 7 holds another record" in answer.properties["error"]
    found = json.loads((await peer.ask(T.REQUEST, 2, method="cluster")).body)
    assert (found["role"], found["lost"]) == ("lost", "position 7 holds another record")
    basic = await pair.follower()
    refused = await basic.ask(T.PUBLISH, 0, b"x", topic="a")
    assert refused.properties["code"] == "JOURNAL_LOST"
