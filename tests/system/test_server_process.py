"""The server as operators meet it: a real process, its settings, its start and its stop."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys

import pytest

from qb import BrokerClient
from qb.core.wire.frames import MessageType
from tests.support.brokers import ROOT, free_port, run_server
from tests.support.peers import Peer
from tests.support.waiting import wait_until

pytestmark = pytest.mark.process


def test_the_start_logs_address_directory_topics_and_messages(broker):
    assert re.search(rf"listens on 127\.0\.0\.1:{broker.port}\n", broker.banner)
    assert str(broker.data_dir) in broker.banner
    assert "fsynced before every ack" in broker.banner
    with Peer(broker.port) as peer:
        peer.create_topic("a")
        peer.publish("a", b"1")
        peer.publish("a", b"2")
    broker.restart()
    assert "1 topic, 2 messages recovered" in broker.banner


@pytest.mark.parametrize(
    ("flags", "environment", "named"),
    [
        (["--server-port", "many"], {}, "--server-port"),
        ([], {"QB_SERVER_PROT": "1"}, "QB_SERVER_PORT"),
        ([], {"QB_SERVER_PORT": "70000"}, "QB_SERVER_PORT"),
        ([], {"QB_CONFIG_FILE": "missing.yaml"}, "missing.yaml"),
        (["--nonsense", "1"], {}, "--nonsense"),
    ],
)
def test_a_bad_setting_stops_the_start_with_one_line_that_names_it(flags, environment, named):
    ended = run_server(*flags, **environment)
    assert ended.returncode == 2
    assert named in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert ended.stdout == ""


def test_print_config_shows_each_value_and_where_it_came_from(tmp_path):
    file = tmp_path / "qb.yaml"
    file.write_text("server:\n  port: 1111\nstorage:\n  segment_bytes: 1MiB\n")
    ended = run_server("--print-config", "--log-level", "debug", QB_CONFIG_FILE=str(file), QB_SERVER_PORT="2222")
    rows = {line.split()[0]: line for line in ended.stdout.splitlines() if line.startswith(("server.", "storage."))}
    assert re.search(r"2222 .*QB_SERVER_PORT", rows["server.port"])
    assert re.search(r"debug .*--log-level", rows["server.log_level"])
    assert "qb.yaml" in rows["storage.segment_bytes"]
    assert "default" in rows["server.host"]
    assert ended.returncode == 0


@pytest.mark.parametrize("flags", [["--print-config"], ["--help"], ["--version"]])
def test_a_reader_that_leaves_ends_it_quietly(flags, tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    environment = os.environ | {"QB_DATA_DIR": str(tmp_path / "data"), "QB_JSON_PORT": "0", "QB_HTTP_PORT": "0"}
    ended = subprocess.run(
        [sys.executable, str(ROOT / "server.py"), *flags],
        env=environment,
        stdout=writer,
        stderr=subprocess.PIPE,
        timeout=30,
    )
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, b"")


def test_a_greeting_that_is_not_read_is_no_reason_to_stop(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    port = free_port()
    command = [sys.executable, str(ROOT / "server.py"), "--port", str(port), "--data-dir", str(tmp_path / "data")]
    environment = os.environ | {"QB_JSON_PORT": "0", "QB_HTTP_PORT": "0"}
    with subprocess.Popen(command, env=environment, stdout=writer, stderr=subprocess.PIPE, text=True) as server:
        os.close(writer)
        client = BrokerClient(port=port)
        try:
            client.connect(wait=30)
            client.create_topic("a")
            assert client.publish("a", b"x").offset == 0
        finally:
            client.disconnect()
            server.send_signal(signal.SIGTERM)
        _, log = server.communicate(timeout=30)
    assert server.returncode == 0
    assert "Traceback" not in log


def test_a_port_in_use_is_a_clear_error(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = run_server("--port", port, "--data-dir", str(tmp_path / "data"))
    assert ended.returncode == 1
    assert ended.stderr == f"qb-server: cannot listen on 127.0.0.1:{port}: something else is using it\n"


def test_a_data_directory_in_use_is_a_clear_error_that_names_the_holder(broker):
    ended = run_server("--port", "0", "--data-dir", str(broker.data_dir))
    assert ended.returncode == 1
    assert str(broker.process.pid) in ended.stderr
    assert "Traceback" not in ended.stderr
    with Peer(broker.port) as peer:
        assert peer.create_topic("still-serving").properties["status"] == "success"


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_goodbye_and_exit_code_0(broker, sent):
    with Peer(broker.port) as peer:
        peer.create_topic("a")
        peer.publish("a", b"1")
        broker.process.send_signal(sent)
        goodbye = peer.receive()
        assert goodbye.type == MessageType.GOODBYE
        assert peer.receive() is None
    assert broker.wait() == 0
    assert "Traceback" not in broker.log


# Programs that become the server, with a terminal of its own and without any
DEFAULT = "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_DFL)"  # the tests may run under nohup
IGNORED = DEFAULT.replace("SIG_DFL", "SIG_IGN")
TERMINAL = """
import fcntl, pty, termios
master, slave = pty.openpty()
os.set_inheritable(master, True)
os.setsid()
fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
OWN_TERMINAL, NOHUP = DEFAULT + TERMINAL, IGNORED + TERMINAL
NO_TERMINAL = DEFAULT + "; os.setsid(); os.execv(sys.argv[1], sys.argv[1:])"


def test_the_end_of_its_terminal_is_a_signal_to_finish_and_comes_as_often_as_it_likes(start_broker):
    broker = start_broker(prefix=(sys.executable, "-c", OWN_TERMINAL))
    with Peer(broker.port) as peer:
        peer.create_topic("a")
        assert peer.publish("a", b"1").properties["status"] == "success"
        broker.process.send_signal(signal.SIGHUP)
        assert peer.receive().type == MessageType.GOODBYE
        broker.process.send_signal(signal.SIGHUP)
        assert peer.receive() is None
    assert broker.wait() == 0
    assert "SIGHUP: finishing what was received" in broker.log


@pytest.mark.parametrize("start", [NO_TERMINAL, NOHUP], ids=["no terminal", "nohup"])
def test_a_hangup_without_a_terminal_or_under_nohup_ends_nothing(start_broker, start):
    broker = start_broker(prefix=(sys.executable, "-c", start))
    broker.process.send_signal(signal.SIGHUP)
    if start == NO_TERMINAL:
        wait_until(lambda: "SIGHUP: ignored; there is nothing to reload" in broker.log)
    with Peer(broker.port) as peer:
        assert peer.create_topic("still-serving").properties["status"] == "success"
    assert broker.stop() == 0


@pytest.mark.parametrize("start", [NO_TERMINAL, NOHUP], ids=["no terminal", "nohup"])
def test_a_hangup_reloads_what_can_be_reloaded_also_under_nohup(start_broker, start, tmp_path):
    users = tmp_path / "users"
    users.touch(mode=0o600)
    users.write_text("user anonymous admin:*\n")
    broker = start_broker(prefix=(sys.executable, "-c", start), users_file=users)
    broker.process.send_signal(signal.SIGHUP)
    wait_until(lambda: "SIGHUP: read 1 user again" in broker.log)
    assert broker.stop() == 0


def test_what_was_received_before_a_signal_is_answered_and_kept(broker):
    with Peer(broker.port) as peer:
        peer.hello()
        peer.create_topic("a")
        for number in range(1, 2_001):
            peer.send(MessageType.PUBLISH, number, b"x" * 1_000, topic="a")
        first = peer.receive()
        broker.process.send_signal(signal.SIGTERM)
        answered, frame = int(first.properties["count"]), peer.receive()
        while frame is not None and frame.type == MessageType.ACK:
            assert frame.properties["status"] == "success"
            answered += int(frame.properties["count"])
            frame = peer.receive()
    assert broker.wait() == 0
    broker.start()
    assert f"1 topic, {answered} messages recovered" in broker.banner


def test_a_second_signal_exits_at_once_and_loses_nothing_that_was_acked(start_broker):
    broker = start_broker(shutdown_grace=60)
    with Peer(broker.port) as peer, Peer(broker.port) as stuck:
        peer.create_topic("a")
        stuck.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        for number in range(300_000):  # it never reads the answers, so its session cannot finish
            stuck.socket.settimeout(0.5)
            try:
                stuck.send(MessageType.HEARTBEAT, number)
            except TimeoutError:
                break
        assert peer.publish("a", b"kept").properties["offset"] == "0"
        broker.process.send_signal(signal.SIGTERM)
        assert peer.receive().type == MessageType.GOODBYE
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", broker.port), timeout=10)
        broker.process.send_signal(signal.SIGTERM)
        assert broker.wait() == 128 + signal.SIGTERM
    broker.start()
    assert "1 topic, 1 message recovered" in broker.banner


def test_help_and_version_touch_no_data_directory(tmp_path):
    assert "--data-dir" in run_server("--help", QB_DATA_DIR=str(tmp_path / "data")).stdout
    assert run_server("--version", QB_DATA_DIR=str(tmp_path / "data")).stdout.startswith("QB ")
    assert not (tmp_path / "data").exists()
