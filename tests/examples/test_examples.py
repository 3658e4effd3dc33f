"""The programs of examples/ run, each as a process of its own, and do what they say."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from qb import BrokerClient
from qb.testing.running_broker import RunningBroker
from tests.support.brokers import ROOT

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


def run(module: str, **environment: str) -> list[str]:
    """Run an example; returns the lines that it printed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("QB_")} | environment
    command = [sys.executable, "-m", f"examples.{module}"]
    done = subprocess.run(command, cwd=ROOT, env=kept, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def run_against(broker: RunningBroker, module: str) -> list[str]:
    return run(module, QB_SERVER_PORT=str(broker.port))


def test_one_file_starts_a_broker_a_producer_and_a_consumer_and_ends_by_itself() -> None:
    lines = run("producer_consumer")
    assert [line.partition(".")[0] for line in lines] == list("1233344456")
    assert sorted(line for line in lines if line.startswith("4.")) == [
        f"4. customer-{number} ordered tea" for number in range(3)
    ]


def test_services_pass_orders_on_in_transactions(qb_broker: RunningBroker, qb_client: BrokerClient) -> None:
    assert run_against(qb_broker, "event_services") == [
        f"{number}: tea is on its way to customer-{number}" for number in range(3)
    ]
    assert qb_client.describe_topic("orders-shipped").messages == 3


def test_a_tail_follows_the_logs_of_services(qb_broker: RunningBroker, qb_client: BrokerClient) -> None:
    assert run_against(qb_broker, "log_aggregation") == [
        "web WARNING GET / 200",
        "db WARNING checkpoint took 3 s",
        "web WARNING GET /orders 500",
    ]
    assert qb_client.describe_topic("logs").retention_hours == 168
    assert qb_client.list_subscriptions() == [], "the tail is gone"


def test_a_work_queue_tries_again_and_sets_aside_what_keeps_failing(
    qb_broker: RunningBroker, qb_client: BrokerClient
) -> None:
    lines = run_against(qb_broker, "work_queue")
    assert [line for line in lines if "aside" in line] == ["task 13 is set aside"]
    assert [line for line in lines if "attempt 2" in line] == [
        f"task {number} is done at attempt 2" for number in (0, 10, 15, 5)
    ]
    assert len(lines) == 20
    assert qb_client.describe_topic("tasks-failed").messages == 1
