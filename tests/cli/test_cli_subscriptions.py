"""The command line for subscriptions, against a real broker; the long-running commands as real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from qb import BrokerClient
from qb.cli.main import main
from tests.support.brokers import ROOT

pytestmark = pytest.mark.process


@pytest.fixture
def qb(broker, capfd):
    """Run a command in this process; returns (exit code, standard output, standard error)."""

    def run(*argv: str):
        code = main(["--port", str(broker.port), *argv])
        shown = capfd.readouterr()
        return code, shown.out, shown.err

    with BrokerClient(port=broker.port) as client:
        client.create_topic("orders")
        client.publish_many("orders", [b"one", b"two", b"three"])
    return run


@pytest.fixture
def start(broker):
    """Start a command as a process of its own; ends it after the test."""
    started = []

    def run(*argv: str, cwd=None):
        command = [sys.executable, str(ROOT / "client.py"), "--port", str(broker.port), *argv]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        environment = {name: value for name, value in os.environ.items() if not name.startswith("QB_")}
        started.append(subprocess.Popen(command, text=True, cwd=cwd, env=environment, **pipes))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


def test_a_subscription_from_making_to_deleting(qb):
    assert qb("create-subscription", "till", "orders", "--mode", "exclusive", "--ack-deadline", "5")[0] == 0
    listed = json.loads(qb("list-subscriptions", "--json")[1])
    assert [(row["subscription_id"], row["topic"], row["mode"]) for row in listed] == [("till", "orders", "exclusive")]
    described = json.loads(qb("describe-subscription", "till", "--json")[1])
    assert (described["lag"], described["ack_deadline"], described["oldest_unacked_age"] >= 0) == (3, 5, True)
    assert "lag" in qb("describe-subscription", "till")[1]
    assert "has no subscribers" in qb("explain", "till", "1")[1]
    assert qb("pause", "till")[1] == "'till' is paused\n"
    assert qb("resume", "till")[1] == "'till' delivers again\n"
    assert qb("seek", "till", "latest")[0] == 0
    assert json.loads(qb("describe-subscription", "till", "--json")[1])["lag"] == 0
    assert qb("fork", "till", "copy")[0] == 0
    assert qb("dead-letters", "list", "till")[1] == "'till' has no dead letters\n"
    assert json.loads(qb("dead-letters", "retry", "till", "--json")[1]) == {"retried": 0}
    assert json.loads(qb("dead-letters", "purge", "till", "--json")[1]) == {"purged": 0}
    assert qb("delete-subscription", "till")[0] == 0
    code, out, err = qb("describe-subscription", "till")
    assert (code, out) == (1, "")
    assert "create-subscription till" in err


def test_joining_prints_bodies_or_json_and_stops_after_count(qb):
    qb("create-subscription", "till", "orders")
    assert qb("join-subscription", "till", "--count", "2") == (0, "one\ntwo\n", "")
    code, out, _ = qb("join-subscription", "till", "--count", "1", "--json")
    assert (code, json.loads(out)["value"], json.loads(out)["offset"]) == (0, "three", 2)
    assert json.loads(qb("describe-subscription", "till", "--json")[1])["lag"] == 0


def test_subscribe_reads_a_topic_from_an_offset_and_leaves_nothing_behind(qb):
    assert qb("subscribe", "orders", "--offset", "1", "--count", "2") == (0, "two\nthree\n", "")
    assert qb("list-subscriptions", "--json")[1] == "[]\n"


def test_exec_acks_by_exit_code_and_gets_the_body_on_standard_input(qb, tmp_path):
    qb("create-subscription", "till", "orders")
    seen = tmp_path / "seen"
    command = f'read -r line; echo "$MESSAGE_OFFSET $line" >> {seen}; cat >> {seen}'
    assert qb("join-subscription", "till", "--count", "3", "--exec", command)[0] == 0
    assert seen.read_text() == "0 one\n1 two\n2 three\n"


def test_exec_that_fails_is_a_nack(qb, start, broker):
    qb("create-subscription", "till", "orders", "--max-deliveries", "1")
    start("join-subscription", "till", "--exec", "exit 3")
    with BrokerClient(port=broker.port) as client:
        letters = []
        while len(letters) < 3:
            letters = client.dead_letters("till")
    assert {letter["reason"] for letter in letters} == {"RuntimeError: exit code 3"}


def test_tail_shows_what_comes_from_now_on(qb, start, broker):
    tail = start("tail", "orders", "--count", "1")
    with BrokerClient(port=broker.port) as client:
        while tail.poll() is None:
            client.publish("orders", b"live")
    assert tail.communicate()[0] == "live\n"


HANDLERS = """
import pathlib
def handle(message):
    with pathlib.Path("handled").open("a") as file:
        file.write(message.text() + "\\n")
"""


def test_a_worker_handles_survives_a_broker_restart_and_drains_on_sigterm(qb, start, broker, tmp_path):
    (tmp_path / "tasks.py").write_text(HANDLERS)
    qb("create-subscription", "till", "orders")
    worker = start("worker", "tasks:handle", "--subscription", "till", "--concurrency", "2", cwd=tmp_path)
    with BrokerClient(port=broker.port) as client:
        while client.describe_subscription("till")["lag"]:
            pass
        broker.restart()
        client.publish("orders", b"four")
        while client.describe_subscription("till")["lag"]:
            pass
    worker.send_signal(signal.SIGTERM)
    _, err = worker.communicate(timeout=20)
    assert worker.returncode == 0, err
    assert set((tmp_path / "handled").read_text().split()) == {"one", "two", "three", "four"}
    assert "tasks:handle handles 'till'" in err


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("tasks", "MODULE:FUNCTION"),
        ("nowhere:handle", "no module 'nowhere'"),
        ("json:nothing", "no function 'nothing'"),
    ],
)
def test_a_worker_that_cannot_be_loaded_says_so(qb, function, words):
    code, _, err = qb("worker", function, "--subscription", "till")
    assert code in (1, 2)
    assert words in err


def test_bench_deliver_prints_a_rate(qb):
    data = json.loads(qb("bench", "deliver", "--count", "2000", "--json")[1])
    assert data["messages_per_second"] > 0
