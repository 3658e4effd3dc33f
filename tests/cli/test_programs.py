"""Programs that a YAML file configures: `qb produce`, `qb consume`, `qb run`, `qb-server --config`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from qb import AsyncConsumer, AsyncProducer, BrokerClient, Consumer, Message, Producer, UnknownPartition
from qb.core.settings import PROGRAM_TABLE, SettingsError, program_config
from qb.testing.running_broker import RunningBroker
from tests.support.brokers import ROOT, BrokerProcess
from tests.support.commands import Run, start_process
from tests.support.counting_proxy import CountingProxy
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(60)
CONFIG = ROOT / "config"
PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


@pytest.fixture
def orders(qb_client: BrokerClient) -> BrokerClient:
    qb_client.create_topic("orders", partitions=2)
    return qb_client


def written(directory: Path, broker: RunningBroker, text: str) -> str:
    """Write a file with a section `broker` and this text; returns its path."""
    path = directory / "program.yaml"
    path.write_text(f"broker: {{address: '{broker.address}'}}\n{text}")
    return str(path)


def bodies(client: BrokerClient, topic: str = "orders", partitions: int = 2) -> list[bytes]:
    return [each.body for number in range(partitions) for each in client.fetch(topic, number, 0)]


# --- the file ---


@pytest.mark.parametrize("name", ["producer.yaml", "consumer.yaml", "example-full.yaml"])
def test_the_commented_examples_are_taken(name: str) -> None:
    config = program_config(str(CONFIG / name))
    assert config.broker.address
    assert config.producer.topic or config.consumer.topic


def test_the_full_example_names_every_key_but_those_that_exclude_others() -> None:
    text = (CONFIG / "producer.yaml").read_text() + (CONFIG / "consumer.yaml").read_text()
    missing = [row.name for row in PROGRAM_TABLE if not re.search(rf"^  (?:# )?{row.name.split('.')[1]}:", text, re.M)]
    assert missing == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "producer:\n  topic: t\n  batch_size: many\n",
            "producer.batch_size: must be a whole number (1 to 1000000), not 'many' (from file {}, line 3)",
        ),
        (
            "\nconsumer:\n  ofset: 3\n",
            "consumer.ofset: unknown setting in file {}, line 3; did you mean consumer.offset?",
        ),
        ("# a\nbrokr: {}\n", "brokr: unknown section in file {}, line 2; did you mean broker?"),
        (
            "broker:\n  address: http://h:1\n",
            "broker.address: must be an address such as host:9999 or qb://host:9999, not 'http://h:1' "
            "(from file {}, line 2)",
        ),
        (
            "producer: {required_acks: 2}\n",
            "producer.required_acks: must be one of 0, 1, all, not 2 (from file {}, line 1)",
        ),
        (
            "consumer: {offset: -3}\n",
            "consumer.offset: must be a whole number (at least -2), not -3 (from file {}, line 1)",
        ),
        ("server: {port: no}\n", "server.port: must be a whole number (0 to 65535), not False (from file {}, line 1)"),
        ("producer: [a]\n", "producer: must be settings by name, not ['a'] (from file {}, line 1)"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_file_line_key_and_reason(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(text)
    with pytest.raises(SettingsError) as refused:
        program_config(str(tmp_path / "p.yaml"))
    assert str(refused.value) == says.replace("{}", str(tmp_path / "p.yaml"), 1)


def test_a_file_that_cannot_be_read_is_named_by_the_flag_or_by_the_argument(offline: Run) -> None:
    assert "(from --config) cannot be read: No such" in offline("produce", "--config", "none.yaml").err
    with pytest.raises(SettingsError, match=r"\(from the argument path\) cannot be read: No such"):
        Producer.from_config("none.yaml")


def test_what_a_program_cannot_do_without_is_named(offline: Run) -> None:
    assert offline("produce").err == "qb: producer.topic is missing: set it in the file of --config, or give --topic\n"
    assert "consumer.topic is missing" in offline("consume").err
    assert "consumer.group_id is missing" in offline("consume", "--topic", "t").err


# --- produce ---


@pytest.mark.process
def test_produce_sends_lines_with_keys_as_the_file_says_and_flags_win(
    orders: BrokerClient, qb_broker: RunningBroker, tmp_path: Path, offline: Run
) -> None:
    config = written(tmp_path, qb_broker, "producer: {topic: nothing, batch_size: 2, partition: 1}\n")
    (tmp_path / "lines").write_text("a=one\nb=two\nthree\n")
    flags = ("--file", str(tmp_path / "lines"), "--key-separator", "=")
    done = offline("produce", "--config", config, "--topic", "orders", *flags)
    assert done == (0, "stored 3 messages in topic 'orders'\n", "")
    assert [(each.key, each.body) for each in orders.fetch("orders", 1, 0)] == [
        ("a", b"one"),
        ("b", b"two"),
        (None, b"three"),
    ]


@pytest.mark.process
def test_produce_sends_whole_files(
    orders: BrokerClient, qb_broker: RunningBroker, tmp_path: Path, offline: Run
) -> None:
    (tmp_path / "one").write_bytes(b"1\n2\n")
    (tmp_path / "two").write_bytes(b"3")
    files = ("--file", str(tmp_path / "one"), "--file", str(tmp_path / "two"))
    argv = ("--broker", qb_broker.address, "--topic", "orders", "--partition", "0", "--whole", *files)
    assert offline("produce", *argv).code == 0
    assert bodies(orders) == [b"1\n2\n", b"3"]


@pytest.mark.process
def test_a_rate_holds_messages_back(
    orders: BrokerClient, qb_broker: RunningBroker, tmp_path: Path, offline: Run
) -> None:
    (tmp_path / "lines").write_text("x\n" * 5)
    argv = ("--broker", qb_broker.address, "--topic", "orders", "--partition", "0", "--rate", "20")
    started = time.monotonic()
    assert offline("produce", *argv, "--file", str(tmp_path / "lines")).code == 0
    assert time.monotonic() - started >= 0.2, "five messages at twenty a second take four twentieths of a second"
    assert len(orders.fetch("orders", 0, 0)) == 5


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_producer_when_what_it_read_is_stored(
    orders: BrokerClient, qb_broker: RunningBroker, number: signal.Signals
) -> None:
    argv = ("produce", "--broker", qb_broker.address, "--topic", "orders", "--partition", "0")
    with start_process(*argv, **PIPES) as process:
        assert process.stdin is not None
        process.stdin.write(b"one\n")
        process.stdin.flush()
        assert orders.fetch("orders", 0, 0, max_wait=30)[0].body == b"one"
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (0, b"stored 1 message in topic 'orders'\n", b"")


@pytest.mark.process
def test_a_producer_says_what_is_stored_when_it_fails(qb_broker: RunningBroker, tmp_path: Path, offline: Run) -> None:
    (tmp_path / "lines").write_text("x\n")
    argv = ("--broker", qb_broker.address, "--topic", "nowhere", "--file", str(tmp_path / "lines"))
    code, _, err = offline("produce", *argv)
    assert code == 1
    assert "there is no topic 'nowhere'" in err
    assert err.endswith("known to be stored: 0 messages\n")


@pytest.mark.process
def test_required_acks_0_does_not_wait_and_says_so(
    orders: BrokerClient, qb_broker: RunningBroker, tmp_path: Path, offline: Run
) -> None:
    (tmp_path / "lines").write_text("one\ntwo\n")
    argv = ("--broker", qb_broker.address, "--topic", "orders", "--partition", "0", "--required-acks", "0")
    done = offline("produce", *argv, "--file", str(tmp_path / "lines"))
    assert done == (0, "sent, without waiting for acks, 2 messages in topic 'orders'\n", "")
    wait_until(lambda: bodies(orders) == [b"one", b"two"])


@pytest.mark.process
def test_lines_that_come_within_the_flush_interval_are_sent_at_once(
    orders: BrokerClient, qb_broker: RunningBroker, tmp_path: Path, offline: Run
) -> None:
    (tmp_path / "lines").write_text("x\n" * 8)
    argv = ("--broker", qb_broker.address, "--topic", "orders", "--batch-size", "4", "--flush-interval-ms", "600000")
    assert offline("produce", *argv, "--file", str(tmp_path / "lines")).code == 0
    assert [len(orders.fetch("orders", number, 0)) for number in (0, 1)] == [4, 4], "a batch for each partition"


@pytest.mark.process
def test_a_broker_that_is_killed_in_the_middle_costs_and_doubles_no_line(broker: BrokerProcess, tmp_path: Path) -> None:
    lines = [b"%d" % number for number in range(20_000)]
    argv = ("produce", "--broker", f"127.0.0.1:{broker.port}", "--topic", "t", "--batch-size", "100")
    with BrokerClient(port=broker.port) as client, start_process(*argv, **PIPES) as process:
        client.create_topic("t")
        assert process.stdin is not None
        process.stdin.write(b"\n".join(lines[:10_000]) + b"\n")
        process.stdin.flush()
        wait_until(lambda: client.describe_topic("t").messages > 1000)
        broker.restart()
        out, err = process.communicate(b"\n".join(lines[10_000:]) + b"\n", timeout=30)
        assert (process.returncode, out) == (0, b"stored 20,000 messages in topic 't'\n"), err
        assert [each.body for each in client.fetch("t", max_messages=30_000, max_bytes=1 << 24)] == lines


# --- consume ---


@pytest.mark.process
def test_consume_prints_topic_partition_offset_and_value_and_goes_on_where_it_was(
    orders: BrokerClient, qb_broker: RunningBroker, tmp_path: Path, offline: Run
) -> None:
    orders.publish_many("orders", [b"one", b"two", b"three"], partition=1)
    config = written(tmp_path, qb_broker, "consumer: {topic: orders, group_id: g, max_wait_ms: 100}\n")
    assert offline("consume", "--config", config, "--count", "2").out == "[orders:1:0] one\n[orders:1:1] two\n"
    assert offline("consume", "--config", config, "--count", "1", "--format", "{value}!").out == "three!\n"


@pytest.mark.process
def test_consume_takes_one_partition_from_an_offset_and_commits_for_its_group(
    orders: BrokerClient, qb_broker: RunningBroker, tmp_path: Path, offline: Run
) -> None:
    orders.publish_many("orders", [b"%d" % number for number in range(5)], partition=1)
    config = written(tmp_path, qb_broker, "consumer: {topic: orders, partition: 1, group_id: g, offset: 2}\n")
    assert offline("consume", "--config", config, "--count", "2").out == "[orders:1:2] 2\n[orders:1:3] 3\n"
    assert [each["offset"] for each in orders.committed_offsets("g", "orders")] == [4]
    assert offline("consume", "--config", config, "--count", "1").out == "[orders:1:4] 4\n"
    assert offline("consume", "--config", config, "--group", "h", "--auto-commit", "no", "--count", "1").out != ""
    assert list(orders.committed_offsets("h", "orders")) == []


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("partition", ["", ", partition: 0"])
def test_a_signal_ends_a_consumer_that_commits_what_it_printed(
    orders: BrokerClient, qb_broker: RunningBroker, tmp_path: Path, number: signal.Signals, partition: str
) -> None:
    orders.publish("orders", b"tea", partition=0)
    config = written(tmp_path, qb_broker, f"consumer: {{topic: orders, group_id: g{partition}}}\n")
    with start_process("consume", "--config", config, **PIPES) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"[orders:0:0] tea\n"
        process.send_signal(number)
        assert process.wait(timeout=30) == 0
    assert [each["offset"] for each in orders.committed_offsets("g", "orders") if each["partition"] == 0] == [1]


# --- one program for all roles, and the library ---


@pytest.mark.process
def test_one_program_is_a_broker_a_producer_and_a_consumer_by_the_full_example(tmp_path: Path) -> None:
    config = ["--config", str(CONFIG / "example-full.yaml")]
    with start_process("run", "--mode", "broker", *config, "--broker", "127.0.0.1:0", cwd=tmp_path, **PIPES) as broker:
        try:
            assert broker.stdout is not None
            found = re.search(rb"listens on (\S+:\d+)", broker.stdout.readline())
            assert found
            address = ["--broker", found[1].decode()]
            with start_process("run", "--mode", "producer", *config, *address, **PIPES) as producer:
                out, err = producer.communicate(b"one\ntwo\n", timeout=30)
            assert (producer.returncode, out) == (0, b"stored 2 messages in topic 'events'\n"), err
            with start_process("run", "--mode", "consumer", *config, *address, **PIPES) as consumer:
                assert consumer.stdout is not None
                assert [consumer.stdout.readline() for _ in range(2)] == [b"[events:0:0] one\n", b"[events:0:1] two\n"]
                consumer.terminate()
                assert consumer.wait(timeout=30) == 0
        finally:
            broker.terminate()
        assert broker.wait(timeout=30) == 0
        assert (tmp_path / "storage/data").is_dir()


@pytest.mark.process
def test_the_examples_of_a_broker_a_producer_and_a_consumer_work_with_each_other(tmp_path: Path) -> None:
    ports = [word for door in ("", "json-", "http-") for word in (f"--{door}port", "0")]
    server = [sys.executable, str(ROOT / "server.py"), "--config", str(CONFIG / "broker.yaml"), *ports]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("QB_")}
    with subprocess.Popen(server, env=kept, cwd=tmp_path, **PIPES) as broker:
        try:
            assert broker.stdout is not None
            found = re.search(rb"listens on (\S+:\d+)", broker.stdout.readline())
            assert found
            address = ["--broker", found[1].decode()]
            with BrokerClient(found[1].decode()) as client:
                client.create_topic("orders")
            argv = ["produce", "--config", str(CONFIG / "producer.yaml"), *address]
            with start_process(*argv, **PIPES) as producer:
                out, err = producer.communicate(b"one\ntwo\n", timeout=30)
            assert (producer.returncode, out) == (0, b"stored 2 messages in topic 'orders'\n"), err
            argv = ["consume", "--config", str(CONFIG / "consumer.yaml"), *address, "--count", "2"]
            with start_process(*argv, **PIPES) as consumer:
                out, err = consumer.communicate(timeout=30)
            assert (consumer.returncode, out) == (0, b"[orders:0:0] one\n[orders:0:1] two\n"), err
        finally:
            broker.terminate()
        assert broker.wait(timeout=30) == 0


@pytest.mark.process
async def test_a_producer_of_the_library_takes_the_same_file(
    orders: BrokerClient, qb_broker: RunningBroker, tmp_path: Path
) -> None:
    config = written(tmp_path, qb_broker, "producer: {topic: orders, partition: 1, required_acks: 0, batch_size: 2}\n")
    with Producer.from_config(config) as producer:
        assert producer.send(b"tea").result(30).durability == "none"
    async with AsyncProducer.from_config(config) as asynchronous:
        assert (await asynchronous.send(b"milk")).partition == 1
    wait_until(lambda: [each.body for each in orders.fetch("orders", 1, 0)] == [b"tea", b"milk"])
    config = written(tmp_path, qb_broker, "producer: {topic: orders, flush_interval_ms: 3600000}\n")
    with Producer.from_config(config) as producer:
        handle = producer.send(b"waits")
        assert not handle.done()
    assert handle.result().durability == "fsynced"


def test_a_file_that_names_no_topic_is_refused_by_the_library(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("producer: {batch_size: 1}\n")
    with pytest.raises(ValueError, match=r"producer\.topic: is missing in file"):
        Producer.from_config(str(tmp_path / "p.yaml"))


@pytest.mark.process
def test_the_servers_example_is_taken_and_a_flag_wins_over_it(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "server.py"), "--config", str(CONFIG / "broker.yaml"), "--port", "0"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("QB_")}
    done = subprocess.run([*command, "--print-config"], env=kept, cwd=tmp_path, capture_output=True, text=True)
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()}
    assert rows["server.port"] == ["0", "flag", "--port"]
    assert rows["storage.data_dir"] == ["./storage/data", "file", str(CONFIG / "broker.yaml")]


@pytest.mark.process
async def test_a_consumer_of_the_library_takes_the_same_file(
    orders: BrokerClient, qb_broker: RunningBroker, tmp_path: Path
) -> None:
    orders.publish("orders", b"tea")
    seen: list[str] = []
    config = written(tmp_path, qb_broker, "consumer: {topic: orders, group_id: g, offset: -2, max_wait_ms: 100}\n")
    with Consumer.from_config(config, lambda message: (seen.append(message.text()), consumer.stop())) as consumer:
        consumer.run()

    async def handle(message: object) -> None:
        seen.append("async")
        asynchronous.stop()

    orders.publish("orders", b"milk")
    async with AsyncConsumer.from_config(config, handle) as asynchronous:
        await asynchronous.run()
    assert seen == ["tea", "async"]


@pytest.mark.process
async def test_a_consumer_of_the_library_takes_one_partition_alone(
    orders: BrokerClient, qb_broker: RunningBroker, tmp_path: Path
) -> None:
    orders.publish_many("orders", [b"a", b"b", b"c"], partition=1)
    orders.publish("orders", b"not this one", partition=0)
    text = "consumer: {topic: orders, group_id: g, partition: 1, offset: 1, max_wait_ms: 100}\n"
    config, seen = written(tmp_path, qb_broker, text), list[bytes]()
    with Consumer.from_config(config) as consumer, Consumer.from_config(config) as other:
        assert [each.body for each in consumer.poll(30)] == [b"b", b"c"]
        assert [each.body for each in other.poll(30)] == [b"b", b"c"], "it is not shared"
        assert consumer.assignment == [("orders", 1)]
        consumer.commit()
        assert [(each.partition, each.offset) for each in orders.committed_offsets("g", "orders")] == [(1, 3)]
        assert orders.describe_group("g")["members"] == []
    orders.publish("orders", b"d", partition=1)

    async def handle(message: Message) -> None:
        seen.append(message.body)
        asynchronous.stop()

    async with AsyncConsumer.from_config(config, handle) as asynchronous:
        await asynchronous.run()
    assert seen == [b"d"]
    assert [each.offset for each in orders.committed_offsets("g", "orders")] == [4], "committed on close"


@pytest.mark.process
def test_one_partition_alone_is_read_on_after_kill_9_of_the_broker(broker: BrokerProcess) -> None:
    with BrokerClient(port=broker.port) as client:
        client.create_topic("t", 2)
        client.publish("t", b"before", partition=1)
        with Consumer("g", "t", port=broker.port, partition=1, max_wait_ms=100) as consumer:
            messages = iter(consumer)
            assert next(messages).body == b"before"
            broker.restart()
            client.publish("t", b"after", partition=1)
            assert next(messages).body == b"after"
        assert [each.offset for each in client.committed_offsets("g")] == [1], "what was handled, not what is in hand"


def test_a_partition_that_is_not_there_is_raised(orders: BrokerClient, qb_broker: RunningBroker) -> None:
    with Consumer("g", "orders", port=qb_broker.port, partition=7) as consumer, pytest.raises(UnknownPartition):
        consumer.poll(30)
    with pytest.raises(ValueError, match="partition must be one of a single topic"):
        Consumer("g", ["a", "b"], partition=0)


def test_a_file_that_names_no_group_is_refused_by_the_library(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("consumer: {topic: orders}\n")
    with pytest.raises(ValueError, match=r"consumer\.group_id: is missing in file"):
        Consumer.from_config(str(tmp_path / "c.yaml"))


@pytest.mark.parametrize("by", ["flag", "file"])
def test_a_producer_that_compresses_sends_a_fraction_of_its_lines(
    orders: BrokerClient, qb_broker: RunningBroker, offline: Run, tmp_path: Path, by: str
) -> None:
    proxy = CountingProxy(qb_broker.port)
    lines = b"".join(b'{"order": %d, "item": "tea", "price": 4.5}\n' % number for number in range(2000))
    (tmp_path / "lines").write_bytes(lines)
    path = tmp_path / "producer.yaml"
    setting = ", compression: zstd" if by == "file" else ""
    path.write_text(f"broker: {{address: '127.0.0.1:{proxy.port}'{setting}}}\nproducer: {{topic: orders}}\n")
    flags = ["--compression", "zstd"] if by == "flag" else []
    assert offline("produce", "--config", str(path), "--file", str(tmp_path / "lines"), *flags).code == 0
    proxy.close()
    assert proxy.sent * 4 < len(lines)
    assert sum(each["messages"] for each in [orders.describe_topic("orders")]) == 2000


def test_a_compression_that_there_is_not_is_refused_by_name(offline: Run) -> None:
    failed = offline("produce", "--topic", "orders", "--compression", "gzip")
    assert failed.code == 2
    assert "--compression: must be one of zstd, lz4, not 'gzip'" in failed.err
