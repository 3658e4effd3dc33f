"""Failing disks, damaged files and stolen directories, under a real server process."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from qb.core.wire.frames import MessageType, encode_frame
from qb.storage.verification import verify
from tests.support.brokers import BrokerProcess, server_command
from tests.support.peers import Peer, stored_messages
from tests.support.stores import as_killed, metadata_log
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

StartBroker = Callable[..., BrokerProcess]


# What disks do: strace makes single system calls on single files fail


@contextmanager
def failing(broker: BrokerProcess, path: Path, *faults: str) -> Iterator[None]:
    """Make the broker's system calls on `path` fail inside the block, as strace's `inject` says."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    injected = [f"--inject={fault}" for fault in faults]
    command = ["strace", "-f", "-o", os.devnull, "-p", str(broker.process.pid), "-P", str(path), *injected]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as tracer:
        assert tracer.stderr is not None
        said = tracer.stderr.readline()
        try:
            if "not permitted" in said:
                pytest.skip(f"tracing is not permitted here: {said.strip()}")
            assert "attached" in said, said
            yield
        finally:
            tracer.terminate()


def log_of(broker: BrokerProcess, topic: str, base_offset: int = 0) -> Path:
    return broker.data_dir / "topics" / topic / "0" / f"{base_offset:020}.log"


def index_of(broker: BrokerProcess, topic: str, base_offset: int = 0) -> Path:
    return log_of(broker, topic, base_offset).with_suffix(".idx")


def code(answer: Any) -> str:
    return answer.properties.get("code", answer.properties["status"])


def status(peer: Peer, topic: str) -> str:
    return peer.call("describe_topic", topic=topic)["logs"][0]["status"]


@pytest.fixture
def two_topics(start_broker: StartBroker) -> Iterator[tuple[BrokerProcess, Peer]]:
    """A broker with the topics `a` and `b`, each with one message, and small segments."""
    broker = start_broker(segment_bytes=4096)
    with Peer(broker.port) as peer:
        for topic in ("a", "b"):
            peer.create_topic(topic)
            assert code(peer.publish(topic, b"before")) == "success"
        yield broker, peer


def test_a_failed_sync_poisons_that_log_alone_and_a_restart_recovers_what_was_acked(two_topics):
    broker, peer = two_topics
    with failing(broker, log_of(broker, "a"), "pwritev2:error=EIO"):
        assert code(peer.publish("a", b"never acked")) == "LOG_POISONED"
        assert code(peer.publish("b", b"meanwhile")) == "success"
    assert code(peer.publish("a", b"the disk is well again")) == "LOG_POISONED"
    assert (status(peer, "a"), status(peer, "b")) == ("poisoned", "ok")
    assert peer.bodies("a") == [b"before"]

    broker.restart()
    with Peer(broker.port) as again:
        assert again.bodies("a") == [b"before"]
        assert again.publish("a", b"after").properties["offset"] == "1"
        assert again.bodies("b") == [b"before", b"meanwhile"]


def test_every_publish_that_waits_behind_a_failed_sync_is_refused(two_topics):
    broker, peer = two_topics
    count = 2_000
    with failing(broker, log_of(broker, "a"), "pwritev2:error=EIO"):
        peer.send_bytes(b"".join(encode_frame(MessageType.PUBLISH, n, 0, {"topic": "a"}, b"x") for n in range(count)))
        answers = [peer.receive() for _ in range(count)]
    assert [answer.sequence_number for answer in answers] == list(range(count))
    assert {code(answer) for answer in answers} == {"LOG_POISONED"}
    assert peer.bodies("a") == [b"before"]
    broker.kill()
    assert verify(broker.data_dir).findings == []


def test_a_full_disk_refuses_publishes_and_takes_them_again_when_there_is_room(two_topics):
    broker, peer = two_topics
    with failing(broker, log_of(broker, "a"), "pwritev2:error=ENOSPC"):
        assert code(peer.publish("a", b"no room")) == "DISK_FULL"
        assert code(peer.publish("a", b"no room")) == "DISK_FULL"
        assert peer.bodies("a") == [b"before"]
        assert code(peer.publish("b", b"meanwhile")) == "success"
    assert peer.publish("a", b"room").properties["offset"] == "1"
    assert peer.bodies("a") == [b"before", b"room"]
    assert status(peer, "a") == "ok"
    broker.restart()
    with Peer(broker.port) as again:
        assert again.bodies("a") == [b"before", b"room"]


def test_a_failed_write_that_cannot_be_cut_off_poisons_the_log(two_topics):
    broker, peer = two_topics
    with failing(broker, log_of(broker, "a"), "pwritev2:error=ENOSPC", "ftruncate:error=EIO"):
        assert code(peer.publish("a", b"no room")) == "LOG_POISONED"
    assert code(peer.publish("a", b"too late")) == "LOG_POISONED"
    assert code(peer.publish("b", b"meanwhile")) == "success"
    broker.restart()
    with Peer(broker.port) as again:
        assert again.bodies("a") == [b"before"]


ROLL = b"x" * 5_000  # more than a segment: the publish after it starts a new one


@pytest.mark.parametrize(
    ("fault", "expected", "then"),
    [
        ("openat:error=ENOSPC", "DISK_FULL", "success"),
        ("pwritev2:error=ENOSPC", "DISK_FULL", "success"),
        ("openat:error=EIO", "LOG_POISONED", "success"),
        ("pwritev2:error=EIO", "LOG_POISONED", "LOG_POISONED"),
    ],
)
def test_a_segment_that_cannot_be_started_leaves_nothing_behind(two_topics, fault, expected, then):
    broker, peer = two_topics
    assert code(peer.publish("a", ROLL)) == "success"
    with failing(broker, log_of(broker, "a", base_offset=2), fault):
        assert code(peer.publish("a", b"no new segment")) == expected
        assert code(peer.publish("b", b"meanwhile")) == "success"
    assert code(peer.publish("a", b"after")) == then
    expected_bodies = [b"before", ROLL] + [b"after"] * (then == "success")
    assert peer.bodies("a") == expected_bodies
    broker.kill()
    assert verify(broker.data_dir).findings == []
    broker.start()
    with Peer(broker.port) as again:
        assert again.bodies("a") == expected_bodies
        assert again.publish("a", b"next").properties["offset"] == str(len(expected_bodies))


def test_a_directory_that_cannot_be_synced_poisons_the_log(two_topics):
    broker, peer = two_topics
    assert code(peer.publish("a", ROLL)) == "success"
    with failing(broker, log_of(broker, "a").parent, "fsync:error=EIO"):
        assert code(peer.publish("a", b"in a nameless segment")) == "LOG_POISONED"
        assert code(peer.publish("b", b"meanwhile")) == "success"
    broker.restart()
    with Peer(broker.port) as again:
        assert again.bodies("a") == [b"before", ROLL]
        assert again.publish("a", b"after").properties["offset"] == "2"


@pytest.mark.parametrize("fault", ["pwrite64:error=ENOSPC", "fdatasync:error=EIO"])
def test_an_index_that_cannot_be_written_stops_no_publisher_and_is_made_up_for(two_topics, fault):
    broker, peer = two_topics
    bodies = [b"%04d" % number for number in range(50)]
    with failing(broker, index_of(broker, "a"), fault):
        for body in bodies:
            assert code(peer.publish("a", body)) == "success"
        assert code(peer.publish("a", ROLL)) == "success"
        assert code(peer.publish("a", b"in the next segment")) == "success"
    assert peer.bodies("a") == [b"before", *bodies, ROLL, b"in the next segment"]
    broker.restart()
    with Peer(broker.port) as again:
        assert again.bodies("a") == [b"before", *bodies, ROLL, b"in the next segment"]
        assert again.fetch("a", 30, max_messages="1").properties["offset"] == "30"


@pytest.mark.parametrize(("error", "expected"), [("EIO", "LOG_DAMAGED"), ("ENOMEM", "INTERNAL")])
def test_a_file_that_cannot_be_read_fails_that_read_and_not_the_broker(start_broker, error, expected):
    broker = start_broker(tail_bytes=0)
    with Peer(broker.port) as peer:
        for topic in ("a", "b"):
            peer.create_topic(topic)
            peer.publish(topic, b"kept")
        faults = [f"{call}:error={error}" for call in ("pread64", "preadv", "preadv2")]
        with failing(broker, log_of(broker, "a"), *faults), Peer(broker.port) as reader:
            assert code(reader.fetch("a")) == expected
            assert peer.bodies("b") == [b"kept"]
            assert code(peer.publish("b", b"more")) == "success"
    broker.restart()
    with Peer(broker.port) as again:
        assert again.bodies("a") == [b"kept"]


def test_a_topic_whose_name_cannot_be_synced_is_not_made(two_topics):
    broker, peer = two_topics
    with failing(broker, broker.data_dir / "topics", "fsync:error=EIO"), Peer(broker.port) as other:
        assert code(other.create_topic("c")) == "INTERNAL"
    assert [topic["topic"] for topic in peer.call("list_topics")] == ["a", "b"]
    assert code(peer.publish("c", b"too early")) == "UNKNOWN_TOPIC"
    broker.restart()
    with Peer(broker.port) as again:
        assert [topic["topic"] for topic in again.call("list_topics")] == ["a", "b"]


@pytest.mark.parametrize("fault", ["pwritev2:error=ENOSPC", "pwritev2:error=EIO"])
def test_metadata_that_cannot_be_written_refuses_the_topic_and_leaves_no_half_of_it(two_topics, fault):
    broker, peer = two_topics
    with failing(broker, metadata_log(broker.data_dir), fault), Peer(broker.port) as other:
        assert code(other.create_topic("c")) in ("DISK_FULL", "INTERNAL")
        assert code(peer.publish("a", b"meanwhile")) == "success"
    assert [topic["topic"] for topic in peer.call("list_topics")] == ["a", "b"]
    assert code(peer.create_topic("c")) == "success"
    assert code(peer.publish("c", b"whole")) == "success"
    broker.restart()
    with Peer(broker.port) as again:
        assert again.bodies("c") == [b"whole"]
        assert again.bodies("a") == [b"before", b"meanwhile"]


# A disk that is really full


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A directory that holds 8 MiB and no more."""
    mount = tmp_path / "small"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(mount)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"mounting is not permitted here: {mounted.stderr.strip()}")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def test_a_disk_that_fills_up_keeps_what_was_acked_and_goes_on_when_there_is_room(small_disk):
    broker = BrokerProcess(small_disk, segment_bytes=2**20)
    try:
        with Peer(broker.port) as peer:
            fill_up_and_make_room(small_disk, broker, peer)
    finally:
        broker.kill()


def fill_up_and_make_room(disk: Path, broker: BrokerProcess, peer: Peer) -> None:
    peer.hello()
    for topic in ("a", "b"):
        peer.create_topic(topic)
    ballast = disk / "ballast"
    ballast.write_bytes(bytes(2**20))
    acked = publish_until_full(peer, "a")
    assert peer.bodies("a") == acked
    assert code(peer.publish("b", b"as full for all topics" * 10_000, 2**40)) == "DISK_FULL"
    free_before = os.statvfs(disk).f_bavail

    ballast.unlink()
    assert os.statvfs(disk).f_bavail > free_before
    for topic in ("a", "b"):
        assert code(peer.publish(topic, b"room again", 2**41)) == "success"
    assert peer.bodies("a") == [*acked, b"room again"]
    assert peer.bodies("b") == [b"room again"]
    assert verify(broker.data_dir).findings == []

    broker.restart()
    with Peer(broker.port) as again:
        assert again.bodies("a") == [*acked, b"room again"]
        assert again.bodies("b") == [b"room again"]


def publish_until_full(peer: Peer, topic: str) -> list[bytes]:
    """Publish runs of large messages until one is refused; returns the bodies that were acked."""
    acked: list[bytes] = []
    dice, number = random.Random(8), 1
    while True:
        bodies = [dice.randbytes(dice.randrange(60_000)) for _ in range(10)]
        frames = [
            encode_frame(MessageType.PUBLISH, number + i, 0, {"topic": topic}, body) for i, body in enumerate(bodies)
        ]
        peer.send_bytes(b"".join(frames))
        refused = False
        while bodies:
            answer = peer.receive()
            assert answer is not None
            count = int(answer.properties["count"])
            if code(answer) == "success":
                acked += bodies[:count]
            else:
                assert code(answer) == "DISK_FULL"
                refused = True
            del bodies[:count]
        if refused:
            return acked
        number += 10


# Damage


def filled(start_broker: StartBroker, **settings: object) -> tuple[BrokerProcess, dict[str, list[bytes]]]:
    """Return a stopped broker with two topics of several segments each, and what they hold."""
    broker = start_broker(segment_bytes=8_192, **settings)
    held: dict[str, list[bytes]] = {"a": [], "b": []}
    dice = random.Random(5)
    with Peer(broker.port) as peer:
        peer.hello()
        for topic, bodies in held.items():
            peer.create_topic(topic)
            for number in range(1, 60):
                bodies.append(b"%d " % number + dice.randbytes(dice.randrange(2_000)))
                assert code(peer.publish(topic, bodies[-1], number)) == "success"
    assert broker.stop() == 0
    return broker, held


def logs_of(broker: BrokerProcess, topic: str) -> list[Path]:
    return sorted((broker.data_dir / "topics" / topic / "0").glob("*.log"))


def flip_a_byte(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 0x10
    path.write_bytes(content)


def wait_for_damage(peer: Peer, topic: str) -> str:
    """Return the reason that the broker gives once it has found the damage."""

    def log() -> dict[str, Any]:
        found: dict[str, Any] = peer.call("describe_topic", topic=topic)["logs"][0]
        assert found["status"] in ("ok", "damaged")
        return found

    wait_until(lambda: log()["status"] == "damaged")
    return str(log()["reason"])


@pytest.mark.parametrize("which", ["first", "middle"])
def test_damage_in_a_closed_segment_stops_its_topic_naming_file_and_position_and_no_other(start_broker, which):
    broker, held = filled(start_broker)
    closed = logs_of(broker, "a")[:-1]
    damaged = closed[0 if which == "first" else len(closed) // 2]
    flip_a_byte(damaged, damaged.stat().st_size // 2)
    finding = verify(broker.data_dir).findings[0]

    broker.start()
    with Peer(broker.port) as peer:
        reason = wait_for_damage(peer, "a")
        assert f"{damaged} is damaged at byte {finding.position}" in reason
        for answer in (peer.fetch("a"), peer.publish("a", b"more", 1_000)):
            assert code(answer) == "LOG_DAMAGED"
            assert f"{damaged} is damaged at byte {finding.position}" in answer.properties["error"]
        assert peer.bodies("b") == held["b"]
        assert code(peer.publish("b", b"more", 1_001)) == "success"


def test_a_read_that_meets_damage_before_the_proof_does_is_refused(start_broker):
    broker, held = filled(start_broker, tail_bytes=0)
    damaged = logs_of(broker, "a")[1]
    broker.start()
    flip_a_byte(damaged, damaged.stat().st_size // 2)
    with Peer(broker.port) as peer:
        offset = -2
        while code(answer := peer.fetch("a", offset)) == "success":
            offset = int(answer.properties["offset"]) + int(answer.properties["count"])
            assert offset < len(held["a"])
        assert code(answer) == "LOG_DAMAGED"
        assert str(damaged) in answer.properties["error"]
        assert peer.bodies("b") == held["b"]


def test_damage_before_the_end_of_the_newest_segment_is_not_taken_for_a_tear(start_broker):
    broker = start_broker()
    with Peer(broker.port) as peer:
        for topic in ("a", "b"):
            peer.create_topic(topic)
            for number in range(20):
                peer.publish(topic, b"%d" % number * 50)
    broker.stop()
    log = logs_of(broker, "a")[0]
    flip_a_byte(log, log.stat().st_size // 2)
    before = log.read_bytes()
    broker.start()
    with Peer(broker.port) as peer:
        assert code(peer.fetch("a")) == "LOG_DAMAGED"
        assert status(peer, "a") == "damaged"
        assert len(peer.bodies("b")) == 20
    assert "is not served" in broker.log
    assert log.read_bytes() == before


@pytest.mark.parametrize("lost", ["log", "directory"])
def test_a_lost_file_in_the_middle_stops_its_topic_and_no_other(start_broker, lost):
    broker, held = filled(start_broker)
    gone = logs_of(broker, "a")[2]
    if lost == "log":
        gone.unlink()
    else:
        shutil.rmtree(gone.parent)
    broker.start()
    with Peer(broker.port) as peer:
        assert code(peer.fetch("a")) == "LOG_DAMAGED"
        assert code(peer.publish("a", b"more", 1_000)) == "LOG_DAMAGED"
        assert peer.bodies("b") == held["b"]


# Indexes are a cache


def deleted(index: Path, newest: Path) -> None:
    index.unlink()


def stale(index: Path, newest: Path) -> None:
    index.write_bytes(index.read_bytes()[:-48])


def torn(index: Path, newest: Path) -> None:
    index.write_bytes(index.read_bytes()[:-7])


def garbage(index: Path, newest: Path) -> None:
    index.write_bytes(random.Random(3).randbytes(index.stat().st_size))


def too_long(index: Path, newest: Path) -> None:
    index.write_bytes(index.read_bytes() + bytes(64))


def empty(index: Path, newest: Path) -> None:
    index.write_bytes(b"")


def anothers(index: Path, newest: Path) -> None:
    index.write_bytes(newest.read_bytes())


@pytest.mark.parametrize("spoil", [deleted, stale, torn, garbage, too_long, empty, anothers])
def test_an_index_that_is_missing_or_wrong_is_rebuilt(start_broker, spoil):
    broker, held = filled(start_broker)
    indexes = [log.with_suffix(".idx") for log in logs_of(broker, "a")]
    right = [index.read_bytes() for index in indexes]
    other = logs_of(broker, "b")[1].with_suffix(".idx")
    for index in indexes:
        spoil(index, other)
    broker.start()
    with Peer(broker.port) as peer:
        assert peer.bodies("a") == held["a"]
        assert peer.bodies("b") == held["b"]
        for offset in (0, 17, 58):
            (message,) = stored_messages(peer.fetch("a", offset, max_messages="1").body)
            assert (message.sequence_number, message.body) == (offset, held["a"][offset])
        assert peer.publish("a", b"more", 1_000).properties["offset"] == str(len(held["a"]))
        assert peer.call("offsets", topic="a", time_ms=0)["offset_for_time"] == 0
    assert broker.stop() == 0
    assert verify(broker.data_dir).findings == []
    assert [index.read_bytes()[: len(content)] for index, content in zip(indexes, right, strict=True)] == right


# A torn tail


def test_a_torn_tail_is_cut_wherever_it_is_torn_and_what_was_acked_before_it_stays(start_broker):
    broker = start_broker()
    dice = random.Random(11)
    with Peer(broker.port) as peer:
        peer.hello()
        peer.create_topic("a")
        acked = [b"%d " % number + dice.randbytes(300) for number in range(1, 31)]
        for number, body in enumerate(acked, 1):
            peer.publish("a", body, number)
        whole = log_of(broker, "a").stat().st_size
        frames = [encode_frame(MessageType.PUBLISH, 100 + n, 0, {"topic": "a"}, dice.randbytes(400)) for n in range(20)]
        peer.send_bytes(b"".join(frames))
        assert int(peer.receive().properties["count"]) == len(frames)  # one batch, which the cuts go through
    broker.stop()
    as_killed(broker.data_dir)
    log = log_of(broker, "a").read_bytes()
    for cut in sorted(dice.sample(range(whole + 1, len(log)), 5)):
        log_of(broker, "a").write_bytes(log[:cut])
        (note,) = [note for note in verify(broker.data_dir).notes if note.file.endswith(".log")]
        assert note.position == whole
        broker.start()
        assert "30 messages recovered" in broker.banner
        with Peer(broker.port) as peer:
            assert peer.bodies("a") == acked
        broker.kill()
        assert log_of(broker, "a").stat().st_size == whole
        assert verify(broker.data_dir).findings == []


def test_a_torn_tail_of_zeros_or_noise_is_cut(start_broker):
    broker, held = filled(start_broker)
    for tail in (bytes(5_000), random.Random(1).randbytes(5_000), b"\0"):
        as_killed(broker.data_dir)
        with logs_of(broker, "a")[-1].open("ab") as log:
            log.write(tail)
        broker.start()
        with Peer(broker.port) as peer:
            assert peer.bodies("a") == held["a"]
            held["a"].append(b"after the cut")
            assert peer.publish("a", held["a"][-1], 1_000).properties["offset"] == str(len(held["a"]) - 1)
        broker.stop()


# Who owns the data directory


def second_broker(data_dir: Path) -> subprocess.CompletedProcess[str]:
    command = server_command(data_dir)
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def test_a_broker_whose_data_directory_is_moved_away_ends_with_one_line_and_the_directory_is_whole(two_topics):
    broker, _ = two_topics
    moved = broker.data_dir.with_name("moved")
    broker.data_dir.rename(moved)
    assert broker.wait() == 1
    (line,) = [line for line in broker.log.splitlines() if "was moved or removed" in line]
    assert line.startswith(f"qb-server: {broker.data_dir} was moved or removed while the broker ran")
    assert "Traceback" not in broker.log
    assert verify(moved).findings == []
    moved.rename(broker.data_dir)
    broker.start()
    with Peer(broker.port) as again:
        assert again.bodies("a") == [b"before"]


def test_a_data_directory_in_use_is_refused_by_name_and_its_holder_goes_on(two_topics):
    broker, peer = two_topics
    ended = second_broker(broker.data_dir)
    assert ended.returncode == 1
    assert ended.stderr == f"qb-server: {broker.data_dir} is in use by another process (pid {broker.process.pid})\n"
    assert code(peer.publish("a", b"undisturbed")) == "success"
    assert peer.bodies("a") == [b"before", b"undisturbed"]


def test_a_data_directory_whose_holder_was_killed_is_free(two_topics):
    broker, _ = two_topics
    broker.kill()
    assert (broker.data_dir / "lock").read_text().strip() == str(broker.process.pid)
    broker.start()
    with Peer(broker.port) as peer:
        assert peer.bodies("a") == [b"before"]


@pytest.mark.parametrize(
    ("content", "words"), [("qb-storage 99\n", "use a newer one"), ("something else\n", "no data directory of ours")]
)
def test_a_data_directory_of_another_format_is_refused_untouched(two_topics, content, words):
    broker, _ = two_topics
    broker.stop()
    (broker.data_dir / "format").write_text(content)
    ended = second_broker(broker.data_dir)
    assert ended.returncode == 1
    assert words in ended.stderr
    assert ended.stderr.count("\n") == 1
    (broker.data_dir / "format").write_text("qb-storage 2\n")
    broker.start()
    with Peer(broker.port) as peer:
        assert peer.bodies("a") == [b"before"]


@pytest.mark.parametrize("loss", ["missing", "empty", "damaged"])
def test_a_start_without_whole_metadata_is_refused_in_one_line_that_says_what_to_do(two_topics, loss):
    broker, _ = two_topics
    broker.stop()
    path = metadata_log(broker.data_dir)
    whole = path.read_bytes()
    shutil.rmtree(broker.data_dir / "metadata-copy")
    path.write_bytes({"empty": b"", "damaged": whole[:50] + b"?" + whole[51:]}.get(loss, b""))
    if loss == "missing":
        path.unlink()
    ended = second_broker(broker.data_dir)
    assert (ended.returncode, ended.stderr.count("\n")) == (1, 1)
    assert str(path if loss != "missing" else path.parent) in ended.stderr
    assert "restore" in ended.stderr
    path.write_bytes(whole)
    broker.start()
    with Peer(broker.port) as peer:
        assert peer.bodies("a") == [b"before"]


def test_metadata_that_is_damaged_in_the_middle_is_named_and_everything_is_served(two_topics):
    broker, _ = two_topics
    broker.kill()
    path = metadata_log(broker.data_dir)
    whole = path.read_bytes()
    path.write_bytes(whole[:50] + b"?" + whole[51:])
    broker.start()
    assert f"{path} is damaged at byte" in broker.log
    with Peer(broker.port) as peer:
        assert peer.bodies("a") == [b"before"]
        assert peer.publish("b", b"after").properties["offset"] == "1"


def test_topics_are_adopted_from_their_logs_when_they_are_moved_to_a_new_directory(two_topics, start_broker):
    old, _ = two_topics
    old.stop()
    broker = start_broker("new")
    broker.stop()
    for topic in (old.data_dir / "topics").iterdir():
        topic.rename(broker.data_dir / "topics" / topic.name)
    broker.start()
    assert "adopted topic 'a'" in broker.log
    with Peer(broker.port) as peer:
        assert peer.bodies("a") == [b"before"]
        assert peer.publish("b", b"after").properties["offset"] == "1"
