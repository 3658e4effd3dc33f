"""The commands that pull messages and look after consumer groups, against a real broker."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import Any

import pytest

from qb.cli.commands.pull_commands import parse_offset
from qb.clients.blocking.client import BrokerClient
from tests.support.brokers import ROOT, BrokerProcess
from tests.support.commands import Run

pytestmark = pytest.mark.timeout(40)
PARTITIONS = 2  # of the topic that each test has


@pytest.fixture
def topic(client: BrokerClient, topic: str) -> str:
    """A topic of the test's own, with 5 messages in the second partition."""
    client.publish_many(topic, [b"%d" % number for number in range(5)], partition=1)
    return topic


def rows(table: str) -> list[list[str]]:
    return [line.split() for line in table.splitlines()]


def test_fetch_prints_the_bodies_one_a_line(qb: Run, topic: str) -> None:
    assert qb("fetch", topic, "--partition", "1") == (0, "0\n1\n2\n3\n4\n", "")
    assert qb("fetch", topic, "--partition", "1", "--offset", "3").out == "3\n4\n"
    assert qb("fetch", topic, "--partition", "1", "--max", "2").out == "0\n1\n"
    assert qb("fetch", topic, "--partition", "1", "--offset", "latest").out == ""
    assert qb("fetch", topic).out == ""


def test_fetch_prints_as_many_as_are_wanted_though_one_answer_has_no_room_for_them(
    qb: Run, topic: str, client: BrokerClient
) -> None:
    client.publish_many(topic, [b"%04d" % number + b"x" * 3_000 for number in range(900)], partition=0)
    lines = qb("fetch", topic, "--max", "800").out.splitlines()
    assert [line[:4] for line in lines] == [f"{number:04d}" for number in range(800)]


def test_fetch_for_scripts_is_one_json_list(qb: Run, topic: str, client: BrokerClient) -> None:
    client.publish(topic, b"\xff", 0, key="k", source="web")
    (message,) = json.loads(qb("fetch", topic, "--json").out)
    assert {name: message[name] for name in ("topic", "partition", "offset", "key", "properties")} == {
        "topic": topic,
        "partition": 0,
        "offset": 0,
        "key": "k",
        "properties": {"source": "web"},
    }
    assert (message["value"], message["encoding"]) == ("/w==", "base64")


def test_what_cannot_be_fetched_says_why(qb: Run, topic: str) -> None:
    assert "has no partition 7" in qb("fetch", topic, "--partition", "7").err
    assert qb("fetch", topic, "--offset", "soon").code == 2
    assert qb("fetch", topic, "--offset", "-3").code == 2


@pytest.mark.parametrize(("text", "offset"), [("earliest", -2), ("latest", -1), ("0", 0), ("17", 17), ("-1", -1)])
def test_an_offset_is_a_number_or_a_word(text: str, offset: int) -> None:
    assert parse_offset(text) == offset


def test_a_group_consumes_and_goes_on_where_it_left(qb: Run, topic: str) -> None:
    assert qb("consume", "--group", "c1", "--topic", topic, "--count", "3").out == "0\n1\n2\n"
    assert qb("consume", "--group", "c1", "--topic", topic, "--count", "2").out == "3\n4\n"
    assert qb("consume", "--group", "c2", "--topic", topic, "--from", "4", "--count", "1").out == "4\n"
    assert "there is no topic" in qb("consume", "--group", "c3", "--topic", "nowhere").err
    assert qb("consume", "--group", "c3", "--topic", topic, "--from", "soon").code == 2


def test_groups_are_listed_described_reset_and_deleted(qb: Run, topic: str, client: BrokerClient) -> None:
    client.commit_offsets("billing", [(topic, 1, 2)])
    assert ["billing", "empty", "0", topic] in rows(qb("groups", "list").out)
    described = rows(qb("groups", "describe", "billing").out)
    assert ["group", "billing"] in described
    assert described[-1][:3] == [topic, "1", "2"]
    reset = qb("groups", "reset", "billing", topic, "--to", "latest")
    assert [row[:3] for row in rows(reset.out)[1:]] == [[topic, "0", "0"], [topic, "1", "5"]]
    assert json.loads(qb("--json", "groups", "describe", "billing").out)["partitions"][1]["lag"] == 0
    assert qb("groups", "delete", "billing").out == "deleted group 'billing' and 2 committed offsets\n"
    assert qb("groups", "describe", "billing").code == 1


def test_a_group_in_use_shows_who_holds_what_and_is_neither_reset_nor_deleted(
    qb: Run, topic: str, client: BrokerClient
) -> None:
    with client.consumer("busy", topic) as consumer:
        while len(consumer.assignment) < 2:
            consumer.poll(0.05)
        assert f"{topic}/0, {topic}/1" in qb("groups", "describe", "busy").out
        assert "in use" in qb("groups", "reset", "busy", topic, "--to", "earliest").err
        assert "in use" in qb("groups", "delete", "busy").err


def test_offsets_are_shown_for_every_partition(qb: Run, topic: str) -> None:
    assert rows(qb("offsets", topic).out) == [["partition", "first", "next"], ["0", "0", "0"], ["1", "0", "5"]]


def test_partitions_are_added_and_never_taken_away(qb: Run, topic: str) -> None:
    assert qb("add-partitions", topic, "4").out == f"topic '{topic}' has 4 partitions now; keys may have moved\n"
    assert len(json.loads(qb("offsets", topic, "--json").out)) == 4
    assert qb("add-partitions", topic, "3").code == 1


@pytest.mark.process
def test_sigterm_ends_a_consumer_that_leaves_its_group_and_commits_what_it_printed(
    shared: BrokerProcess, topic: str, client: BrokerClient
) -> None:
    argv: list[Any] = [sys.executable, ROOT / "client.py", "--port", str(shared.port)]
    argv += ["consume", "--group", "term", "--topic", topic]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(5)] == [b"0\n", b"1\n", b"2\n", b"3\n", b"4\n"]
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
    group = client.describe_group("term")
    assert group["members"] == []
    assert {row["partition"]: row["committed"] for row in group["partitions"]}[1] == 5
