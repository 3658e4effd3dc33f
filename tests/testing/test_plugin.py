"""The fixtures of the pytest plugin: a real broker, a client, messages to call a handler with."""

from __future__ import annotations

import os
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest

from qb import BrokerClient
from qb.testing.made_messages import MessageMaker
from qb.testing.running_broker import BrokerFactory, RunningBroker


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.process
def test_a_broker_of_the_tests_own_stores_what_the_client_publishes(
    qb_broker: RunningBroker, qb_client: BrokerClient, tmp_path: Path
) -> None:
    qb_client.create_topic("orders")
    receipt = qb_client.publish("orders", b"tea")
    assert (receipt.offset, receipt.durability) == (0, "fsynced")
    assert list((qb_broker.data_dir / "topics/orders/0").glob("*.log"))
    assert qb_broker.data_dir.is_relative_to(tmp_path)
    assert qb_broker.address == f"qb://127.0.0.1:{qb_broker.port}"


@pytest.mark.process
def test_the_next_broker_is_empty_again(qb_client: BrokerClient) -> None:
    assert qb_client.list_topics() == []


@pytest.mark.process
@pytest.mark.qb_settings(fsync_on_write=False, max_message_size=2000)
def test_a_marker_sets_the_brokers_settings(qb_client: BrokerClient) -> None:
    qb_client.create_topic("orders")
    assert qb_client.publish("orders", b"tea").durability == "written"
    assert qb_client.max_message_size == 2000


@pytest.mark.process
def test_further_brokers_are_forks_of_one_process_that_has_the_code_loaded(tmp_path: Path) -> None:
    brokers = []
    with closing(BrokerFactory()) as factory:
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            brokers.append(RunningBroker(factory, tmp_path / name))
        pids = [int((each.data_dir / "lock").read_text()) for each in brokers]
        assert len({*pids}) == 2
        assert len({parent_of(pid) for pid in pids} - {os.getpid()}) == 1
    assert not any(Path(f"/proc/{pid}").exists() and parent_of(pid) != 1 for pid in pids), "closing kills them"


@pytest.mark.process
def test_a_broker_that_cannot_start_says_why(qb_broker_factory: BrokerFactory, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"did not start(.|\n)*max_message_size"):
        RunningBroker(qb_broker_factory, tmp_path, max_message_size="large")


def test_a_handler_is_called_with_a_made_message(qb_message: MessageMaker) -> None:
    at = datetime(2026, 11, 18, 12, tzinfo=UTC)
    message = qb_message({"id": 1}, topic="orders", key="k", properties={"colour": "red"}, timestamp=at, attempt=3)
    assert (message.topic, message.key, message.properties, message.attempt) == ("orders", "k", {"colour": "red"}, 3)
    assert (message.body, message.time) == (b'{"id":1}', at)
    assert [qb_message(body).body for body in (b"b", "text", [1])] == [b"b", b"text", b"[1]"]


def test_what_a_handler_settles_by_hand_is_listed(qb_message: MessageMaker) -> None:
    message = qb_message("tea")
    message.extend(5)
    message.nack(delay=2, reason="no water")
    message.ack()
    assert [(each.what, each.seconds, each.reason) for each in qb_message.settled] == [
        ("extend", 5, ""),
        ("nack", 2, "no water"),
        ("ack", None, ""),
    ]
