"""Clients find their broker by an address, by several, or by the environment, and the log says how that goes."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from qb import AsyncBrokerClient, BrokerClient, BrokerUnavailable, Consumer
from qb.clients.protocol import reconnecting
from qb.clients.protocol.reconnecting import ConnectionTrouble
from qb.core.wire.addresses import parse_address
from qb.testing.chaos import Chaos
from qb.testing.running_broker import RunningBroker
from tests.support.brokers import free_port

NOTHING = "127.0.0.1:1"  # no broker listens there


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("qb://example.org:1234", "example.org", 1234),
        ("qb://example.org", "example.org", 9999),
        ("example.org:1234", "example.org", 1234),
        ("10.0.0.7", "10.0.0.7", 9999),
        ("qb://[::1]:1234/", "::1", 1234),
        ("::1", "::1", 9999),
    ],
)
def test_an_address_is_a_host_and_a_port(text: str, host: str, port: int) -> None:
    assert parse_address(text) == (host, port)
    assert parse_address(str(parse_address(text))) == (host, port)


@pytest.mark.parametrize("text", ["", "http://h:1", "qb://", "h:port", "h:1:2/x", "user@h", "qb://h:1/topic"])
def test_what_is_no_address_is_refused_with_the_forms_that_are(text: str) -> None:
    with pytest.raises(ValueError, match="write host, host:port, qb://host:port or qbs://host:port"):
        BrokerClient(text)


def test_a_port_is_given_once_and_servers_are_a_list() -> None:
    with pytest.raises(ValueError, match="leave the argument port away"):
        BrokerClient("h:1", 2)
    with pytest.raises(TypeError, match="list of addresses"):
        BrokerClient(servers="h:1")
    with pytest.raises(ValueError, match="in place of host and port"):
        BrokerClient("h", servers=["h:1"])
    with pytest.raises(ValueError, match="in place of host and port"):
        Consumer("billing", "orders", port=1, servers=["h:1"])


@pytest.mark.process
def test_every_client_takes_an_address_and_shows_it(qb_broker: RunningBroker) -> None:
    with BrokerClient(qb_broker.address) as client:
        client.create_topic("orders")
        assert repr(client) == f"<BrokerClient 127.0.0.1:{qb_broker.port}, connected>"
        with client.consumer("billing", "orders") as consumer:
            assert consumer.poll(timeout=0) == []
            assert repr(consumer) == f"<Consumer 'billing' of orders, 127.0.0.1:{qb_broker.port}>"
    with Consumer("billing", "orders", host=qb_broker.address) as consumer:
        assert consumer.poll(timeout=0) == []


@pytest.mark.process
async def test_the_first_server_that_answers_is_used(qb_broker: RunningBroker) -> None:
    servers = [NOTHING, qb_broker.address, NOTHING]
    with BrokerClient(servers=servers) as client:
        assert client.port == qb_broker.port
    async with AsyncBrokerClient(servers=servers) as asynchronous:
        assert asynchronous.port == qb_broker.port


def test_servers_that_are_all_down_are_named_behind_the_last_failure() -> None:
    with (
        pytest.raises(
            BrokerUnavailable, match=rf"nothing listens on 127\.0\.0\.1:2; .* \(of {NOTHING}, 127\.0\.0\.1:2\)"
        ),
        BrokerClient(servers=[NOTHING, "127.0.0.1:2"]),
    ):
        pass


@pytest.mark.process
def test_the_environment_says_where_the_broker_is(
    qb_broker: RunningBroker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "qb.yaml").write_text("client: {request_timeout: 7}\n")
    monkeypatch.setenv("QB_SERVER_PORT", str(qb_broker.port))
    monkeypatch.setenv("QB_CONFIG_FILE", str(tmp_path / "qb.yaml"))
    with BrokerClient.from_env() as client:
        assert client.port == qb_broker.port
    with Consumer.from_env("billing", "orders") as consumer:
        assert str(qb_broker.port) in repr(consumer)
    assert BrokerClient.from_env(host="qb://h:12").port == 12
    monkeypatch.setenv("QB_SERVER_PORT", "many")
    with pytest.raises(ValueError, match="QB_SERVER_PORT"):
        BrokerClient.from_env()


@pytest.mark.process
def test_connecting_losing_and_finding_the_broker_are_logged_once_each(
    qb_broker: RunningBroker, qb_chaos: Chaos, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "qb.client")
    with BrokerClient(qb_broker.address) as client:
        client.create_topic("orders")
        qb_chaos.kill_broker()
        client.publish("orders", b"tea")
    said = [record.getMessage() for record in caplog.records if record.name == "qb.client"]
    where = f"127.0.0.1:{qb_broker.port}"
    assert said[0] == f"connected to {where}"
    assert said[1].startswith(f"lost the connection: {where} closed")
    assert said[2:] == [f"connected to {where} again"]


def test_a_client_that_finds_no_broker_says_after_a_second_what_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 100.0
    monkeypatch.setattr(reconnecting.time, "monotonic", lambda: now)
    trouble = ConnectionTrouble([parse_address(NOTHING)])
    for seconds in (0, 0.9, 1.0, 5.0):
        now = 100.0 + seconds
        trouble.note(ConnectionRefusedError())
        assert len(caplog.records) == (seconds >= 1.0)
    assert "waiting for a broker: nothing listens on 127.0.0.1:1" in caplog.text


FIRST_PUBLISH = """
import sys, threading, qb
port, how = int(sys.argv[1]), sys.argv[2]
def blocking():
    client = qb.BrokerClient(port=port, request_timeout=1.5)
    others = [threading.Thread(target=publish, args=(client,)) for _ in range(3)]
    [each.start() for each in others]
    publish(client)
    [each.join() for each in others]
def publish(client):
    try:
        client.publish("orders", b"tea")
    except qb.BrokerUnavailable:
        pass
async def waiting():
    try:
        async with qb.AsyncBrokerClient(port=port, connect_wait=1.5):
            pass
    except qb.BrokerUnavailable:
        pass
if how == "blocking":
    blocking()
elif how == "asyncio":
    import asyncio
    asyncio.run(waiting())
else:
    import trio
    trio.run(waiting)
"""


@pytest.mark.process
@pytest.mark.parametrize("how", ["blocking", "asyncio", "trio"])
def test_a_first_call_without_a_broker_says_after_a_second_and_once_what_it_waits_for(how: str) -> None:
    """In a program that has not configured logging; the call gives up after 1.5 seconds."""
    port = free_port()
    command = [sys.executable, "-c", FIRST_PUBLISH, str(port), how]
    run = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert run.stderr.splitlines() == [
        f"waiting for a broker: nothing listens on 127.0.0.1:{port}; start the broker with: qb-server"
    ]
