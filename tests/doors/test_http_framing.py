"""The HTTP door speaks HTTP/1.1 and nothing else, and finds one end of each body."""

from __future__ import annotations

import json

import pytest
import trio
import trio.testing

from qb.doors.http import http_door

UPGRADE = "connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"


async def converse(connect, sent: bytes) -> tuple[bytes, bytes]:
    """Send bytes; return the head and the body of everything that comes until the broker closes."""
    peer = await connect.http()
    with trio.fail_after(10):
        await peer.stream.send_all(sent)
        received = b""
        while data := await peer.stream.receive_some():
            received += data
    head, _, body = received.partition(b"\r\n\r\n")
    return head, body


async def test_an_upgrade_to_http_2_is_not_taken_and_answered_in_http_1(a_broker):
    async with a_broker() as connect:
        request = f"GET /health HTTP/1.1\r\nhost: localhost\r\n{UPGRADE}\r\n"
        close = "GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
        head, body = await converse(connect, (request + close).encode())
        assert head.startswith(b"HTTP/1.1 200 ")
        assert body.startswith(b'{"status":"healthy"}HTTP/1.1 200 ')


async def test_http_2_by_prior_knowledge_is_refused_and_closed(a_broker):
    async with a_broker() as connect:
        settings = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
        head, body = await converse(connect, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings)
        assert head.startswith(b"HTTP/1.1 505 ")
        assert "HTTP/1.1" in json.loads(body)["error"]


@pytest.mark.parametrize(
    ("version", "lengths"),
    [
        ("1.1", ["content-length: 5", "transfer-encoding: chunked"]),
        ("1.1", ["transfer-encoding: chunked", "content-length: 0"]),
        ("1.0", ["transfer-encoding: chunked"]),
    ],
)
async def test_a_body_with_two_lengths_is_refused_and_what_follows_is_not_read(a_broker, version, lengths):
    async with a_broker() as connect:
        head = f"POST /topics HTTP/{version}\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        smuggled = '0\r\n\r\nPOST /topics HTTP/1.1\r\nhost: localhost\r\ncontent-length: 12\r\n\r\n{"name":"t"}'
        sent = head + "".join(f"{line}\r\n" for line in lengths) + "\r\n" + smuggled
        answer, body = await converse(connect, sent.encode())
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"connection: close" in answer.lower()
        assert json.loads(body)["code"] == "BAD_REQUEST"
        assert connect.broker.engine.topics() == {}


async def test_bytes_that_are_no_http_are_refused_in_json(a_broker):
    async with a_broker() as connect:
        head, body = await converse(connect, b"\x00\x01nonsense\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert json.loads(body)["code"] == "BAD_REQUEST"


async def test_an_idle_connection_that_the_peer_closes_ends_at_once(a_broker):
    async with a_broker() as connect:
        peer = await connect.http()
        await peer.ok("GET", "/health")
        assert connect.broker.metrics.connections["http"] == 1
        await peer.stream.aclose()
        with trio.fail_after(10):
            while connect.broker.metrics.connections["http"]:
                await trio.testing.wait_all_tasks_blocked(0.001)


async def test_a_head_without_end_is_refused(a_broker):
    async with a_broker() as connect:
        head, body = await converse(connect, b"GET / HTTP/1.1\r\nhost: localhost\r\n" + b"x: y\r\n" * 10_000)
        assert head.startswith(b"HTTP/1.1 431 ")
        assert json.loads(body)["code"] == "HEAD_TOO_LARGE"


async def test_a_connection_whose_request_is_refused_ends_however_much_is_still_sent(a_broker):
    async with a_broker() as connect:
        peer = await connect.http()
        head = "POST /topics HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        await peer.stream.send_all(f"{head}content-length: {1 << 30}\r\n\r\n".encode())
        with trio.fail_after(20):
            with pytest.raises(trio.BrokenResourceError):
                while True:
                    await peer.stream.send_all(bytes(1 << 20))
            while connect.broker.metrics.connections["http"]:
                await trio.testing.wait_all_tasks_blocked(0.001)


async def test_a_peer_that_goes_in_the_middle_of_a_body_is_forgotten(a_broker):
    async with a_broker() as connect:
        peer = await connect.http()
        head = "POST /topics/t/messages HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        await peer.stream.send_all(f"{head}content-length: {3 << 20}\r\n\r\n".encode() + bytes(2 << 20))
        peer.vanish()
        with trio.fail_after(20):
            while connect.broker.metrics.connections["http"]:
                await trio.testing.wait_all_tasks_blocked(0.001)


async def test_a_websocket_is_refused_and_its_connection_ends(a_broker):
    async with a_broker() as connect:
        upgrade = "connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
        key = "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
        request = f"GET /topics HTTP/1.1\r\nhost: localhost\r\n{upgrade}{key}\r\n".encode()
        head, _ = await converse(connect, request + b"x" * 1_000_000)
        assert head.startswith(b"HTTP/1.1 403 ")
        with trio.fail_after(10):
            while connect.broker.metrics.connections["http"]:
                await trio.testing.wait_all_tasks_blocked(0.001)


async def test_pipelined_requests_are_answered_in_order(a_broker):
    async with a_broker() as connect:
        paths = [f"/nowhere-{number}" for number in range(300)]
        asked = "".join(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n" for path in paths)
        _, answers = await converse(
            connect, f"{asked}GET /last HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n".encode()
        )
        at = [answers.find(f"{path};".encode()) for path in paths]
        assert -1 not in at
        assert at == sorted(at)


async def test_a_peer_that_sends_no_more_is_answered_even_so(a_broker):
    async with a_broker() as connect:
        peer = await connect.http()
        await peer.stream.send_all(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await peer.stream.send_eof()
        with trio.fail_after(10):
            answer = b""
            while data := await peer.stream.receive_some():
                answer += data
        assert answer.endswith(b'{"status":"healthy"}')


async def test_a_refused_request_whose_body_has_come_does_not_end_the_connection(a_broker):
    async with a_broker() as connect:
        peer = await connect.http()
        answer = await peer.ask("POST", "/nowhere", {"a": "b"})
        assert answer.status == 404
        await peer.ok("GET", "/health")


async def test_a_peer_that_waits_for_our_word_before_its_body_gets_it(a_broker):
    async with a_broker() as connect:
        peer = await connect.http()
        head = "POST /topics HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nexpect: 100-continue\r\n"
        with trio.fail_after(10):
            await peer.stream.send_all(f"{head}content-length: 12\r\n\r\n".encode())
            assert await peer.stream.receive_some() == b"HTTP/1.1 100 Continue\r\n\r\n"
            await peer.stream.send_all(b'{"name":"t"}')
            assert (await peer.stream.receive_some()).startswith(b"HTTP/1.1 201 ")


async def test_a_peer_that_pipelines_and_reads_nothing_is_not_read_on(a_broker):
    async with a_broker() as connect:
        peer = await connect.http()
        request = b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n"
        with trio.move_on_after(30) as waiting:
            while True:
                with trio.move_on_after(1) as stuck:
                    await peer.stream.send_all(request * 1_000)
                if stuck.cancelled_caught:
                    break
        assert not waiting.cancelled_caught


async def test_a_connection_that_is_not_used_is_closed_after_a_while(a_broker, monkeypatch):
    monkeypatch.setattr(http_door, "IDLE", 0.01)
    async with a_broker(heartbeat_interval=0.08) as connect:
        peer = await connect.http()
        with trio.fail_after(30):
            assert await peer.stream.receive_some() == b""
