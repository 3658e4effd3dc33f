"""The NATS client against real servers: logins, TLS, a server that dies, what it missed."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from qb.replication.nats.nats_client import NatsClient
from qb.replication.nats.nats_conversation import NatsDisconnected, NoResponders
from qb.replication.nats.nats_protocol import NatsMessage
from tests.support.brokers import free_port
from tests.support.nats_cluster import NatsCluster, NatsNode
from tests.support.waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.process]
LIMIT = 30.0  # seconds


@pytest.fixture
def start_node(tmp_path: Path) -> Iterator[object]:
    nodes: list[NatsNode] = []

    def start(more: str = "") -> NatsNode:
        nodes.append(NatsNode(tmp_path, f"node{len(nodes)}", free_port(), more=more))
        nodes[-1].start()
        nodes[-1].wait()
        return nodes[-1]

    yield start
    for node in nodes:
        node.kill()


async def connected(nursery: trio.Nursery, *servers: str, **options: object) -> NatsClient:
    client = NatsClient(servers, **options)  # type: ignore[arg-type]
    nursery.start_soon(client.run)
    with trio.fail_after(LIMIT):
        await client.wait_connected()
    return client


async def test_messages_go_out_and_come_in_with_their_headers(start_node, nursery: trio.Nursery) -> None:
    client = await connected(nursery, start_node().url)
    came = trio.Event()
    received: list[NatsMessage] = []

    def receive(message: NatsMessage) -> None:
        received.append(message)
        came.set()

    client.subscribe("a.*", receive)
    client.publish("a.b", b"body", {"Name": "value"})
    with trio.fail_after(LIMIT):
        await came.wait()
    assert received[0][0:1] + received[0][3:5] == ("a.b", {"Name": "value"}, b"body")
    with pytest.raises(NoResponders):
        await client.request("nothing.listens.here", timeout=LIMIT)


@pytest.mark.parametrize(
    ("setting", "login"),
    [("authorization { user: me, password: secret }", "me:secret@"), ("authorization { token: secret }", "secret@")],
    ids=["password", "token"],
)
async def test_credentials_in_the_address_let_us_in_and_wrong_ones_do_not(
    start_node, nursery: trio.Nursery, setting: str, login: str, caplog: pytest.LogCaptureFixture
) -> None:
    node = start_node(setting)
    await connected(nursery, f"nats://{login}127.0.0.1:{node.port}")
    stranger = NatsClient([f"nats://x:y@127.0.0.1:{node.port}"])
    nursery.start_soon(stranger.run)
    await until(lambda: "Authorization Violation" in caplog.text)
    assert not stranger.is_connected


async def test_a_lone_request_leaves_in_the_step_that_makes_it(nursery: trio.Nursery) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = NatsClient([f"127.0.0.1:{listener.getsockname()[1]}"])
        nursery.start_soon(client.run)
        server, _ = await trio.to_thread.run_sync(listener.accept)
    with server:
        server.setblocking(False)
        server.send(b'INFO {"headers": true}\r\n')
        await heard(server, b"PING\r\n")
        server.send(b"PONG\r\n")
        await heard(server, b"PING\r\n")  # the one that keeps the connection
        for payload in (b"first", b"second", b"third"):
            client.send_request("a.b", payload, lambda answer: None)
        assert server.recv(4096).count(b"PUB a.b") == 1
        assert (await heard(server, b"third\r\n")).count(b"PUB a.b") == 2  # they were sent together


async def heard(server: socket.socket, end: bytes) -> bytes:
    """Return what has come up to here."""
    came = b""
    with trio.fail_after(LIMIT):
        while not came.endswith(end):
            await trio.lowlevel.wait_readable(server)
            came += server.recv(4096)
    return came


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    names = "subjectAltName=IP:127.0.0.1"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate]
    subprocess.run([*command, "-days", "2", "-subj", "/CN=test", "-addext", names], check=True, capture_output=True)
    return certificate, key


async def test_a_server_that_wants_tls_gets_it(start_node, nursery: trio.Nursery, certificate) -> None:
    trusted, key = certificate
    node = start_node(f'tls {{ cert_file: "{trusted}", key_file: "{key}" }}')
    trusting = ssl.create_default_context(cafile=str(trusted))
    client = await connected(nursery, node.url, tls=trusting)
    with pytest.raises(NoResponders):
        await client.request("nothing", timeout=LIMIT)


async def test_a_killed_server_is_replaced_by_one_that_the_cluster_named(tmp_path: Path, nursery: trio.Nursery) -> None:
    cluster = NatsCluster(tmp_path)
    cluster.start()
    try:
        client = await connected(nursery, cluster.urls[0])
        await until(lambda: client.server and len(client.server.connect_urls) == 3)  # the nodes have found each other
        came = trio.Event()
        client.subscribe("events", lambda message: came.set())
        cluster.nodes[0].kill()
        await until(lambda: client.server and client.server.server_name != "n0")
        with trio.fail_after(LIMIT):
            client.publish("events", b"")
            await came.wait()
        cluster.kill()
        await until(lambda: not client.is_connected)
        with pytest.raises(NatsDisconnected):
            await client.request("anything")
    finally:
        cluster.kill()
