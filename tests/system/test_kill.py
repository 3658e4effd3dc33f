"""kill -9 in the middle of the work, again and again: what was acked is there, and nothing is half there."""

from __future__ import annotations

import itertools
import random
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from qb import BrokerClient, BrokerUnavailable, Offsets, PublishFailed
from qb.core.wire.frames import Frame, MessageType, encode_frame
from qb.storage.verification import verify
from tests.support.brokers import BrokerProcess, server_command
from tests.support.peers import Peer
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.kill, pytest.mark.timeout(240)]

KILLS = 10
SEGMENT_BYTES = 64 * 1024  # so that segments are rolled all the time
TOPICS = {"basic": 3, "runs": 2, "once": 3, "single": 2, "unsure": 2}

Place = tuple[str, int, int]  # topic, partition, offset


def body_of(publisher: str, number: int) -> bytes:
    """Return the one body that this publisher sends under this number: it says so itself, and nothing in it is free."""
    dice = random.Random(f"{publisher} {number}")
    length = dice.choice((0, 10, 200, 3_000)) if dice.random() < 0.995 else 150_000
    return f"{publisher} {number} ".encode() + dice.randbytes(dice.randint(0, length))


def whose(body: bytes) -> tuple[str, int]:
    """Return publisher and number of a stored body, which must be what was sent, byte for byte."""
    publisher, number, _ = body.split(b" ", 2)
    known = publisher.decode(), int(number)
    assert body == body_of(*known)
    return known


class Ledger:
    """What publishers were promised. Any thread may call."""

    def __init__(self) -> None:
        self.going = threading.Event()  # while it is not set, nothing new is published
        self._changed = threading.Condition()
        self._acked: dict[Place, tuple[str, int]] = {}
        self.failures: list[BaseException] = []

    def ack(self, place: Place, publisher: str, number: int) -> None:
        """Note an ack; no place is given out twice."""
        with self._changed:
            assert self._acked.setdefault(place, (publisher, number)) == (publisher, number), place
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        with self._changed:
            self.failures.append(error)
            self._changed.notify_all()

    def wait_for_more(self, count: int) -> None:
        """Let them publish; return when `count` more acks have come, with all of them at full speed."""
        self.going.set()
        with self._changed:
            goal = len(self._acked) + count
            assert self._changed.wait_for(lambda: self.failures or len(self._acked) >= goal, timeout=60)
        self.check()

    def check(self) -> None:
        """Fail if a publisher has failed."""
        if self.failures:
            raise self.failures[0]

    def acked(self) -> dict[Place, tuple[str, int]]:
        with self._changed:
            return dict(self._acked)


class Publisher(threading.Thread):
    """Publishes until it is stopped, whatever happens to the broker."""

    def __init__(self, name: str, port: int, ledger: Ledger, work: Callable[[Publisher], None]) -> None:
        super().__init__(name=name, daemon=True)
        self.port, self.ledger, self.stopping = port, ledger, threading.Event()
        self._work = work
        self._next = 1

    def run(self) -> None:
        try:
            while self.goes_on():
                self._work(self)
        except BaseException as error:
            self.ledger.fail(error)

    def goes_on(self) -> bool:
        """Wait while nothing shall be published; False when it is time to stop."""
        self.ledger.going.wait()
        return not self.stopping.is_set()

    def numbers(self, count: int) -> range:
        """Return numbers that no other body of this publisher has."""
        taken = range(self._next, self._next + count)
        self._next = taken.stop
        return taken

    def connect(self) -> Peer | None:
        """Return a connection, or None while the broker is down."""
        try:
            return Peer(self.port)
        except OSError:
            self.stopping.wait(0.02)
            return None

    def send(self, peer: Peer, topic: str, numbers: range, **properties: str) -> None:
        frames = [
            encode_frame(MessageType.PUBLISH, number, 0, {"topic": topic, **properties}, body_of(self.name, number))
            for number in numbers
        ]
        peer.send_bytes(b"".join(frames))

    def take(self, answer: Frame) -> int:
        """Note what an ACK says; returns how many publishes it answers."""
        facts = answer.properties
        assert facts["status"] == "success", facts
        count = int(facts["count"])
        for i in range(count):
            place = facts["topic"], int(facts["partition"]), int(facts["offset"]) + i
            self.ledger.ack(place, self.name, answer.sequence_number + i)
        return count


# The publishers: each works until the broker dies under it, and then starts anew


def basic(self: Publisher) -> None:
    """A peer of the basic dialect: one ACK each, several in flight, over all partitions in turn."""
    converse(self, lambda peer: None, lambda numbers: ("basic", numbers, {}), 40)


def runs(self: Publisher) -> None:
    """A peer of the fast dialect: one ACK for a run."""
    converse(self, Peer.hello, lambda numbers: ("runs", numbers, {"partition": str(numbers.start // 300 % 2)}), 300)


def converse(
    self: Publisher,
    greet: Callable[[Peer], object],
    plan: Callable[[range], tuple[str, range, dict[str, str]]],
    count: int,
) -> None:
    peer = self.connect()
    if peer is None:
        return
    with peer:
        try:
            greet(peer)
            while self.goes_on():
                topic, numbers, properties = plan(self.numbers(count))
                self.send(peer, topic, numbers, **properties)
                answered = 0
                while answered < len(numbers):
                    answer = peer.receive()
                    if answer is None:
                        return
                    answered += self.take(answer)
        except ConnectionError:
            return


def publish_once(client: BrokerClient) -> Callable[[Publisher], None]:
    """Return a publisher in bulk whose client outlives every broker: nothing may fail, nothing may come twice."""

    def work(self: Publisher) -> None:
        numbers = self.numbers(400)
        stored = client.publish_many("once", (body_of(self.name, number) for number in numbers))
        for index, place in positions("once", stored):
            self.ledger.ack(place, self.name, numbers[index])

    return work


def publish_singly(client: BrokerClient) -> Callable[[Publisher], None]:
    """Return a publisher of one message after another; several of them share a client."""

    def work(self: Publisher) -> None:
        (number,) = self.numbers(1)
        receipt = client.publish("single", body_of(self.name, number), key=str(number))
        self.ledger.ack((receipt.topic, receipt.partition, receipt.offset), self.name, number)

    return work


def publish_unsurely(client: BrokerClient) -> Callable[[Publisher], None]:
    """Return a publisher that is not idempotent: what was answered is promised; of the rest it knows nothing."""

    def work(self: Publisher) -> None:
        numbers = self.numbers(200)
        partition = numbers.start // 200 % 2
        try:
            stored = client.publish_many("unsure", (body_of(self.name, number) for number in numbers), partition)
        except PublishFailed as failed:
            stored = failed.stored
        except BrokerUnavailable:
            return
        for index, place in positions("unsure", stored):
            self.ledger.ack(place, self.name, numbers[index])

    return work


def positions(topic: str, stored: Offsets) -> Iterator[tuple[int, Place]]:
    """Yield the index of each stored body of a publish_many, and where it is."""
    for start, size, partition, offset in stored.runs:
        for i in range(size):
            yield start + i, (topic, partition, offset + i)


@pytest.fixture
def heavy_publishing(start_broker: Callable[..., BrokerProcess]) -> Iterator[tuple[BrokerProcess, Ledger]]:
    """A broker under publishers of every kind; they are stopped, and must have done well, before the test ends."""
    broker, ledger = start_broker(segment_bytes=SEGMENT_BYTES, tail_bytes="1MiB"), Ledger()
    with Peer(broker.port) as peer:
        for topic, partitions in TOPICS.items():
            assert peer.create_topic(topic, partitions=str(partitions)).properties["status"] == "success"
    clients = [BrokerClient(port=broker.port, idempotent=idempotent) for idempotent in (True, True, False)]
    once, single, unsure = clients
    kinds = {
        "basic-1": basic,
        "basic-2": basic,
        "runs-1": runs,
        "runs-2": runs,
        "once-1": publish_once(once),
        "once-2": publish_once(once),
        "single-1": publish_singly(single),
        "single-2": publish_singly(single),
        "unsure": publish_unsurely(unsure),
    }
    publishers = [Publisher(name, broker.port, ledger, work) for name, work in kinds.items()]
    for publisher in publishers:
        publisher.start()
    try:
        yield broker, ledger
    finally:
        for publisher in publishers:
            publisher.stopping.set()
        ledger.going.set()
        for publisher in publishers:
            publisher.join(timeout=60)
        for client in clients:
            client.disconnect()
    assert not [publisher.name for publisher in publishers if publisher.is_alive()]


def stored_messages(port: int) -> dict[Place, tuple[str, int]]:
    """Return whose message is where, reading everything; offsets must be dense and every body as sent."""
    found: dict[Place, tuple[str, int]] = {}
    with Peer(port) as peer:
        for topic, partitions in TOPICS.items():
            for partition in range(partitions):
                messages = peer.messages(topic, partition)
                assert [message.sequence_number for message in messages] == list(range(len(messages)))
                for message in messages:
                    assert message.properties["topic"] == topic
                    found[topic, partition, message.sequence_number] = whose(message.body)
    return found


def check_promises(port: int, acked: dict[Place, tuple[str, int]]) -> None:
    """Everything acked is at its place, and nothing is anywhere twice."""
    stored = stored_messages(port)
    lost = {place: known for place, known in acked.items() if stored.get(place) != known}
    assert not lost, f"{len(lost)} acked messages are not where they were promised: {sorted(lost.items())[:5]}"
    twice = [known for known, count in Counter(stored.values()).items() if count > 1]
    assert not twice, f"stored more than once: {twice[:5]}"


def test_what_was_acked_survives_ten_kills_in_place_in_order_and_nothing_is_half_there(heavy_publishing):
    broker, ledger = heavy_publishing
    dice = random.Random(9)
    for _ in range(KILLS):
        ledger.wait_for_more(dice.randint(300, 2_000))
        broker.kill()
        ledger.going.clear()
        acked = ledger.acked()
        assert verify(broker.data_dir).findings == []
        broker.start()
        check_promises(broker.port, acked)
    ledger.wait_for_more(1_000)
    for topic in ("basic", "runs", "once"):
        for partition in (broker.data_dir / "topics" / topic).iterdir():
            assert len(list(partition.glob("*.log"))) > 1  # segments were rolled while it was killed
    assert "Traceback" not in broker.log


def test_an_idempotent_client_publishes_everything_exactly_once_across_kills(start_broker):
    broker, ledger, dice = start_broker(segment_bytes=SEGMENT_BYTES), Ledger(), random.Random(10)
    total, published = 12_000, []
    with BrokerClient(port=broker.port) as client:
        client.create_topic("a", partitions=3)
        produced = threading.Semaphore(0)

        def bodies() -> Iterator[bytes]:
            for number in range(total):
                produced.release()
                yield b"%d " % number + bytes(number % 500)

        def publish() -> None:
            try:
                published.append(client.publish_many("a", bodies()))
            except BaseException as error:
                ledger.fail(error)

        publisher = threading.Thread(target=publish)
        publisher.start()
        for _ in range(4):  # each kill comes when the publisher is so much further
            for _ in range(dice.randint(1_000, 2_500)):
                assert produced.acquire(timeout=60)
            broker.restart()
        publisher.join(timeout=100)
        ledger.check()
    with Peer(broker.port) as peer:
        stored = {
            ("a", partition, message.sequence_number): int(message.body.split()[0])
            for partition in range(3)
            for message in peer.messages("a", partition)
        }
    assert sorted(stored.values()) == list(range(total))
    (offsets,) = published
    assert {place: index for index, place in positions("a", offsets)} == stored


def test_topics_are_whole_or_not_there_when_the_broker_is_killed_while_they_come_and_go(start_broker):
    broker, dice = start_broker(), random.Random(12)
    there: set[str] = set()
    for life in range(5):
        with Peer(broker.port) as peer:
            there, unsure = come_and_go(peer, f"life-{life}", there, dice.randint(5, 25), broker.process.kill)
        broker.wait()
        assert verify(broker.data_dir).findings == []
        broker.start()
        with Peer(broker.port) as peer:
            found = {topic["topic"] for topic in peer.call("list_topics")}
            assert there <= found <= there | unsure
            for topic in found:
                assert peer.publish(topic, b"usable", partition="1").properties["status"] == "success"
        there = found


def come_and_go(
    peer: Peer, name: str, there: set[str], rounds: int, kill: Callable[[], None]
) -> tuple[set[str], set[str]]:
    """Create topics, and delete every second one, until the broker dies of `kill`, which comes in the middle.

    Returns what must be there then, and what may be.
    """
    killer = threading.Thread(target=kill)
    for number in itertools.count():
        if number == rounds:
            killer.start()
        created, victim = f"{name}-{number}", min(there, default="")
        try:
            unsure = {created}
            assert peer.create_topic(created, partitions="2").properties["status"] == "success"
            there, unsure = there | {created}, set()
            if victim and number % 2:
                there, unsure = there - {victim}, {victim}
                peer.call("delete_topic", topic=victim)
        except ConnectionError:
            break
    killer.join()
    return there, unsure


def kill_while_it_recovers(data_dir: Path) -> None:
    """Start a broker and kill it as soon as it owns the directory: then its recovery is under way."""
    command = server_command(data_dir)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: (data_dir / "lock").read_text().strip() == str(process.pid))
        process.kill()


def test_a_kill_during_recovery_costs_nothing(start_broker):
    broker, dice = start_broker(segment_bytes=SEGMENT_BYTES), random.Random(13)
    with BrokerClient(port=broker.port) as client:
        client.create_topic("a")
        bodies = [body_of("recovery", number) for number in range(3_000)]
        client.publish_many("a", bodies)
    broker.kill()
    logs = sorted((broker.data_dir / "topics/a/0").glob("*.log"))
    for _ in range(5):
        for log in logs:
            log.with_suffix(".idx").unlink(missing_ok=True)  # work for the recovery
        with logs[-1].open("ab") as newest:
            newest.write(dice.randbytes(5_000))
        kill_while_it_recovers(broker.data_dir)
    broker.start()
    with Peer(broker.port) as peer:
        assert peer.bodies("a") == bodies
    broker.stop()
    assert verify(broker.data_dir).findings == []
