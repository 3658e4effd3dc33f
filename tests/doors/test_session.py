"""The binary door in this process: real sockets, real storage, a clock under control where time matters."""

from __future__ import annotations

import errno
import os
import re
import socket
import struct

import pytest
import trio

from qb.core.wire.frames import PROBE, MessageType, encode_frame
from qb.doors.binary import session
from qb.doors.brief_session import SLOTS
from qb.doors.json_lines import json_door
from tests.support.disk import patch_sync, patch_write
from tests.support.peers import identity
from tests.support.waiting import until

# Publishing


async def test_a_basic_peer_gets_one_ack_a_publish(a_broker):
    async with a_broker() as connect:
        peer = await connect()
        await peer.ask(MessageType.CREATE_TOPIC, 1, topic="a")
        await peer.stream.send_all(
            b"".join(encode_frame(MessageType.PUBLISH, n, 0, {"topic": "a"}, b"%d" % n) for n in (10, 11, 12, 50))
        )
        acks = [await peer.receive() for _ in range(4)]
        assert [(ack.sequence_number, ack.properties["offset"]) for ack in acks] == [
            (10, "0"),
            (11, "1"),
            (12, "2"),
            (50, "3"),
        ]
        assert {ack.properties["durability"] for ack in acks} == {"fsynced"}
        assert {ack.properties["partition"] for ack in acks} == {"0"}


async def test_a_fast_peer_gets_one_ack_for_a_run(a_broker):
    async with a_broker() as connect:
        peer = await connect()
        assert (await peer.ask(MessageType.HELLO, 1, protocol="1")).properties["protocol"] == "1"
        await peer.ask(MessageType.CREATE_TOPIC, 1, topic="a")
        await peer.stream.send_all(
            b"".join(encode_frame(MessageType.PUBLISH, n, 0, {"topic": "a"}, b"x") for n in range(1, 101))
        )
        covered = []
        while len(covered) < 100:
            ack = await peer.receive()
            first, count = ack.sequence_number, int(ack.properties["count"])
            assert int(ack.properties["offset"]) == first - 1
            covered += range(first, first + count)
        assert covered == list(range(1, 101))


async def test_refusals_name_the_code_and_what_to_do_and_the_connection_lives(a_broker):
    async with a_broker(max_message_size=1_000) as connect:
        peer = await connect()
        unknown = await peer.publish("nowhere")
        assert unknown.properties["code"] == "UNKNOWN_TOPIC"
        assert "create-topic nowhere" in unknown.properties["error"]
        assert (await peer.publish("../etc")).properties["code"] == "BAD_NAME"
        await peer.ask(MessageType.CREATE_TOPIC, 1, topic="a", partitions="3")
        assert (await peer.ask(MessageType.CREATE_TOPIC, 1, topic="a")).properties["code"] == "TOPIC_EXISTS"
        assert (await peer.publish("a", partition="3")).properties["code"] == "UNKNOWN_PARTITION"
        assert (await peer.publish("a", partition="-1")).properties["code"] == "BAD_REQUEST"
        assert (await peer.publish("a", b"x" * 1_001)).properties["code"] == "MESSAGE_TOO_LARGE"
        assert (await peer.ask(MessageType.SEAL)).properties["code"] == "UNKNOWN_TYPE"
        assert (await peer.ask(4_711)).properties["code"] == "UNKNOWN_TYPE"
        assert (await peer.ask(MessageType.HELLO, protocol="1")).properties["code"] == "BAD_REQUEST"
        assert (await peer.publish("a", b"x" * 1_000)).properties["offset"] == "0"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\\b", "ä", "a b", "x" * 201, "a\n"])
async def test_bad_topic_names_are_refused_in_every_request(a_broker, name):
    async with a_broker() as connect:
        peer = await connect()
        assert (await peer.ask(MessageType.CREATE_TOPIC, 1, topic=name)).properties["code"] == "BAD_NAME"
        for method in ("create_topic", "delete_topic", "describe_topic"):
            assert await peer.call(method, topic=name) == "BAD_NAME"


async def test_requests_with_unknown_methods_or_arguments_are_refused_by_name(a_broker):
    async with a_broker() as connect:
        peer = await connect()
        assert await peer.call("create_tropic", topic="a") == "BAD_REQUEST"
        refusal = await peer.ask(MessageType.REQUEST, 1, b'{"topic":"a","partitoins":2}', method="create_topic")
        assert "partitoins" in refusal.properties["error"]
        for body in (b"{", b"[]", b'{"topic":1}', b"\xff", b'{"topic":"a","partitions":0}'):
            assert (await peer.ask(MessageType.REQUEST, 1, body, method="create_topic")).properties[
                "code"
            ] == "BAD_REQUEST"
        assert await peer.call("list_topics") == []


@pytest.mark.parametrize(
    ("method", "body", "words"),
    [
        ("create_topic", b"{}", "`topic` is missing"),
        ("create_topic", b'{"topic":"a","x":1}', "unknown field `x`"),
        ("create_topic", b'{"topic":1}', "`topic` must be text, not a whole number"),
        ("create_topic", b"[]", "it must be an object, not a list"),
        ("create_topic", b'{"topic":', "invalid JSON: it ends too early (byte 9)"),
        ("create_topic", b'{"topic":"\xff"}', "invalid JSON: not UTF-8 (byte 10)"),
        ("create_topic", b'{"topic" 1}', "invalid JSON: expected ':' (byte 9)"),
        (
            "create_topic",
            b'{"topic":"a","retention_hours":NaN}',
            "invalid JSON: it has no NaN, only finite numbers (byte 31)",
        ),
        ("seek", b'{"subscription_id":"s","to":[]}', "`to` must be a whole number or text, not a list"),
        ("dead_letters", b'{"subscription_id":"s","max":0}', "`max` must be a whole number >= 1"),
        (
            "commit_offsets",
            b'{"group":"g","offsets":[["a",0]]}',
            "`offsets[0]` must be a list of at least length 3, not 2",
        ),
        (
            "commit_transaction",
            b'{"transaction":"t","stages":[{"stage":"s"}]}',
            "`messages` is missing in `stages[0]`",
        ),
        (
            "create_subscription",
            b'{"subscription_id":"s","topic":"a","options":{"mode":' + b"[" * 100_000,
            "invalid JSON: too deeply nested",
        ),
    ],
)
async def test_what_is_wrong_with_the_arguments_is_said_in_plain_words(a_broker, method, body, words):
    async with a_broker() as connect:
        answer = await (await connect()).ask(MessageType.REQUEST, 1, body, method=method)
        assert (answer.properties["code"], answer.properties["error"]) == ("BAD_REQUEST", f"{method}: {words}")


async def test_what_is_wrong_with_the_properties_is_said_in_plain_words(a_broker):
    async with a_broker() as connect:
        peer = await connect()
        missing = await peer.ask(MessageType.CREATE_TOPIC, 1)
        assert missing.properties["error"] == "`topic` is missing"
        wrong = await peer.ask(MessageType.CREATE_TOPIC, 1, topic="a", partitions="two")
        assert wrong.properties["error"] == "`partitions` must be a whole number, not text"


async def test_topics_are_listed_described_and_deleted(a_broker):
    async with a_broker() as connect:
        peer = await connect()
        made = await peer.call("create_topic", topic="b", partitions=2, retention_hours=1.5)
        assert (made["partitions"], made["retention_hours"]) == (2, 1.5)
        await peer.call("create_topic", topic="a")
        await peer.publish("b", b"x" * 100, partition="1")
        assert [topic["topic"] for topic in await peer.call("list_topics")] == ["a", "b"]
        described = await peer.call("describe_topic", topic="b")
        assert described["messages"] == 1
        assert [log["next_offset"] for log in described["logs"]] == [0, 1]
        assert {log["status"] for log in described["logs"]} == {"ok"}
        assert await peer.call("delete_topic", topic="b") == {}
        assert await peer.call("describe_topic", topic="b") == "UNKNOWN_TOPIC"
        assert (await peer.publish("b")).properties["code"] == "UNKNOWN_TOPIC"


async def test_messages_go_to_the_named_partition_else_by_key_else_in_turn(a_broker):
    async with a_broker() as connect:
        peer = await connect()
        await peer.ask(MessageType.CREATE_TOPIC, 1, topic="a", partitions="4")
        by_turn = [(await peer.publish("a")).properties["partition"] for _ in range(6)]
        assert by_turn == ["0", "1", "2", "3", "0", "1"]
        assert (await peer.publish("a", partition="2", key="k")).properties["partition"] == "2"
        by_key = {(await peer.publish("a", key="user-42")).properties["partition"] for _ in range(5)}
        assert by_key == {"3"}  # crc32(b"user-42") % 4


async def test_an_unknown_topic_is_made_on_first_use_where_the_operator_allows_it(a_broker):
    async with a_broker(auto_create_topics=True) as connect:
        peer = await connect()
        assert (await peer.publish("fresh")).properties["offset"] == "0"
        assert (await peer.publish("../bad")).properties["code"] == "BAD_NAME"


# Idempotent publishing


async def test_a_publish_sent_again_is_answered_with_its_first_offset(a_broker):
    async with a_broker() as connect:
        first = await connect()
        hello = await first.ask(MessageType.HELLO, 2**63, protocol="1", producer_id="new")
        await first.ask(MessageType.CREATE_TOPIC, 2**63 + 1, topic="a")
        for number in (1, 2):
            await first.publish("a", b"%d" % number, number)
        await first.stream.aclose()

        again = await connect()
        await again.ask(MessageType.HELLO, 2**63, protocol="1", **identity(hello))
        answers = [await again.publish("a", b"%d" % number, number) for number in (1, 2, 3)]
        assert [answer.properties["offset"] for answer in answers] == ["0", "1", "2"]
        assert [answer.properties.get("duplicate") for answer in answers] == ["true", "true", None]
        assert (await again.call("describe_topic", topic="a"))["messages"] == 3


async def test_a_run_that_is_half_known_is_stored_by_half(a_broker):
    async with a_broker() as connect:
        peer = await connect()
        hello = await peer.ask(MessageType.HELLO, 2**63, protocol="1", producer_id="new")
        await peer.ask(MessageType.CREATE_TOPIC, 2**63 + 1, topic="a")
        for number in (1, 2, 5):
            await peer.publish("a", b"x", number)
        again = await connect()
        await again.ask(MessageType.HELLO, 2**63, protocol="1", **identity(hello))
        await again.stream.send_all(
            b"".join(encode_frame(MessageType.PUBLISH, n, 0, {"topic": "a"}, b"x") for n in range(1, 8))
        )
        offsets = {}
        while len(offsets) < 7:
            ack = await again.receive()
            for i in range(int(ack.properties["count"])):
                offsets[ack.sequence_number + i] = int(ack.properties["offset"]) + i
        assert offsets == {1: 0, 2: 1, 5: 2, 3: 3, 4: 4, 6: 5, 7: 6}


async def test_an_older_connection_of_the_same_producer_is_fenced_off(a_broker):
    async with a_broker() as connect:
        old = await connect()
        hello = await old.ask(MessageType.HELLO, 2**63, protocol="1", producer_id="new")
        await old.ask(MessageType.CREATE_TOPIC, 2**63 + 1, topic="a")
        new = await connect()
        await new.ask(MessageType.HELLO, 2**63, protocol="1", **identity(hello))
        assert (await old.publish("a")).properties["code"] == "PRODUCER_FENCED"
        assert await old.receive() is None
        assert (await new.publish("a")).properties["status"] == "success"


@pytest.mark.parametrize("producer_id", ["", "0", "-1", "x", str(2**63), "9" * 400])
async def test_a_producer_id_that_was_never_given_out_is_refused(a_broker, producer_id):
    async with a_broker() as connect:
        peer = await connect()
        answer = await peer.ask(MessageType.HELLO, 1, protocol="1", producer_id=producer_id)
        assert answer.properties["code"] == "BAD_REQUEST"


async def test_another_protocol_version_is_refused_and_closed(a_broker):
    async with a_broker() as connect:
        peer = await connect()
        assert (await peer.ask(MessageType.HELLO, 1, protocol="2")).properties["code"] == "BAD_REQUEST"
        assert (await peer.receive()).type == MessageType.GOODBYE
        assert await peer.receive() is None


# Bad luck


async def test_a_malformed_frame_is_answered_with_bad_frame_and_closes_only_that_peer(a_broker):
    async with a_broker() as connect:
        bad, good = await connect(), await connect()
        await bad.stream.send_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await bad.receive()).properties["code"] == "BAD_FRAME"
        assert await bad.receive() is None
        assert (await good.ask(MessageType.CREATE_TOPIC, 1, topic="a")).properties["status"] == "success"


async def test_one_connection_too_many_is_answered_so_and_on_this_machine_served_until_others_want_its_slot(a_broker):
    async with a_broker(max_connections=2) as connect:
        peers = [await connect() for _ in range(2)]
        for peer in peers:
            await peer.ask(MessageType.HEARTBEAT, 1)
        third, *others = [await connect() for _ in range(1 + SLOTS)]
        with trio.fail_after(10):
            for peer in others:
                assert (await peer.ask(MessageType.CREATE_TOPIC, 1, topic="a")).type == MessageType.ACK
            assert await third.receive() is None
        assert "QB_MAX_CONNECTIONS" in await (await connect.lines()).error("listTopics")
        assert (await peers[0].ask(MessageType.HEARTBEAT, 1)).type == MessageType.HEARTBEAT
        await peers[0].stream.aclose()
        with trio.fail_after(10):
            while (await (await connect()).ask(MessageType.HEARTBEAT, 1)).type != MessageType.HEARTBEAT:
                pass


async def test_a_full_disk_refuses_the_publish_keeps_the_rest_and_recovers(a_broker, monkeypatch):
    async with a_broker() as connect:
        peer = await connect()
        await peer.ask(MessageType.HELLO, 2**63, protocol="1", producer_id="new")
        await peer.ask(MessageType.CREATE_TOPIC, 2**63 + 1, topic="a")
        await peer.publish("a", b"before", 1)
        real = os.pwrite

        def full(fd, data, position):
            real(fd, bytes(data)[:10], position)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patched:
            patch_write(patched, full)
            assert (await peer.publish("a", b"lost", 2)).properties["code"] == "DISK_FULL"
        assert (await peer.publish("a", b"again", 2)).properties["offset"] == "1"


async def test_a_failed_fsync_poisons_the_log_and_not_the_others(a_broker, monkeypatch):
    async with a_broker() as connect:
        peer = await connect()
        for topic in ("a", "b"):
            await peer.ask(MessageType.CREATE_TOPIC, 1, topic=topic)

        def failing(fd):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        with monkeypatch.context() as patched:
            patch_sync(patched, failing)
            assert (await peer.publish("a")).properties["code"] == "LOG_POISONED"
        assert (await peer.publish("a")).properties["code"] == "LOG_POISONED"
        assert (await peer.publish("b")).properties["status"] == "success"
        assert (await peer.call("describe_topic", topic="a"))["logs"][0]["status"] == "poisoned"


# Heartbeats: short intervals of the real clock, of which only the lower bounds are asserted

INTERVAL = 0.3


async def test_a_heartbeat_is_answered_with_its_number(a_broker):
    async with a_broker() as connect:
        answer = await (await connect()).ask(MessageType.HEARTBEAT, 42)
        assert (answer.type, answer.sequence_number) == (MessageType.HEARTBEAT, 42)


async def test_a_silent_peer_is_probed_once_and_then_dropped(a_broker):
    async with a_broker(heartbeat_interval=INTERVAL) as connect:
        start, peer = trio.current_time(), await connect()
        probe = await peer.receive()
        assert (probe.type, probe.sequence_number) == (MessageType.HEARTBEAT, PROBE)
        assert await peer.receive() is None
        assert trio.current_time() - start >= 2 * INTERVAL


async def test_a_peer_that_answers_its_probes_is_kept_and_probed_again(a_broker):
    async with a_broker(heartbeat_interval=INTERVAL) as connect:
        peer = await connect()
        for _ in range(4):
            heard_at = trio.current_time()
            await peer.send(MessageType.HEARTBEAT, PROBE)
            probe = await peer.receive()
            assert (probe.type, probe.sequence_number) == (MessageType.HEARTBEAT, PROBE)
            assert trio.current_time() - heard_at >= INTERVAL


async def test_half_a_frame_and_then_silence_is_dropped(a_broker):
    async with a_broker(heartbeat_interval=INTERVAL) as connect:
        peer, start = await connect(), trio.current_time()
        await peer.stream.send_all(encode_frame(MessageType.PUBLISH, 1, 0, {"topic": "a"}, b"x" * 100)[:50])
        while await peer.receive() is not None:
            pass
        assert trio.current_time() - start >= 2 * INTERVAL


async def test_a_peer_that_never_reads_is_bounded_and_then_dropped(a_broker, caplog):
    caplog.set_level("INFO", "qb")
    async with a_broker(heartbeat_interval=INTERVAL) as connect:
        peer = await connect()
        peer.stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        flood = b"".join(encode_frame(MessageType.HEARTBEAT, n) for n in range(10_000))
        with pytest.raises(trio.BrokenResourceError):
            while True:
                await peer.stream.send_all(flood)
    # With its buffers full, the system may hold back what the peer sends; then it counts as silent.
    assert re.search(f"dropped .*: (has not read what it was sent|silent) for {2 * INTERVAL:g} s", caplog.text)


@pytest.mark.parametrize("door", ["frames", "json"])
async def test_an_ended_session_holds_nothing_that_its_peer_did_not_finish(a_broker, monkeypatch, door):
    kept = []

    def noted(kind):
        return lambda limit: kept.append(kind(limit)) or kept[-1]

    def held():
        return sum(each.unread if door == "frames" else each.unfinished for each in kept)

    monkeypatch.setattr(session, "ServerConnection", noted(session.ServerConnection))
    monkeypatch.setattr(json_door, "LineSplitter", noted(json_door.LineSplitter))
    async with a_broker() as connect:
        peer = await (connect() if door == "frames" else connect.lines())
        unfinished = encode_frame(MessageType.PUBLISH, 1, 0, {"topic": "t"}, b"x" * 50_000)[:-1]
        await peer.stream.send_all(unfinished if door == "frames" else b"x" * 50_000)
        await until(lambda: held() > 40_000)
        peer.stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
        await peer.stream.aclose()
        await until(lambda: held() == 0)
