"""The HTTP door itself: what it says of the broker, what it refuses, and how it starts and stops."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
from functools import partial

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from qb import AsyncBrokerClient, BrokerUnavailable
from qb.core.push.subscription_manager import SubscriptionManager
from qb.core.settings import load
from qb.core.wire.errors import LogPoisoned
from qb.doors.http import starting_answers
from qb.doors.http.http_app import ROWS
from qb.doors.http.requests import request_bodies as http_bodies
from qb.doors.http.routes.service_routes import readiness
from qb.doors.http.starting_answers import (
    StartingAnswers,
    StartingDoor,
    answer_to_frames,
    answer_to_http,
    answer_to_lines,
)
from qb.doors.listening import ListeningDoor, listen
from qb.server import http_door, serve, starting_doors
from qb.storage.local_engine import LocalEngine
from tests.support.brokers import ROOT, free_port, run_server
from tests.support.peers import Peer
from tests.support.waiting import wait_until


async def test_the_front_door_lists_everything_for_programs_and_shows_a_page_to_browsers(a_broker):
    async with a_broker() as connect:
        peer = await connect.http()
        index = await peer.ok("GET", "/")
        assert index["service"] == "qb"
        assert index["endpoints"] == [f"{row.method} {row.path}" for row in ROWS]
        page = await peer.ask("GET", "/", headers={"accept": "text/html,application/xhtml+xml"})
        assert page.headers["content-type"].startswith("text/html")
        assert b'href="/docs"' in page.body


async def test_a_healthy_broker_says_so(a_broker):
    async with a_broker() as connect:
        peer = await connect.http()
        assert await peer.ok("GET", "/health") == {"status": "healthy"}
        assert await peer.ok("GET", "/ready") == {"status": "ready"}


async def test_a_poisoned_log_makes_the_broker_unready_and_publishes_fail_with_503(a_broker):
    async with a_broker() as connect:
        peer = await connect.http()
        await peer.ok("POST", "/topics", {"name": "t", "partitions": 1}, 201)
        connect.broker.topics.log("t", 0).refuse(LogPoisoned("t/0 takes no more messages: I/O error"))
        answer = await peer.ask("GET", "/ready")
        assert answer.status == 503
        assert answer.json == {"status": "poisoned", "reason": "t/0 takes no more messages: I/O error"}
        assert await peer.refused("POST", "/topics/t/messages", {"value": "x"}) == (503, "LOG_POISONED")
        assert (await peer.ask("GET", "/health")).status == 200


async def test_a_draining_broker_is_not_ready(a_broker):
    async with a_broker() as connect:
        await connect.http()
        connect.broker.draining = True
        assert (await readiness(connect.broker)).status == "draining"


async def test_every_route_is_in_the_description_and_on_the_page(a_broker):
    async with a_broker() as connect:
        peer = await connect.http()
        document = await peer.ok("GET", "/openapi.json")
        described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
        assert described == {(row.method, row.path) for row in ROWS}
        text = json.dumps(document)
        for name in {part.split('"')[0] for part in text.split('"#/components/schemas/')[1:]}:
            assert name in document["components"]["schemas"]
        page = (await peer.ask("GET", "/docs")).body.decode()
        for row in ROWS:
            assert f"<b>{row.method}</b> <code>{row.path}</code>" in page
        assert "http://" not in page.replace("http://www.w3.org", "")
        assert "https://" not in page


@pytest.mark.parametrize("path", ["/nowhere", "/topics/", "/topics/t/nowhere", "//", "/topics/a%2Fb/tail", "/%ff"])
async def test_what_is_not_there_is_not_found(a_broker, path):
    async with a_broker() as connect:
        peer = await connect.http()
        assert await peer.refused("GET", path) == (404, "NO_SUCH_ROUTE")


@pytest.mark.parametrize("path", sorted({row.path for row in ROWS}))
async def test_a_wrong_method_is_answered_with_those_that_are_right(a_broker, path):
    methods = {row.method for row in ROWS if row.path == path}
    async with a_broker() as connect:
        peer = await connect.http()
        for method in {"GET", "POST", "DELETE", "PUT", "PATCH", "OPTIONS", "BREW"} - methods:
            answer = await peer.ask(method, path)
            assert (answer.status, answer.json["code"]) == (405, "METHOD_NOT_ALLOWED")
            assert methods <= set(answer.headers["allow"].split(", "))


@pytest.mark.parametrize("path", sorted({row.path for row in ROWS if row.body}))
@pytest.mark.parametrize("kind", ["text/plain", "application/xml", "", "application/json; charset=latin-1"])
async def test_a_wrong_content_type_is_refused(a_broker, path, kind):
    async with a_broker() as connect:
        peer = await connect.http()
        headers = {"content-type": kind} if kind else {}
        refusal = await peer.refused("POST", path, body=b'{"a":1}', headers=headers)
        assert refusal == (415, "UNSUPPORTED_MEDIA_TYPE")


async def test_a_compressed_body_is_refused(a_broker):
    async with a_broker() as connect:
        peer = await connect.http()
        headers = {"content-type": "application/json", "content-encoding": "gzip"}
        assert (await peer.refused("POST", "/topics", body=b"{}", headers=headers))[0] == 415


@pytest.mark.parametrize(
    ("body", "where"),
    [
        (b'{"name": "t",}', "byte"),
        (b'{"name": "t"', "byte 12"),
        (b"", "byte 0"),
        (b'{"name": 7}', "`name`"),
        (b'{"name": "t", "colour": "red"}', "`colour`"),
        (b'{"name": "\xff"}', "byte"),
        (b"[" * 100_000, "a list"),
        (b'{"name": "\\ud800"}', ""),
    ],
)
async def test_a_body_that_is_wrong_is_refused_with_where(a_broker, body, where):
    async with a_broker() as connect:
        peer = await connect.http()
        answer = await peer.ask("POST", "/topics", body=body, headers={"content-type": "application/json"})
        assert (answer.status, answer.json["code"]) in [(400, "BAD_REQUEST"), (400, "BAD_NAME")]
        assert where in answer.json["error"]


async def test_bytes_that_are_not_http_end_the_connection_and_nothing_else(a_broker):
    async with a_broker() as connect:
        bad, good = await connect.http(), await connect.http()
        await bad.stream.send_all(b"\x00\x01nonsense\r\n\r\n")
        assert (await bad.stream.receive_some()).startswith(b"HTTP/1.1 400 ")
        assert await good.ok("GET", "/health") == {"status": "healthy"}


async def test_a_head_is_answered_without_a_body_and_a_stream_has_none(a_broker):
    async with a_broker() as connect:
        peer = await connect.http()
        await peer.ok("POST", "/topics", {"name": "t"}, 201)
        raw = await connect.http()
        await raw.stream.send_all(b"HEAD /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        received = b""
        while data := await raw.stream.receive_some():
            received += data
        assert received.startswith(b"HTTP/1.1 200 ")
        assert received.endswith(b"\r\n\r\n")
        await peer.stream.send_all(b"HEAD /topics/t/tail HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert (await peer.stream.receive_some()).startswith(b"HTTP/1.1 405 ")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "http://localhost"}, 200),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-origin"}, 200),
    ],
)
async def test_a_page_of_another_site_may_do_nothing(a_broker, headers, status):
    async with a_broker() as connect:
        peer = await connect.http()
        assert (await peer.ask("GET", "/topics", headers=headers)).status == status
        made = await peer.ask("POST", "/topics", {"name": "t"}, headers=headers)
        assert made.status == (201 if status == 200 else 403)


async def test_one_connection_more_than_allowed_is_refused_in_the_language_of_the_door(a_broker):
    async with a_broker(max_connections=1) as connect:
        peer = await connect.http()
        await peer.ok("GET", "/health")
        refused = await connect.http()
        await refused.send("GET", "/topics")
        answer = (await refused.stream.receive_some()).decode()
        assert answer.startswith("HTTP/1.1 503 ")
        assert json.loads(answer.partition("\r\n\r\n")[2])["code"] == "TOO_MANY_CONNECTIONS"


async def test_many_requests_go_over_one_connection(a_broker):
    async with a_broker() as connect:
        peer = await connect.http()
        for _ in range(50):
            await peer.ok("GET", "/health")
        assert connect.broker.metrics.connections_accepted["http"] == 1


async def test_a_body_that_does_not_come_is_not_waited_for_for_ever(a_broker, monkeypatch):
    monkeypatch.setattr(http_bodies, "PATIENCE", 0.01)
    async with a_broker() as connect:
        peer = await connect.http()
        head = (
            b"POST /topics HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 10\r\n\r\n"
        )
        await peer.stream.send_all(head + b'{"na')
        assert (await peer.stream.receive_some()).startswith(b"HTTP/1.1 408 ")


async def test_bodies_that_are_handled_together_stay_within_a_limit(a_broker, monkeypatch):
    monkeypatch.setattr(http_bodies, "HANDLED_AT_ONCE", 1_000)
    async with a_broker() as connect:
        peers = [await connect.http() for _ in range(3)]
        await peers[0].ok("POST", "/topics", {"name": "t", "partitions": 1}, 201)
        handled, go_on = [], trio.Event()

        async def publish(topic, messages, timestamp_ms, *, wait, made_by):
            handled.append(len(messages[0].body))
            await go_on.wait()
            return []

        monkeypatch.setattr(connect.broker.appends, "publish_many", publish)
        for peer in peers:
            await peer.send("POST", "/topics/t/messages", {"messages": [{"value": "x" * 600}]})
        await wait_all_tasks_blocked(0.05)
        assert handled == [600]
        go_on.set()
        for peer in peers:
            assert (await peer.finish()).status == 200
        assert handled == [600] * 3


async def test_a_websocket_is_refused(a_broker):
    async with a_broker() as connect:
        peer = await connect.http()
        upgrade = "connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
        key = "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
        await peer.stream.send_all(f"GET /topics HTTP/1.1\r\nhost: localhost\r\n{upgrade}{key}\r\n".encode())
        assert (await peer.stream.receive_some()).startswith(b"HTTP/1.1 403 ")


# Real processes


def ask(port, path, timeout=20):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


@pytest.mark.process
def test_the_start_announces_the_door_and_port_0_switches_it_off(start_broker):
    port = free_port()
    broker = start_broker(http_port=port)
    assert f"HTTP on 127.0.0.1:{port}\n" in broker.banner
    assert ask(port, "/ready") == (200, b'{"status":"ready"}')
    assert "HTTP" not in start_broker("without").banner


def test_a_server_without_the_door_does_not_load_what_it_needs():
    show = "import sys, qb.server; print(*sys.modules)"
    shown = subprocess.run([sys.executable, "-c", show], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(shown.stdout.split())
    assert "qb.doors" in loaded
    assert loaded.isdisjoint({"httptools", "prometheus_client"})


@pytest.mark.process
def test_a_port_in_use_is_a_clear_error(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = run_server("--port", "0", "--data-dir", str(tmp_path / "data"), QB_HTTP_PORT=port)
    assert ended.returncode == 1
    assert ended.stderr == (
        f"qb-server: cannot listen on 127.0.0.1:{port}: something else is using it; "
        "QB_HTTP_PORT chooses another port for HTTP, 0 none\n"
    )


@pytest.mark.process
def test_sigterm_ends_open_streams_and_waiting_requests_and_exits_0(start_broker):
    port = free_port()
    broker = start_broker(http_port=port, shutdown_grace=30)
    with Peer(broker.port) as peer:
        peer.create_topic("t")
    streams = []
    for path in ("/topics/t/tail", "/topics/t/partitions/0/messages?max_wait_ms=60000"):
        stream = socket.create_connection(("127.0.0.1", port), timeout=20)
        stream.sendall(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
        streams.append(stream)
    assert b"joined" in read_until(streams[0], b"joined")
    assert ask(port, "/health")[0] == 200  # both requests were read by now, as they came before
    broker.process.send_signal(signal.SIGTERM)
    assert b"shutting down" in read_until(streams[0], b"")
    assert read_until(streams[1], b"").endswith(b'{"messages":[]}')
    assert broker.wait() == 0
    assert "Traceback" not in broker.log
    for stream in streams:
        stream.close()


@pytest.mark.process
def test_a_stream_that_is_not_read_does_not_keep_the_broker_from_stopping(start_broker):
    port = free_port()
    broker = start_broker(http_port=port, shutdown_grace=1)
    with Peer(broker.port) as peer:
        peer.create_topic("t")
        stuck = socket.socket()
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        stuck.connect(("127.0.0.1", port))
        stuck.sendall(b"GET /topics/t/tail HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert b"joined" in read_until(stuck, b"joined")
        for number in range(100):
            peer.publish("t", b"x" * 200_000, number + 1)
        peer.socket.close()
    assert broker.stop() == 0
    assert "Traceback" not in broker.log
    stuck.close()


@pytest.mark.process
def test_while_it_recovers_it_lives_but_is_not_ready(start_broker):
    port = free_port()
    broker = start_broker(http_port=port)
    with Peer(broker.port) as peer:
        peer.hello()
        peer.create_topic("t")
        for batch in range(100):
            peer.publish("t", b"x" * 1_000_000, batch + 1)
    broker.kill()
    answers = []
    asking = threading.Thread(target=poll, args=(port, answers))
    asking.start()
    broker.start()
    asking.join(timeout=30)
    assert answers[-1] == (200, b'{"status":"ready"}')
    for status, body in answers[:-1]:
        assert status == 503
        assert json.loads(body)["status"] == "recovering"


def poll(port, answers):
    """Ask until the broker is ready; what refused the connection is not listening yet."""

    def ready():
        try:
            answers.append(ask(port, "/ready"))
        except OSError:
            return False
        return answers[-1][0] == 200

    wait_until(ready)


async def test_the_recovering_door_answers_health_and_refuses_the_rest():
    (listener,) = listen("127.0.0.1", 0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(StartingAnswers([StartingDoor([listener], answer_to_http)]).run)
        port = listener.getsockname()[1]
        assert await trio.to_thread.run_sync(ask, port, "/health") == (200, b'{"status":"healthy"}')
        status, body = await trio.to_thread.run_sync(ask, port, "/ready")
        assert (status, json.loads(body)["status"]) == (503, "recovering")
        status, body = await trio.to_thread.run_sync(ask, port, "/topics")
        assert (status, json.loads(body)["code"]) == (503, "RECOVERING")
        nursery.cancel_scope.cancel()
    listener.close()


async def test_a_start_that_takes_long_refuses_peers_of_all_doors_with_the_reason():
    listeners = [listen("127.0.0.1", 0)[0] for _ in range(2)]
    answers = StartingAnswers(
        [StartingDoor([listeners[0]], answer_to_frames), StartingDoor([listeners[1]], answer_to_lines)]
    )
    frames, lines = [listener.getsockname()[1] for listener in listeners]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(answers.run)
        with pytest.raises(BrokerUnavailable, match="starting: the broker recovers its data directory") as refused:
            async with AsyncBrokerClient(port=frames) as client:
                await client.list_topics()
        assert refused.value.code == "RECOVERING"
        stream = await trio.open_tcp_stream("127.0.0.1", lines)
        await stream.send_all(b'{"type":"listTopics"}\n')
        received = b""
        while data := await stream.receive_some():
            received += data
        assert json.loads(received)["error"].startswith("starting: ")
        await stream.aclose()
        await answers.end()
    for listener in listeners:
        listener.close()


async def test_peers_wait_for_a_start_that_does_not_take_long():
    (listener,) = listen("127.0.0.1", 0)
    answers = StartingAnswers([StartingDoor([listener], answer_to_frames, silent_for=60)])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(answers.run)
        stream = await trio.open_tcp_stream("127.0.0.1", listener.getsockname()[1])
        await answers.end()
        await trio.lowlevel.wait_readable(listener)
        listener.accept()[0].close()
        await stream.aclose()
    listener.close()


async def test_who_was_accepted_before_the_doors_open_is_answered():
    (listener,) = listen("127.0.0.1", 0)
    answers = StartingAnswers([StartingDoor([listener], answer_to_http)])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(answers.run)
        stream = await trio.open_tcp_stream("127.0.0.1", listener.getsockname()[1])
        await stream.send_all(b"GET /health")
        await wait_all_tasks_blocked()
        await answers.end()
        await stream.send_all(b" HTTP/1.1\r\n\r\n")
        assert b"healthy" in await stream.receive_some()
        await stream.aclose()
    listener.close()


async def test_the_broker_lives_and_is_not_ready_while_subscriptions_are_taken_up(tmp_path, monkeypatch):
    reached, go, real = trio.Event(), trio.Event(), SubscriptionManager.restore

    async def restore(subscriptions):
        reached.set()
        await go.wait()
        await real(subscriptions)

    monkeypatch.setattr(SubscriptionManager, "restore", restore)
    settings = load(["--data-dir", str(tmp_path / "data")], {}).settings
    listening = [ListeningDoor("HTTP", http_door, listen("127.0.0.1", 0))]
    port = listening[0].listeners[0].getsockname()[1]
    engine, stop, started = LocalEngine.open(settings.storage), trio.Event(), trio.Event()
    starting = StartingAnswers(starting_doors(settings, listening))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(starting.run)
        nursery.start_soon(
            partial(serve, settings, engine, listening, stop, started=lambda _: started.set(), starting=starting)
        )
        await reached.wait()
        assert await trio.to_thread.run_sync(ask, port, "/health") == (200, b'{"status":"healthy"}')
        status, body = await trio.to_thread.run_sync(ask, port, "/ready")
        assert (status, json.loads(body)["reason"][:9]) == (503, "starting:")
        go.set()
        await started.wait()
        assert await trio.to_thread.run_sync(ask, port, "/ready") == (200, b'{"status":"ready"}')
        stop.set()
    engine.close()


def read_until(peer, wanted):
    """Return what comes up to `wanted`, or all of it if that is empty."""
    received = b""
    while not wanted or wanted not in received:
        data = peer.recv(65_536)
        if not data:
            break
        received += data
    return received


async def test_the_recovering_door_serves_a_bounded_number_of_connections(monkeypatch):
    monkeypatch.setattr(starting_answers, "MOST", 3)
    (listener,) = listen("127.0.0.1", 0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(StartingAnswers([StartingDoor([listener], answer_to_http)]).run)
        port = listener.getsockname()[1]
        waiting = [await trio.open_tcp_stream("127.0.0.1", port) for _ in range(3)]
        closed = await trio.open_tcp_stream("127.0.0.1", port)
        with trio.fail_after(4):
            assert await closed.receive_some() == b""
        await waiting[0].send_all(b"GET /health HTTP/1.1\r\n\r\n")
        assert b"healthy" in await waiting[0].receive_some()
        for stream in (*waiting, closed):
            await stream.aclose()
        nursery.cancel_scope.cancel()
    listener.close()
