"""The web application of examples/: a real server, a real HTTP client and a real broker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from qb import BrokerClient
from tests.support.brokers import ROOT, BrokerProcess, free_port
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


@contextmanager
def application(broker: BrokerProcess, log: Path, loop: str) -> Iterator[tuple[subprocess.Popen[bytes], httpx.Client]]:
    """The application under uvicorn, which serves, and a client of it."""
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "examples.fastapi_app:app", "--port", str(port), "--loop", loop]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("QB_")}
    environment |= {"QB_SERVER_PORT": str(broker.port)}
    with log.open("wb") as output, httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output)
        try:
            wait_until(lambda: b"Uvicorn running" in log.read_bytes() or process.poll() is not None)
            assert process.poll() is None, log.read_text()
            yield process, client
        finally:
            process.kill()
            process.wait()


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_orders_are_published_in_requests_and_billed_by_the_handler(
    loop: str, broker: BrokerProcess, tmp_path: Path
) -> None:
    with application(broker, tmp_path / "log", loop) as (_, client):
        placed = [client.post("/orders", json={"item": item}) for item in ("tea", "cake")]
        assert [answer.status_code for answer in placed] == [201, 201]
        assert [answer.json() for answer in placed] == [{"offset": i, "durability": "fsynced"} for i in range(2)]
        wait_until(lambda: client.get("/health").json()["bills_finished"] == 2)
    with BrokerClient(port=broker.port) as reader:
        assert [message.text() for message in reader.fetch("bills", 0, 0)] == ["one tea", "one cake"]


def test_a_shutdown_finishes_the_bill_in_hand_and_leaves_the_other_orders_to_the_next_process(
    broker: BrokerProcess, tmp_path: Path
) -> None:
    with application(broker, tmp_path / "first", "asyncio") as (process, client):
        client.post("/orders", json={"item": "tea", "seconds": 2.0})
        client.post("/orders", json={"item": "cake"})
        wait_until(lambda: client.get("/health").json()["bills_started"] >= 1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) in (0, -signal.SIGTERM)
        assert "Application shutdown complete" in (tmp_path / "first").read_text()
    with application(broker, tmp_path / "second", "asyncio"), BrokerClient(port=broker.port) as reader:
        wait_until(lambda: reader.describe_topic("bills")["messages"] == 2)
        wait_until(lambda: reader.describe_subscription("billing")["lag"] == 0)
        assert [message.text() for message in reader.fetch("bills", 0, 0)] == ["one tea", "one cake"]
