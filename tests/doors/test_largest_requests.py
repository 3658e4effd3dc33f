"""The largest request of every kind that the limits allow: none handles more items at a step than there may be.

Wall times are reported (`-s` shows them), not asserted: the machine may be busy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import trio

from qb.clients.protocol.publish_frames import MixedPublishForm, PublishForm
from qb.core.broker.outgoing_messages import OutgoingMessage
from qb.core.wire.compression.compressed_frames import compress
from qb.core.wire.frames import HEAD, MAX_PROPERTIES, Frame, MessageType, encode_frame
from qb.core.wire.frames import MessageType as T
from qb.core.wire.runs.publish_table import MOST_BYTES, MOST_MESSAGES
from qb.doors.binary.frame_requests import NEEDS, TRANSACTION_BYTES
from qb.doors.binary.methods import MAX_ARGUMENTS, METHODS
from qb.doors.json_lines.json_methods import ROWS
from tests.support.bounded_steps import WIDE, bounded
from tests.support.peers import TrioPeer
from tests.support.transaction_peers import part

LONG_LINE = "x" * ((1 << 20) - 200)  # characters, as long as a line may be that is no message
NAMES = [f"t{number}" for number in range(50)]


def many(make: Callable[[int], Any], size: int) -> list[Any]:
    """Return as many items as fit into the arguments of one request, a little room left for the rest."""
    return [make(number) for number in range((MAX_ARGUMENTS - 1_000) // (size + 1))]


def largest() -> dict[str, dict[str, Any]]:
    """Return the largest arguments for every method; one that has no list in it is as large as what it asks for."""
    stage = {"stage": "00000000", "messages": 1}
    commits = many(lambda n: ["wide", n % WIDE, 0], 14)
    return {
        "create_topic": {"topic": "created", "partitions": WIDE},
        "add_partitions": {"topic": "t0", "partitions": WIDE},
        "delete_topic": {"topic": "created"},
        "list_topics": {},
        "describe_topic": {"topic": "wide"},
        "describe_topics": {"topics": many(lambda n: "wide", 6)},
        "offsets": {"topic": "wide", "time_ms": 0},
        "create_subscription": {"subscription_id": "new", "topic": "wide", "start_offset": "@0"},
        "delete_subscription": {"subscription_id": "new"},
        "list_subscriptions": {},
        "describe_subscription": {"subscription_id": "s0"},
        "seek": {"subscription_id": "s0", "to": "@0"},
        "pause": {"subscription_id": "s0"},
        "resume": {"subscription_id": "s0"},
        "fork": {"subscription_id": "s0", "new_id": "forked"},
        "explain": {"subscription_id": "s0", "offset": 0},
        "dead_letters": {"subscription_id": "s0", "max": 10_000},
        "retry_dead_letters": {"subscription_id": "s0", "numbers": many(lambda n: n, 6)},
        "purge_dead_letters": {"subscription_id": "s0", "numbers": many(lambda n: n, 6)},
        "join_group": {"group": "g", "member": "m", "topics": ["wide", *NAMES]},
        "sync_group": {"group": "g", "member": "m", "generation": 1},
        "heartbeat_group": {"group": "g", "member": "m"},
        "leave_group": {"group": "g", "member": "m"},
        "commit_offsets": {"group": "g", "offsets": commits},
        "committed_offsets": {"group": "g"},
        "reset_group": {"group": "g", "topic": "wide", "to": "@0"},
        "list_groups": {},
        "describe_group": {"group": "g"},
        "delete_group": {"group": "g"},
        "begin_transaction": {"transaction": "x"},
        "commit_transaction": {"transaction": "x", "stages": many(lambda n: stage, 38)},
        "abort_transaction": {"transaction": "x", "stages": many(lambda n: "00000000", 11)},
        "list_transactions": {},
        "show_transaction": {"transaction": "x"},
        "finish_transaction": {"transaction": "x"},
        "abandon_transaction": {"transaction": "x"},
        "list_users": {},
        "add_user": {"name": "u", "words": many(lambda n: "read:x", 9)},
        "rotate_user": {"name": "u", "sha256": "x" * (MAX_ARGUMENTS - 1_000)},
        "remove_user": {"name": "u"},
        "limit_address": {"network": "10.0.0.0/8", "limits": many(lambda n: "rate:1", 9)},
        "server_info": {},
        "cluster": {},
        "verify_cell": {},
        "move_cell": {"to": "x" * (MAX_ARGUMENTS - 1_000)},
    }


def test_every_method_has_its_largest_request_here():
    assert {
        name: set(given) <= set(METHODS[name].arguments.__struct_fields__) for name, given in largest().items()
    } == dict.fromkeys(METHODS, True)


def most_allowed(refusal: str) -> int | None:
    """Return how many things a refusal says that a request may name."""
    found = re.search(r"at most (\d+)", refusal)
    return int(found[1]) if found else None


def cut(arguments: dict[str, Any], most: int) -> dict[str, Any]:
    return {name: value[:most] if isinstance(value, list) else value for name, value in arguments.items()}


async def ask(peer: TrioPeer, method: str, arguments: dict[str, Any]) -> Frame:
    """Call a method, and assert that its steps are bounded."""
    body = json.dumps(arguments, separators=(",", ":")).encode()
    assert len(body) <= MAX_ARGUMENTS
    with bounded(method), trio.fail_after(60):
        answer = await peer.ask(MessageType.REQUEST, 3, body, method=method)
    assert answer.properties.get("code") != "INTERNAL"
    return answer


async def test_the_largest_request_of_every_method_is_handled_in_steps_that_are_bounded(a_broker):
    async with a_broker(max_partitions=WIDE) as connect:
        peer = await connect()
        await peer.ask(MessageType.HELLO, 1, protocol="1")
        await peer.call("create_topic", topic="wide", partitions=WIDE)
        for name in NAMES:
            await peer.call("create_topic", topic=name)
        for number in range(50):
            await peer.call("create_subscription", subscription_id=f"s{number}", topic="wide")
            await peer.ask(MessageType.SUBSCRIBE, 2, subscription_id=f"s{number}")
        for method, arguments in largest().items():
            answer = await ask(peer, method, arguments)
            most = most_allowed(answer.properties.get("error", ""))
            if most is not None:  # it was larger than the limits allow: take one that is not
                answer = await ask(peer, method, cut(arguments, most))
                assert "at most" not in answer.properties.get("error", "")


async def test_the_largest_frames_are_handled_in_steps_that_are_bounded(a_broker):
    async with a_broker() as connect:
        peer, basic, watcher = await connect(), await connect(), await connect()
        await peer.ask(MessageType.HELLO, 1, protocol="1")
        await peer.call("create_topic", topic="a")
        publishes = [
            encode_frame(MessageType.PUBLISH, number, 0, {"topic": "a"}, b"x" * (number % 3))
            for number in range(30_000)
        ]
        with bounded("PUBLISH"), trio.fail_after(60):
            await peer.stream.send_all(b"".join(publishes))
            acked = 0
            while acked < len(publishes):
                acked += int((await peer.receive()).properties["count"])
        with bounded("FETCH"), trio.fail_after(60):
            sizes = {"max_messages": "100000", "max_bytes": str(16 << 20), "index": "true"}
            fetched = await peer.ask(MessageType.FETCH, 2, topic="a", offset="0", **sizes)
        assert int(fetched.properties["count"]) == len(publishes)
        wide = {"max_in_flight": 100_000}
        await peer.call("create_subscription", subscription_id="s", topic="a", options=wide)
        with bounded("SUBSCRIBE"), trio.fail_after(60):
            await peer.ask(MessageType.SUBSCRIBE, 3, subscription_id="s")
            delivered = 0
            while delivered < 25_000:
                delivered += int((await peer.receive()).properties["count"])
        acks = json.dumps({"acks": [[0, 2 * number] for number in range(10_000)]}).encode()
        with bounded("SETTLE"), trio.fail_after(60):
            await peer.send(MessageType.SETTLE, 4, acks, subscription_id="s")
            while connect.broker.subscriptions.active("s").subscription.acked < 10_000:
                await watcher.call("describe_subscription", subscription_id="s")
        await watcher.call("create_subscription", subscription_id="b", topic="a", options=wide)
        with bounded("SUBSCRIBE, basic"), trio.fail_after(60):
            await basic.ask(MessageType.SUBSCRIBE, 3, subscription_id="b")
            for _ in publishes:
                assert (await basic.receive()).type == MessageType.DATA


# The other types of NEEDS have tests of their own here: a frame of each kind of request, or of many messages.
TESTED_APART = {T.REQUEST, T.PUBLISH, T.FETCH, T.SETTLE, T.SUBSCRIBE, T.STAGE, T.COMPRESSED, T.PUBLISH_RUN}
LONG_TEXT = "x" * (MAX_PROPERTIES - 500)


def largest_frames() -> list[tuple[T, dict[str, str], bytes]]:
    """Return the largest frames of each type that is a single request, in the order in which they are sent."""
    parts = [part("wide", number % WIDE, b"") for number in range(TRANSACTION_BYTES)]
    size = len(part("wide", WIDE - 1, b""))
    many_partitions = b"".join(parts[: TRANSACTION_BYTES // size])
    one_part = part(
        "wide", 0, *[b""] * ((TRANSACTION_BYTES - 100) // len(encode_frame(T.DATA, 0, 5, {"topic": "wide"})))
    )
    no_topic = b"".join(encode_frame(T.STAGE) for _ in range(TRANSACTION_BYTES // 32))
    return [
        (T.HELLO, {"protocol": "1", "client_id": LONG_TEXT, "producer_id": "new"}, b""),
        (T.HEARTBEAT, {"client_id": LONG_TEXT}, b"x" * (16 << 20)),
        (T.CREATE_TOPIC, {"topic": "wide", "partitions": str(WIDE)}, b""),
        (T.CREATE_SUBSCRIPTION, {"subscription_id": "s", "topic": "wide", "start_offset": "@0"}, b""),
        (T.UNSUBSCRIBE, {"subscription_id": LONG_TEXT}, b""),
        (T.DELETE_SUBSCRIPTION, {"subscription_id": "s"}, b""),
        (T.TRANSACTION, {"transaction": "many"}, many_partitions),
        (T.TRANSACTION, {"transaction": "one"}, one_part),
        (T.TRANSACTION, {"transaction": "none"}, no_topic),
        (T.TRANSACTION, {"transaction": LONG_TEXT}, b"x" * (16 << 20)),
    ]


def test_every_type_of_frame_has_its_largest_one_here():
    assert {kind for kind, _, _ in largest_frames()} | TESTED_APART == set(NEEDS)


async def test_the_largest_frame_of_every_single_request_is_handled_in_steps_that_are_bounded(a_broker):
    answered = []
    async with a_broker(max_partitions=WIDE) as connect:
        peer = await connect()
        for number, (kind, properties, body) in enumerate(largest_frames(), 1):
            with bounded(f"{kind.name} {len(body)}"), trio.fail_after(60):
                await peer.stream.send_all(encode_frame(kind, number, 0, properties, body))
                answer = await peer.receive()
            assert answer is not None
            assert answer.sequence_number == number
            assert answer.properties.get("code") != "INTERNAL"
            if kind == T.TRANSACTION:
                answered.append(answer.properties["status"])
    assert answered == ["success", "success", "error", "error"]


async def test_compressed_frames_are_handled_in_steps_that_are_bounded(a_broker):
    count, body = 100_000, b'{"order": 17, "item": "tea", "price": 4.5}' * ((16 << 20) // 42)
    small = b"".join(encode_frame(MessageType.PUBLISH, n, 0, {"topic": "a"}, b"x" * (n % 3)) for n in range(count))
    large = encode_frame(MessageType.PUBLISH, 1, 0, {"topic": "a"}, body)
    async with a_broker() as connect:
        peer = await connect()
        await peer.ask(MessageType.HELLO, 1, protocol="1", compression="zstd,lz4", compressed_answers="zstd")
        await peer.call("create_topic", topic="a")
        for codec, publishes, expected in (("zstd", small, count), ("lz4", small, count), ("zstd", large, 1)):
            packed = compress(codec, (publishes,), 1)
            assert packed is not None
            with bounded(f"COMPRESSED, {codec}, {expected}"), trio.fail_after(60):
                await peer.stream.send_all(packed)
                acked = 0
                while acked < expected:
                    acked += int((await peer.receive()).properties["count"])
        with bounded("FETCH, compressed"), trio.fail_after(60):
            sizes = {"max_messages": "100000", "max_bytes": str(16 << 20)}
            await peer.send(MessageType.FETCH, 2, topic="a", offset=str(2 * count), **sizes)
            answer = await peer.receive()
        assert answer.type == MessageType.COMPRESSED
        assert int(answer.properties["size"]) > len(body)


async def test_the_largest_runs_with_a_table_are_handled_in_steps_that_are_bounded(a_broker):
    bodies = [b"x" * (n % 3) for n in range(MOST_MESSAGES)]
    plain, keyed = PublishForm("a", 0), [PublishForm("a", 0, f"{n:040}").parts for n in range(MOST_MESSAGES)]
    odd = PublishForm("a", 0, properties={"long": "x" * 2_000})
    runs = [
        (plain, bodies),
        (MixedPublishForm(keyed), bodies),
        (MixedPublishForm([*keyed[1:], odd.parts]), bodies),  # is taken one by one
    ]
    async with a_broker() as connect:
        peer = await connect()
        await peer.ask(MessageType.HELLO, 1, protocol="1", features="publish_runs")
        await peer.call("create_topic", topic="a")
        for number, (form, sent) in enumerate(runs):
            run = form.publishes(1 + number * MOST_MESSAGES, sent, MOST_BYTES)
            assert HEAD.unpack_from(run)[1] == MessageType.PUBLISH_RUN
            with bounded(f"PUBLISH_RUN {number}"), trio.fail_after(60):
                await peer.stream.send_all(run)
                acked = 0
                while acked < MOST_MESSAGES:
                    acked += int((await peer.receive()).properties["count"])
            assert acked == MOST_MESSAGES


async def test_the_largest_stage_is_handled_in_steps_that_are_bounded(a_broker):
    async with a_broker() as connect:
        peer = await connect()
        await peer.call("create_topic", topic="a")
        stage = (await peer.call("begin_transaction", transaction="x"))["stage"]
        message = encode_frame(MessageType.DATA, 0, 1, {"topic": "a"}, b"")
        with bounded("STAGE"), trio.fail_after(60):
            answer = await peer.ask(
                MessageType.STAGE,
                1,
                message * ((15 << 20) // len(message)),
                stage=stage,
                topic="a",
                partition="0",
                first="0",
            )
        assert answer.properties["status"] == "success", answer.properties


async def test_the_largest_line_of_every_type_is_handled_in_steps_that_are_bounded(a_broker):
    async with a_broker() as connect:
        peer = await connect.lines()
        await peer.data("createTopic", topic="a")
        await connect.broker.appends.publish_many("a", [OutgoingMessage(b"x")] * 20_000, 0)
        requests: dict[str, dict[str, Any]] = {name: {} for name in ROWS}
        requests["createTopic"] = {"topic": "wide", "partitions": WIDE}
        requests["produce"] = {"topic": "a", "value": "ä" * (8 << 20)}
        requests["fetch"] = {"topic": "a", "partition": 0, "offset": 0, "max": 10_000}
        requests["createSubscription"] = {"subscription": "s", "topic": "wide", "startOffset": "@0"}
        requests["joinGroup"] = {"groupId": "g", "topic": "wide", "consumerId": "c"}
        requests["subscribe"] = {"subscription": "s"}
        requests["auth"] = {"token": LONG_LINE}
        requests["nack"] = {"subscription": "s", "partition": 0, "offset": 0, "reason": LONG_LINE}
        for name, fields in requests.items():
            line = json.dumps({"type": name, **fields}, ensure_ascii=False).encode() + b"\n"
            with bounded(f"json {name}"), trio.fail_after(60):
                await peer.send_bytes(line)
                answer = await peer.receive_bytes()
            assert answer is not None
            assert b"internal error" not in answer
        await peer.data("createSubscription", subscription="pushed", topic="a")
        pushed = await connect.lines()
        with bounded("json, pushed to"), trio.fail_after(60):
            await pushed.data("subscribe", subscription="pushed", autoAck=True)
            for _ in range(20_000):
                await pushed.receive_bytes()
