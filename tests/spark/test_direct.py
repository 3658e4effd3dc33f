"""`spark.read.format("qb").load(data_dir)`: the files of a stopped broker, read directly, every batch proved."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import PySparkException

from pyspark_qb.arrow.bounds import Bounds
from pyspark_qb.options.spark_errors import BadOption, DirectoryInUse
from pyspark_qb.options.spark_options import source_options
from pyspark_qb.read.directory_logs import DirectoryLogs
from pyspark_qb.read.query_offsets import OffsetRange, TopicPartition, split
from qb import BrokerClient
from qb.clients.protocol.fetch_requests import PartitionExtent
from qb.core.wire.errors import LogDamaged
from qb.storage.stages.transaction_records import ReservedPartition, TransactionRecord
from tests.spark.source_tools import bodies, values
from tests.support.stores import edit_metadata
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.support.brokers import BrokerProcess

pytestmark = [pytest.mark.spark, pytest.mark.process, pytest.mark.timeout(180)]
WHERE = TopicPartition("events", 0)
SMALL = {"segment_bytes": 20_000}


def opened(data_dir: Path, **options: str) -> DirectoryLogs:
    return DirectoryLogs(source_options({"path": str(data_dir), "subscribe": "events"} | options))


def read(data_dir: Path, start: int = 0, end: int | None = None, rows_each: int = 10**9) -> list[Any]:
    """Return the values that tasks would read of one partition, in slices of so many rows."""
    logs = opened(data_dir)
    first, last = logs.extents()[WHERE]
    whole = OffsetRange(WHERE, max(start, first), last if end is None else end)
    found = []
    for each in logs.slices(split([whole], rows_each)):
        for batch in each.read(("offset", "value"), Bounds()):
            found += [(row["offset"], row["value"]) for row in batch.to_pylist()]
    return found


@pytest.fixture
def stopped(start_broker: Callable[..., BrokerProcess]) -> Callable[..., Path]:
    """Makes data directories: what is given is published in calls of its own, then the broker stops."""

    def make(*calls: list[bytes], kill: bool = False, **settings: object) -> Path:
        broker = start_broker(**settings)
        with BrokerClient(port=broker.port) as client:
            client.create_topic("events")
            for each in calls:
                client.publish_many("events", each)
        broker.kill() if kill else broker.stop()
        return broker.data_dir

    return make


def logs_in(data_dir: Path) -> list[Path]:
    return sorted((data_dir / "topics/events/0").glob("*.log"))


def test_spark_reads_the_files_of_a_stopped_broker(
    spark: SparkSession, start_broker: Callable[..., BrokerProcess]
) -> None:
    broker = start_broker(**SMALL)
    with BrokerClient(port=broker.port) as client:
        client.create_topic("events", 2)
        client.create_topic(".hidden")
        client.publish_many("events", bodies(5000), partition=0)
        client.publish_many("events", bodies(5000, 5010), partition=1)
        client.publish("events", b"9999", partition=1, key="k", timestamp_ms=1_700_000_000_000, color="red")
        client.publish(".hidden", b"1")
    reader = spark.read.format("qb").option("subscribe", "events")
    with pytest.raises(PySparkException, match=r"a broker is running in .* option servers, or stop it, or read a copy"):
        reader.load(str(broker.data_dir)).collect()
    broker.stop()
    frame = reader.load(str(broker.data_dir))
    assert values(frame.collect()) == [*range(5010), 9999]
    (last,) = frame.where("key = 'k'").collect()
    assert (last["partition"], last["offset"], last["properties"]) == (1, 10, {"color": "red"})
    hidden = spark.read.format("qb").options(path=str(broker.data_dir), subscribePattern="[.]h.*")
    assert values(hidden.load().collect()) == [1]
    with pytest.raises(PySparkException, match=r"has no topic 'evnets'; it has: \.hidden, events"):
        reader.option("subscribe", "evnets").load(str(broker.data_dir)).collect()


def test_every_slice_of_every_segment_is_read_once(stopped: Callable[..., Path]) -> None:
    sent = [b"%d" % number + b"." * (number % 300) for number in range(3000)]
    calls = [sent[:500], sent[500:501], *(sent[start : start + 333] for start in range(501, 3000, 333))]
    data_dir = stopped(*calls, segment_bytes=60_000)
    assert len(logs_in(data_dir)) > 3
    expected = [*enumerate(sent)]
    assert opened(data_dir).extents() == {WHERE: PartitionExtent(0, 3000)}
    assert read(data_dir) == expected
    for rows_each in (1000, 333, 97):
        assert read(data_dir, rows_each=rows_each) == expected
    assert read(data_dir, 499, 1502, rows_each=250) == expected[499:1502]
    assert read(data_dir, 777, 778) == expected[777:778]


def test_a_batch_larger_than_a_window_is_read(stopped: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyspark_qb.read.segment_reader.WINDOW_BYTES", 700)
    monkeypatch.setattr("pyspark_qb.read.segment_reader.WINDOW_ENTRIES", 3)
    sent = bodies(2000) + [b"x" * 5000] + bodies(10)
    data_dir = stopped(sent)
    assert read(data_dir) == [*enumerate(sent)]
    assert read(data_dir, rows_each=600) == [*enumerate(sent)]


@pytest.mark.parametrize("change", ["missing", "short", "long", "shifted", "zeros", "garbage", "times"])
def test_an_index_is_only_a_hint(stopped: Callable[..., Path], change: str) -> None:
    data_dir = stopped(*(bodies(start, start + 500) for start in (0, 500, 1000)), bodies(1500, 1520), **SMALL)
    expected = [(number, b"%d" % number) for number in range(1520)]
    assert len(logs_in(data_dir)) > 2
    for log in logs_in(data_dir):
        index = log.with_suffix(".idx")
        entries = index.read_bytes()
        changed = {
            "missing": b"",
            "short": entries[: len(entries) // 32 * 16 + 5],
            "long": entries + entries[-16:],
            "shifted": entries[16:] + entries[:16],
            "zeros": bytes(len(entries)),
            "garbage": random.Random(7).randbytes(len(entries)),
            "times": b"".join(entries[at : at + 8] + bytes(8) for at in range(0, len(entries), 16)),
        }[change]
        index.write_bytes(changed)
        if change == "missing":
            index.unlink()
    assert read(data_dir) == expected
    assert read(data_dir, 700, 1510, rows_each=100) == expected[700:1510]
    assert opened(data_dir).at_time(WHERE, 0) == 0
    assert opened(data_dir).at_time(WHERE, 2**50) == 1520


def test_after_kill_9_everything_acked_is_read(stopped: Callable[..., Path]) -> None:
    data_dir = stopped(bodies(300), *([b"%d" % number] for number in range(300, 340)), kill=True)
    assert read(data_dir) == [(number, b"%d" % number) for number in range(340)]


def test_a_torn_tail_is_left_out_wherever_it_is_torn(stopped: Callable[..., Path]) -> None:
    data_dir = stopped(bodies(40), bodies(40, 43))
    (log,) = logs_in(data_dir)
    whole = log.read_bytes()
    ends = [len(read(_cut(data_dir, log, whole[:size]))) for size in range(len(whole) - 196, len(whole) + 1, 7)]
    assert set(ends) == {40, 43}
    assert ends == sorted(ends)


def _cut(data_dir: Path, log: Path, content: bytes) -> Path:
    log.write_bytes(content)
    return data_dir


def test_a_segment_that_was_never_finished_is_left_out(stopped: Callable[..., Path]) -> None:
    data_dir = stopped(bodies(10))
    (log,) = logs_in(data_dir)
    log.with_name(f"{10:020}.log").write_bytes(b"")
    assert read(data_dir) == [(number, b"%d" % number) for number in range(10)]
    log.write_bytes(b"")
    log.with_name(f"{10:020}.log").unlink()
    with pytest.raises(LogDamaged, match="the segment is empty"):
        opened(data_dir).extents()


@pytest.mark.parametrize("segment", [0, 1, -1])
def test_damage_is_an_error_that_names_file_and_position(stopped: Callable[..., Path], segment: int) -> None:
    calls = [bodies(number, number + 100) for number in range(0, 1500, 100)]
    data_dir = stopped(*calls, **SMALL)
    log = logs_in(data_dir)[segment]
    content = bytearray(log.read_bytes())
    content[len(content) // 3] ^= 0x40
    log.write_bytes(content)
    with pytest.raises(LogDamaged) as damage:
        read(data_dir)
    assert damage.value.file == str(log)
    assert 0 < damage.value.position <= len(content) // 3


def test_a_closed_segment_that_is_cut_short_is_damage(stopped: Callable[..., Path]) -> None:
    calls = [bodies(number, number + 100) for number in range(0, 1500, 100)]
    data_dir = stopped(*calls, **SMALL)
    log = logs_in(data_dir)[0]
    log.write_bytes(log.read_bytes()[:-3])
    with pytest.raises(LogDamaged):
        read(data_dir)


def test_a_time_finds_the_first_message_appended_then(start_broker: Callable[..., BrokerProcess]) -> None:
    broker = start_broker(segment_bytes=2_000)
    times: list[int] = []
    with BrokerClient(port=broker.port) as client:
        client.create_topic("events")
        for _ in range(30):
            times.append(client.publish("events", b"x" * 100).timestamp)
            wait_until(lambda: client.publish("events", b"y").timestamp > times[-1])
        held = client.offsets("events").next
        expected = {time: client.offset_for_time("events", 0, time) for time in times}
        broker.stop()
    logs = opened(broker.data_dir)
    assert {time: logs.at_time(WHERE, time) for time in times} == expected
    assert logs.at_time(WHERE, times[-1] + 10**6) == held
    for log in logs_in(broker.data_dir):
        log.with_suffix(".idx").unlink()
    logs = opened(broker.data_dir)
    assert {time: logs.at_time(WHERE, time) for time in times} == expected


def test_a_transaction_that_was_not_finished_is_not_seen(stopped: Callable[..., Path]) -> None:
    data_dir = stopped(bodies(10))
    decision = TransactionRecord(transaction="t", number=None, partitions=[ReservedPartition("events", 0, 6, 4)])
    edit_metadata(data_dir, {decision.key: decision})
    assert opened(data_dir).extents() == {WHERE: PartitionExtent(0, 6)}
    assert [offset for offset, _ in read(data_dir)] == [*range(6)]


def test_nothing_is_written_and_a_copy_is_as_good(stopped: Callable[..., Path], tmp_path: Path) -> None:
    data_dir = stopped(bodies(50))
    copy = tmp_path / "copy"
    shutil.copytree(data_dir, copy)
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*")}
    assert len(read(copy)) == 50
    assert {path: path.stat().st_mtime_ns for path in copy.rglob("*")} == before


def test_only_a_data_directory_without_a_broker_is_opened(tmp_path: Path, broker: BrokerProcess) -> None:
    with pytest.raises(BadOption, match="is no data directory"):
        opened(tmp_path)
    with pytest.raises(DirectoryInUse):
        opened(broker.data_dir)
    broker.stop()
    (broker.data_dir / "format").write_text("qb-storage 99\n")
    with pytest.raises(BadOption, match="version 99"):
        opened(broker.data_dir)
