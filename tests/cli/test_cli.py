"""The command line as people and scripts meet it, against a real broker."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE

import pytest

from qb.cli.commands.topic_commands import parse_retention
from qb.cli.parser import GROUPS, overview, parse
from qb.cli.terminal.command import Command
from qb.cli.terminal.input_lines import PORTION_BYTES
from qb.clients.blocking.client import BrokerClient
from qb.core.wire.frames import Frame, MessageType, decode_frame, frame_length
from tests.support.brokers import BrokerProcess
from tests.support.commands import Done, Run, on_terminal, start_process
from tests.support.waiting import wait_until

COMMANDS = [command for _, commands in GROUPS for command in commands]


def wait_for_messages(port: int, topic: str, count: int) -> None:
    """Return when the broker has stored that many."""
    with BrokerClient(port=port) as client:
        wait_until(lambda: client.describe_topic(topic)["messages"] >= count)


def stored_frames(broker: BrokerProcess, topic: str) -> list[Frame]:
    """Return the messages that lie in the log of partition 0."""
    (file,) = (broker.data_dir / "topics" / topic / "0").glob("*.log")
    data = file.read_bytes()
    position, frames = 0, []
    while position < len(data) and frame_length(data, position):  # zeros are room that is kept ready
        frames.append(decode_frame(data, position))
        position += frame_length(data, position)
    return [frame for frame in frames if frame.type == MessageType.DATA]


def stored_bodies(broker: BrokerProcess, topic: str) -> list[bytes]:
    return [frame.body for frame in stored_frames(broker, topic)]


# --- topics ---


def test_a_topic_is_created_listed_described_and_deleted(qb: Run) -> None:
    assert qb("create-topic", "life", "--partitions", "2") == (0, "created topic 'life' with 2 partitions\n", "")
    listed = qb("list-topics")
    assert listed.out.splitlines()[0].split()[:2] == ["topic", "partitions"]
    assert ["life", "2"] in [line.split()[:2] for line in listed.out.splitlines()]
    assert qb("publish", "life", "hello", "--partition", "1").code == 0
    described = qb("describe-topic", "life").out.splitlines()
    assert ["messages", "1"] in [line.split() for line in described]
    assert [line.split()[:3] for line in described[-2:]] == [["0", "0", "0"], ["1", "0", "1"]]
    assert qb("delete-topic", "life", "--if-unused") == (0, "deleted topic 'life'\n", "")
    assert qb("describe-topic", "life").code == 1


def test_retention_is_kept_with_the_topic(qb: Run) -> None:
    created = qb("--json", "create-topic", "kept", "--retention", "7d", "--retention-bytes", "1GiB")
    assert json.loads(created.out)["retention_hours"] == 168
    described = json.loads(qb("describe-topic", "kept", "--json").out)
    assert (described["retention_hours"], described["retention_bytes"]) == (168, 2**30)
    assert ["kept", "1", "168", "1.0", "GiB"] in [line.split()[:5] for line in qb("list-topics").out.splitlines()]


@pytest.mark.parametrize(
    ("text", "hours"), [("168", 168), ("7d", 168), ("12h", 12), ("30m", 0.5), ("1.5D", 36), ("0", 0)]
)
def test_retention_is_hours_or_a_time_with_a_unit(text: str, hours: float) -> None:
    assert parse_retention(text) == hours


@pytest.mark.parametrize("text", ["", "7w", "-1", "d", "1e3", "nan"])
def test_a_retention_that_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_retention(text)


def test_a_list_without_topics_says_how_to_make_one(start_broker: Callable[..., BrokerProcess], offline: Run) -> None:
    port = str(start_broker().port)
    assert offline("--port", port, "list-topics").out == ("no topics yet; create one with: qb create-topic NAME\n")
    assert offline("--port", port, "--json", "list-topics").out == "[]\n"


# --- publishing ---


def test_a_message_is_stored_as_typed_with_its_key_partition_and_properties(
    qb: Run, topic: str, shared: BrokerProcess
) -> None:
    done = qb("publish", topic, "héllo", "--key", "k", "--properties", '{"source": "web", "try": 2, "hot": true}')
    assert done == (0, f"stored in {topic}/0 at offset 0 (fsynced)\n", "")
    (frame,) = stored_frames(shared, topic)
    assert frame.body == "héllo".encode()
    assert frame.properties == {"topic": topic, "key": "k", "source": "web", "try": "2", "hot": "true"}


def test_a_receipt_is_json_for_scripts(qb: Run, topic: str) -> None:
    receipt = json.loads(qb("publish", topic, "x", "--json").out)
    assert {name: receipt[name] for name in ("topic", "partition", "offset", "durability")} == {
        "topic": topic,
        "partition": 0,
        "offset": 0,
        "durability": "fsynced",
    }
    assert receipt["timestamp"] > 0


def test_bytes_that_are_not_text_are_published_as_typed(qb: Run, topic: str, shared: BrokerProcess) -> None:
    assert qb("publish", topic, os.fsdecode(b"\xff\x00\xfe")).code == 0
    assert stored_bodies(shared, topic) == [b"\xff\x00\xfe"]


@pytest.mark.parametrize(
    ("content", "bodies"),
    [
        (b"", []),
        (b"one\ntwo\n", [b"one", b"two"]),
        (b"no newline at the end", [b"no newline at the end"]),
        (b"\n\r\n\xff\x00\n", [b"", b"\r", b"\xff\x00"]),
        (b"".join(b"%d\n" % number for number in range(20_000)), [b"%d" % number for number in range(20_000)]),
    ],
    ids=["nothing", "lines", "open end", "odd bytes", "many"],
)
def test_every_line_of_a_file_is_one_message_byte_for_byte(
    content: bytes, bodies: list[bytes], qb: Run, topic: str, shared: BrokerProcess, tmp_path: Path
) -> None:
    file = tmp_path / "lines"
    file.write_bytes(content)
    done = qb("publish", topic, "--file", str(file), "--json")
    data = json.loads(done.out)
    assert (done.code, done.err) == (0, "")
    assert (data["topic"], data["messages"], data["bytes"]) == (topic, len(bodies), sum(map(len, bodies)))
    assert stored_bodies(shared, topic) == bodies


def test_lines_longer_than_one_read_stay_whole(qb: Run, topic: str, shared: BrokerProcess, tmp_path: Path) -> None:
    long = os.urandom(5 * PORTION_BYTES // 2).replace(b"\n", b"")
    file = tmp_path / "lines"
    file.write_bytes(b"\n".join([b"a", long, b"b", long]))
    assert qb("publish", topic, "--file", str(file)).code == 0
    assert stored_bodies(shared, topic) == [b"a", long, b"b", long]


def test_what_cannot_be_published_whole_says_how_far_it_got(
    qb: Run, topic: str, shared: BrokerProcess, tmp_path: Path
) -> None:
    file = tmp_path / "lines"
    file.write_bytes(b"one\ntwo\n" + bytes(17 * 2**20) + b"\nthree\n")
    done = qb("publish", topic, "--file", str(file))
    assert done.code == 1
    assert done.err.splitlines() == [
        f"qb: a body of {17 * 2**20} bytes is over this broker's limit of {2**24}",
        "qb: known to be stored: 2 messages; the first that is not: line 3",
    ]
    assert stored_bodies(shared, topic) == [b"one", b"two"]


def test_a_line_without_an_end_is_given_up_before_it_fills_memory(
    qb: Run, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qb.cli.terminal.input_lines.LONGEST_LINE", 2 * PORTION_BYTES)
    file = tmp_path / "lines"
    file.write_bytes(b"one\n")
    os.truncate(file, 5 * PORTION_BYTES)
    assert qb("publish", topic, "--file", str(file)).err.splitlines() == [
        f"qb: a line is longer than the {2 * PORTION_BYTES} bytes that any broker takes as one message",
        "qb: known to be stored: 1 message; the first that is not: line 2",
    ]


@pytest.mark.process
def test_lines_from_a_pipe_are_stored_as_they_come_and_an_interrupt_says_how_many(
    shared: BrokerProcess, topic: str
) -> None:
    process = start_process("--port", str(shared.port), "publish", topic, stdin=PIPE, stdout=PIPE, stderr=PIPE)
    assert process.stdin is not None
    process.stdin.write(b"one\ntwo\nthree\nnot yet a li")
    process.stdin.flush()
    wait_for_messages(shared.port, topic, 3)
    process.stdin.write(b"ne\nnot yet a li")
    process.stdin.flush()
    wait_for_messages(shared.port, topic, 4)  # a portion is sent after the ack of the one before it: three are acked
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (130, b"")
    assert err.decode().splitlines() in (
        ["qb: interrupted", "qb: known to be stored: 3 messages; the first that is not: line 4"],
        ["qb: interrupted", "qb: known to be stored: 4 messages; the first that is not: line 5"],  # its ack came too
    )


@pytest.mark.process
def test_a_broker_that_dies_in_the_middle_is_reported_with_what_it_had_stored(broker: BrokerProcess) -> None:
    with BrokerClient(port=broker.port) as client:
        client.create_topic("t")
    process = start_process(
        *("--port", str(broker.port), "--timeout", "0.5", "publish", "t"), stdin=PIPE, stdout=PIPE, stderr=PIPE
    )
    assert process.stdin is not None
    process.stdin.write(b"one\ntwo\n")
    process.stdin.flush()
    wait_for_messages(broker.port, "t", 2)
    broker.kill()
    out, err = process.communicate(b"three\n", timeout=20)
    assert (process.returncode, out) == (1, b"")
    lines = err.decode().splitlines()
    lost, *lines = lines
    assert lost.startswith("qb: lost the connection: ")
    assert len(lines) == 2
    assert lines[1] == "qb: known to be stored: 2 messages; the first that is not: line 3"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["x", "--file", "f"], "give either a MESSAGE or --file, not both"),
        (["x", "--properties", "[1]"], "must be a JSON object"),
        (["x", "--properties", "{"], "must be a JSON object"),
        (["x", "--properties", '{"data": "1"}'], "the name 'data' has a meaning of its own"),
        (["x", "--properties", '{"key": "1"}'], "the name 'key' has a meaning of its own"),
        (["x", "--partition", "-1"], "must be a whole number (at least 0), not '-1'"),
    ],
)
def test_a_publish_typed_wrongly_is_a_usage_error(argv: list[str], words: str, offline: Run) -> None:
    done = offline("publish", "t", *argv)
    assert (done.code, done.out) == (2, "")
    assert words in done.err


# --- the broker, and the data directory ---


def test_ping_prints_each_round_trip(qb: Run, shared: BrokerProcess) -> None:
    lines = qb("ping", "--count", "3").out.splitlines()
    assert len(lines) == 3
    assert all(line.startswith(f"127.0.0.1:{shared.port} answered in ") and line.endswith(" ms") for line in lines)
    assert len(json.loads(qb("ping", "--json").out)["round_trips_ms"]) == 1


def test_info_shows_what_the_broker_is(qb: Run) -> None:
    assert json.loads(qb("info", "--json").out)["durability"] == "fsynced"
    shown = qb("info").out
    assert ["durability", "fsynced"] in [line.split() for line in shown.splitlines()]
    assert re.search(r"^uptime +[\d,.]+ s$", shown, re.MULTILINE)


def test_bench_leaves_no_topic_behind(qb: Run) -> None:
    before = qb("--json", "list-topics").out
    done = qb("bench", "publish", "--count", "1000", "--json")
    data = json.loads(done.out)
    assert (data["count"], data["size"], data["depth"], data["connections"]) == (1000, 100, "many", 1)
    assert data["durability"] == "fsynced"
    assert data["messages_per_second"] > 0
    assert qb("--json", "list-topics").out == before


def test_bench_of_many_in_flight_measures_the_latency_one_at_a_time_afterwards_and_says_so(
    qb: Run, topic: str, shared: BrokerProcess
) -> None:
    argv = ("bench", "publish", "--count", "1000", "--connections", "2", "--topic", topic)
    data = json.loads(qb(*argv, "--json").out)
    assert 0 < data["latency_ms"]["p50"] <= data["latency_ms"]["p99"] <= data["latency_ms"]["max"]
    assert data["latency_of"] == "500 messages more, one at a time"
    assert len(stored_bodies(shared, topic)) == 1500
    assert qb(*argv).out.splitlines()[2].startswith("latency of 500 messages more, one at a time: p50 ")


def test_bench_one_at_a_time_over_several_connections_prints_percentiles(
    qb: Run, topic: str, shared: BrokerProcess
) -> None:
    argv = ("bench", "publish", "--depth", "1", "--count", "25", "--connections", "3", "--size", "1k", "--topic", topic)
    lines = qb(*argv).out.splitlines()
    assert lines[0] == "25 messages of 1,024 bytes, fsynced; 3 connections, 1 in flight"
    assert [word for word in lines[2].split() if word[0].isalpha()] == [
        "latency", "of", "all:", "p50", "ms,", "p90", "ms,", "p99", "ms,", "max", "ms"
    ]  # fmt: skip
    assert [len(body) for body in stored_bodies(shared, topic)] == [1024] * 25


@pytest.mark.process
def test_bench_leaves_no_topic_behind_when_it_is_interrupted(broker: BrokerProcess) -> None:
    argv = ("--port", str(broker.port), "bench", "publish", "--depth", "1", "--connections", "2", "--count", "10000000")
    with start_process(*argv, stdout=PIPE, stderr=PIPE) as process, BrokerClient(port=broker.port) as client:
        wait_until(client.list_topics)
        wait_for_messages(broker.port, client.list_topics()[0]["topic"], 10)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=20) == (b"", b"")
        assert process.returncode == 130
        assert client.list_topics() == []


def test_verify_proves_a_whole_directory_and_lists_what_it_cannot_prove(broker: BrokerProcess, offline: Run) -> None:
    with BrokerClient(port=broker.port) as client:
        client.create_topic("t")
        for body in (b"hello", b"again"):
            client.publish("t", body)
    broker.stop()
    data_dir = str(broker.data_dir)
    whole = offline("verify", data_dir)
    assert (whole.code, whole.err) == (0, "")
    assert whole.out.startswith(f"{data_dir} is whole; seen: 1 topic, 1 partition, 1 segment, 2 messages, ")
    (log,) = (broker.data_dir / "topics" / "t" / "0").glob("*.log")
    log.write_bytes(log.read_bytes().replace(b"hello", b"jello"))
    damaged = offline("verify", data_dir)
    assert (damaged.code, damaged.err) == (1, "")
    assert damaged.out.startswith(f"cannot be proved: {log}: byte ")
    report = offline("verify", data_dir, "--json")
    assert report.code == 1
    assert json.loads(report.out)["whole"] is False
    assert json.loads(report.out)["findings"][0]["file"] == str(log)


def test_repair_says_what_is_lost_changes_nothing_until_it_is_asked_to_and_then_the_broker_starts(
    broker: BrokerProcess, offline: Run
) -> None:
    with BrokerClient(port=broker.port) as client:
        client.create_topic("t")
        client.create_subscription("billing", "t")
        client.create_subscription("mail", "t")  # behind it: a last change would be a torn tail
        client.publish("t", b"hello")
    in_use = offline("repair", str(broker.data_dir))
    assert in_use.code == 1
    assert "is in use by another process" in in_use.err
    broker.kill()
    data_dir = str(broker.data_dir)
    for path in broker.data_dir.glob("metadata*/*.log"):
        path.write_bytes(path.read_bytes().replace(b"subscription/billing", b"subscription/bilking"))
    before = {path: path.read_bytes() for path in broker.data_dir.rglob("*.log")}
    asked = offline("repair", data_dir)
    assert (asked.code, asked.err) == (1, "")
    assert "subscription/bilking" in asked.out
    assert asked.out.rstrip().endswith(f"qb repair {data_dir} --yes")
    assert {path: path.read_bytes() for path in broker.data_dir.rglob("*.log")} == before
    done = offline("repair", data_dir, "--yes", "--json")
    assert done.code == 0
    assert json.loads(done.out)["plan"]["legible"] == ["subscription/bilking"]
    assert offline("verify", data_dir).code == 0
    assert "nothing is to be repaired" in offline("repair", data_dir).out
    broker.start()
    with BrokerClient(port=broker.port) as client:
        assert client.offsets("t").next == 1
        assert [each["subscription_id"] for each in client.list_subscriptions()] == ["mail"]


def test_verify_of_no_directory_is_refused(offline: Run, tmp_path: Path) -> None:
    done = offline("verify", str(tmp_path / "missing"))
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("qb: ")
    assert "missing" in done.err


# --- flags, failures and exit codes ---


def test_the_flags_for_every_command_work_before_and_after_it(offline: Run, shared: BrokerProcess) -> None:
    port = str(shared.port)
    for argv in (
        ["--port", port, "--json", "ping"],
        ["ping", "--port", port, "--json"],
        ["--json", "ping", "--host", "127.0.0.1", f"--port={port}", "--client-id", "me", "--timeout", "5"],
        ["--port", "1", "ping", "--port", port, "--json"],
        ["--json", "ping", "--host", f"127.0.0.1:{port}"],
        ["--json", "ping", "--host", f"qb://127.0.0.1:{port}/"],
    ):
        done = offline(*argv)
        assert done.code == 0, done.err
        assert json.loads(done.out)["address"] == f"127.0.0.1:{port}"
    in_the_middle = offline("bench", "--port", port, "--json", "publish", "--count", "1")
    assert json.loads(in_the_middle.out)["count"] == 1


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--host", "h:1", "--port", "2"], "'h:1' has a port already: leave --port away"),
        (
            ["--host", "http://h"],
            "'http://h' is no address of a broker: write host, host:port, qb://host:port or qbs://host:port",
        ),
    ],
)
def test_an_address_that_makes_no_sense_is_refused_in_words_of_flags(offline: Run, argv: list[str], line: str) -> None:
    assert offline(*argv, "ping") == (2, "", f"qb: {line}\n")


@pytest.mark.parametrize("host", ["::1", "[::1]:1", "qb://[::1]:1"])
def test_an_ipv6_address_keeps_its_colons(offline: Run, host: str) -> None:
    port = ["--port", "1"] if host == "::1" else []
    assert "[::1]:1" in offline("--host", host, *port, "ping").err


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["describe-topic", "x"], "there is no topic 'x'; create it with: qb create-topic x"),
        (["publish", "x", "m"], "there is no topic 'x'; create it with: qb create-topic x"),
        (["publish", "one", "m", "--partition", "7"], "topic 'one' has no partition 7; it has 0"),
        (["create-topic", "one"], "topic 'one' exists already"),
        (["publish", "one", "--file", "/nowhere"], "/nowhere: No such file or directory"),
    ],
)
def test_a_refusal_is_one_line_on_standard_error(argv: list[str], line: str, qb: Run) -> None:
    qb("create-topic", "one")
    assert qb(*argv) == (1, "", f"qb: {line}\n")


def test_a_missing_broker_is_reported_at_once(offline: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    done = offline("--port", str(port), "list-topics")
    assert (done.code, done.out) == (1, "")
    assert done.err == f"qb: nothing listens on 127.0.0.1:{port}; start the broker with: qb-server\n"


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["create-topic"], "the following arguments are required: TOPIC"),
        (
            ["create-topic", "t", "--partitions", "0"],
            "argument --partitions: must be a whole number (at least 1), not '0'",
        ),
        (["create-topic", "t", "--part", "2"], "unrecognized arguments: --part 2"),
        (["create-topic", "t", "--partiton", "2"], "unrecognized arguments: --partiton 2; did you mean --partitions?"),
        (["groups", "lst"], "there is no command 'lst'; did you mean list?"),
        (["--port", "0", "ping"], "argument --port: must be a whole number (1 to 65535), not '0'"),
        (["bench"], "the following arguments are required: COMMAND"),
    ],
)
def test_a_usage_error_is_two_lines_and_exit_code_2(argv: list[str], line: str, offline: Run) -> None:
    done = offline(*argv)
    assert (done.code, done.out) == (2, "")
    assert done.err.splitlines()[0] == f"qb: {line}"
    assert done.err.splitlines()[1].startswith("qb: see: client.py")
    assert len(done.err.splitlines()) == 2


def test_an_unknown_command_is_answered_with_the_one_that_is_meant(offline: Run) -> None:
    done = offline("create-topc", "t")
    assert (done.code, done.out) == (2, "")
    assert done.err.splitlines()[0] == "qb: there is no command 'create-topc'; did you mean create-topic?"


def test_an_unknown_command_that_is_like_no_other_is_answered_with_all_of_them(offline: Run) -> None:
    done = offline("wxyz")
    assert done.code == 2
    assert "there is no command 'wxyz'" in done.err
    assert all(command.name.split()[0] in done.err for command in COMMANDS)


def test_a_mistyped_variable_stops_a_command_but_not_its_help(offline: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QB_SERVER_PROT", "1")
    assert offline("ping") == (
        2,
        "",
        "qb: QB_SERVER_PROT: unknown setting in the environment; did you mean QB_SERVER_PORT?\n",
    )
    assert offline("ping", "--help").code == 0


def test_a_fault_of_ours_is_two_lines_and_a_traceback_only_on_request(qb: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: BrokerClient) -> float:
        raise ZeroDivisionError("on\ntwo lines")

    monkeypatch.setattr(BrokerClient, "ping", fail)
    assert qb("ping") == (
        1,
        "",
        "qb: unexpected ZeroDivisionError: on two lines\nqb: set QB_DEBUG=1 for the traceback\n",
    )
    monkeypatch.setenv("QB_DEBUG", "1")
    done = qb("ping")
    assert (done.code, done.out) == (1, "")
    assert "Traceback" in done.err


def test_an_interrupt_is_exit_code_130_without_words(qb: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: BrokerClient) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(BrokerClient, "ping", interrupt)
    assert qb("ping") == (130, "", "")


# --- help ---


def test_without_a_command_the_overview_names_every_command(offline: Run) -> None:
    page = overview("client.py") + "\n"
    assert offline() == (0, page, "")
    assert offline("--help") == (0, page, "")
    for command in COMMANDS:
        assert f"  {command.name} " in page
        assert command.help in page


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_the_help_of_a_command_has_an_example_that_parses(command: Command, offline: Run) -> None:
    done = offline(*command.name.split(), "--help")
    assert done.code == 0
    assert f"example:\n  client.py {command.example}\n" in done.out
    assert parse("client.py", shlex.split(command.example)).run is command.run


# --- real processes: pipes and terminals ---


def unread(*argv: str) -> Done:
    """Run a command whose output is not read."""
    reader, writer = os.pipe()
    os.close(reader)
    with start_process(*argv, stdout=writer, stderr=PIPE) as process:
        os.close(writer)
        _, err = process.communicate(timeout=20)
    return Done(process.returncode, "", err.decode())


@pytest.mark.process
def test_a_reader_that_leaves_is_met_with_silence() -> None:
    assert unread("--help") == (141, "", "")


@pytest.mark.process
@pytest.mark.parametrize("command", ["fetch", "subscribe", "consume"])
def test_a_command_that_prints_messages_ends_quietly_when_they_are_not_read(
    command: str, shared: BrokerProcess, topic: str
) -> None:
    with BrokerClient(port=shared.port) as client:
        client.publish(topic, b"x")
    arguments = ["--group", topic, "--topic", topic] if command == "consume" else [topic]
    assert unread("--port", str(shared.port), command, *arguments) == (141, "", "")


@pytest.mark.process
def test_a_message_that_is_not_read_is_not_blamed(shared: BrokerProcess, topic: str) -> None:
    with BrokerClient(port=shared.port) as client:
        client.create_subscription(topic, topic)
        client.publish(topic, b"x")
        assert unread("--port", str(shared.port), "join-subscription", topic) == (141, "", "")
        assert client.explain(topic, 0).startswith("waiting for its turn, ")  # not for an attempt after a failure


@pytest.mark.process
def test_a_terminal_gets_a_progress_bar_and_a_summary_and_a_pipe_gets_neither(
    shared: BrokerProcess, topic: str, tmp_path: Path
) -> None:
    file = tmp_path / "lines"
    file.write_bytes(b"x\n" * 1000)
    argv = ("--port", str(shared.port), "publish", topic, "--file", str(file))
    assert "1,000 messages" in (shown := on_terminal(*argv))
    assert "/s" in shown
    assert "stored 1,000 messages in topic " in shown
    with start_process(*argv, stdout=PIPE, stderr=PIPE) as process:
        out, err = process.communicate(timeout=20)
    assert (out, err) == (b"", b"")


@pytest.mark.process
def test_a_terminal_gets_a_drawn_table(shared: BrokerProcess, topic: str) -> None:
    shown = on_terminal("--port", str(shared.port), "list-topics")
    assert topic in shown
    assert "───" in shown
