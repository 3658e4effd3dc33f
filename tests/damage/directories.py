"""Data directories with something of everything in them, after a clean stop and after kill -9."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from msgspec.json import decode

from qb import BrokerClient, Message
from qb.core.wire.frames import MessageType, encode_frame
from qb.storage.data_directory import read_metadata
from qb.storage.log.log_extents import key_of
from tests.support.brokers import ROOT, BrokerProcess
from tests.support.waiting import wait_until

SETTINGS = {"segment_bytes": 4096, "retention_interval": 0.05}
KILLED_AT = "a run is durable"  # of the copying of a decided transaction
KILLING = (sys.executable, str(ROOT / "tests" / "support" / "killing_server.py"), KILLED_AT)
PATIENCE = 60.0


def make_clean(directory: Path) -> Path:
    """Make a data directory and stop its broker; returns where it is."""
    broker = _broker(directory)
    try:
        with BrokerClient(port=broker.port) as client:
            _fill(client, broker.data_dir)
        assert broker.stop() == 0
    finally:
        _end(broker)
    return broker.data_dir


def make_killed(directory: Path) -> Path:
    """Make a data directory whose broker is killed while it copies a transaction; returns where it is."""
    broker = _broker(directory)
    try:
        with BrokerClient(port=broker.port) as client:
            _fill(client, broker.data_dir)
        broker.kill()
        killing = _broker(directory, KILLING)
        with BrokerClient(port=killing.port, request_timeout=2) as client, suppress(Exception):
            _stage(client, "decided", 5, commit=True)
        assert killing.wait() == -9
    finally:
        _end(broker)
    return broker.data_dir


def _broker(directory: Path, prefix: tuple[str, ...] = ()) -> BrokerProcess:
    directory.mkdir(parents=True, exist_ok=True)
    return BrokerProcess(directory, prefix, **SETTINGS)


def _end(broker: BrokerProcess) -> None:
    if broker.process.poll() is None:
        broker.kill()


def _fill(client: BrokerClient, data_dir: Path) -> None:
    """Use everything that leaves traces on disk."""
    client.create_topic("orders", partitions=3)
    client.create_topic("events")
    client.create_topic("short", retention_bytes=10_000)
    client.create_topic("empty", partitions=2)
    client.create_topic("deleted")
    for number in range(120):
        client.publish("orders", b"order %d " % number + b"." * (number % 60), key=f"customer-{number % 7}")
    for number in range(0, 300, 20):
        client.publish_many(
            "orders", [b"%d" % one * 5 for one in range(number, number + 20)], partition=number // 20 % 3
        )
    client.publish_many("events", [b"event %d" % number for number in range(40)])
    client.publish("events", b"with properties", kind="odd", of="several")
    for number in range(60):
        client.publish("short", b"%d" % number * 150)
    wait_until(lambda: client.offsets("short").first > 0)
    client.delete_topic("deleted")
    _subscribe(client, data_dir)
    client.commit_offsets("group", [("orders", 0, 20), ("orders", 1, 30), ("events", 0, 7)])
    client.commit_offsets("other", [("events", 0, 11)])
    _stage(client, "committed", None, commit=True)
    _stage(client, "numbered", 3, commit=True)
    _stage(client, "staged", 4, commit=False)
    _stage(client, "staged-too", None, commit=False)
    wait_until(lambda: _are_noted(client, data_dir))


def _subscribe(client: BrokerClient, data_dir: Path) -> None:
    """Leave cursors with gaps, dead letters, a paused subscription and one with a floor."""
    client.create_subscription("all", "orders")
    client.create_subscription("late", "events", start_offset=15)
    client.create_subscription("failing", "events", max_deliveries=1, backoff={"initial": 0, "cap": 0})
    client.create_subscription("paused", "orders", start_offset="latest")
    client.pause("paused")
    _take(client, "all", 100, lambda message: message.offset % 5 != 0)
    _take(client, "failing", 41, lambda message: message.offset % 10 != 0)
    wait_until(lambda: _is_saved(data_dir, "failing"))
    client.purge_dead_letters("failing", [client.dead_letters("failing")[1]["number"]])


def _is_saved(data_dir: Path, subscription: str) -> bool:
    """Say whether the cursor is durable; until then a kill would bring dead letters again."""
    cursor = read_metadata(data_dir).get(f"cursor/{subscription}/0")
    return cursor is not None and cursor.data.endswith(b'"next":41,"open":[]}')


def _are_noted(client: BrokerClient, data_dir: Path) -> bool:
    """Say whether the ends of all logs are noted; what is stored in the last second before a kill is not."""
    noted, logs = read_metadata(data_dir), [("orders", 0), ("orders", 1), ("orders", 2), ("events", 0), ("short", 0)]
    extents = [noted.get(key_of(topic, partition)) for topic, partition in logs]
    ends = [client.offsets(topic, partition).next for topic, partition in logs]
    return all(extent and decode(extent.data)[1] == end for extent, end in zip(extents, ends, strict=True))


def _take(client: BrokerClient, subscription: str, count: int, succeeds: Callable[[Message], bool]) -> None:
    """Handle at least so many messages, some of which fail."""
    handled: list[int] = []
    enough = threading.Event()

    def handle(message: Message) -> None:
        handled.append(message.offset)
        if len(handled) >= count:
            enough.set()
        if not succeeds(message):
            raise ValueError("this one fails")

    log = logging.getLogger("qb.client")
    log.disabled = True  # each failure would be logged
    try:
        subscriber = client.subscribe_to_subscription(subscription, handle)
        assert enough.wait(PATIENCE)
        subscriber.unsubscribe()
    finally:
        log.disabled = False


def _stage(client: BrokerClient, transaction: str, number: int | None, *, commit: bool) -> None:
    """Stage messages for several partitions, and commit them."""
    stage = client.begin_transaction(transaction, number)
    assert stage is not None
    for partition in range(3):
        for part in range(4):
            bodies = [f"{transaction} {partition} {part} {one} ".encode() * 12 for one in range(3)]
            frames = b"".join([encode_frame(MessageType.DATA, 0, 0, {"topic": "orders"}, body) for body in bodies])
            stage.add("orders", partition, frames, len(bodies))
    stage.finish()
    if commit:
        client.commit_transaction(transaction, [(stage.stage_id, stage.messages)], number)
