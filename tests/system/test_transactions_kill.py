"""kill -9 at every step of a commit: the transaction is there whole or not at all, and once after it is repeated."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from qb.core.wire.frames import Frame, MessageType, encode_frame
from qb.storage.verification import verify
from tests.support.brokers import ROOT, BrokerProcess
from tests.support.killing_server import DECIDED, UNDECIDED, WHOLE_DECIDED, WHOLE_UNDECIDED
from tests.support.peers import Peer
from tests.support.transaction_peers import data

pytestmark = [pytest.mark.kill, pytest.mark.timeout(120)]

T = MessageType
PARTITIONS = 4
SCRIPT = ROOT / "tests" / "support" / "killing_server.py"
# Two stages, each with messages for every partition; 16 runs when they are copied.
SHARES = [
    [[f"{stage} {partition} {n} ".encode() + b"." * 480 for n in range(6)] for partition in range(4)]
    for stage in (0, 1)
]
WHOLE = [SHARES[0][partition] + SHARES[1][partition] for partition in range(PARTITIONS)]

StartBroker = Callable[..., BrokerProcess]


class Others(threading.Thread):
    """A publisher to the same partitions, one message after the other, until the broker dies."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self._peer = Peer(port)
        self.acked: list[tuple[int, int, bytes]] = []  # partition, offset, body
        self.some = threading.Event()

    def run(self) -> None:
        with self._peer:
            try:
                for number in range(1_000_000):
                    partition, body = number % PARTITIONS, f"other {number}".encode()
                    answer = self._peer.publish("t", body, number + 1, partition=str(partition))
                    assert answer.properties["status"] == "success", answer.properties
                    self.acked.append((partition, int(answer.properties["offset"]), body))
                    if number == 2 * PARTITIONS:
                        self.some.set()
            except OSError:
                pass


class Subscriber(threading.Thread):
    """Keeps what it is pushed until the broker dies."""

    def __init__(self, port: int, subscription: str = "s") -> None:
        super().__init__(daemon=True)
        self._peer = Peer(port)
        self._peer.ask(T.CREATE_SUBSCRIPTION, 1, subscription_id=subscription, topic="t", start_offset="0")
        self._peer.ask(T.SUBSCRIBE, 2, subscription_id=subscription)
        self.pushed: list[Frame] = []
        self.changed = threading.Condition()

    def run(self) -> None:
        with self._peer:
            try:
                while (frame := self._peer.receive()) is not None:
                    with self.changed:
                        self.pushed.append(frame)
                        self.changed.notify_all()
            except OSError:
                pass

    def of_the_transaction(self) -> list[bytes]:
        return [frame.body for frame in self.pushed if not frame.body.startswith(b"other")]

    def wait_for(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.pushed) >= count, 30)


def stage_all(peer: Peer) -> list[dict[str, Any]]:
    """Stage the transaction; returns the stages as a commit names them."""
    named = []
    for share in SHARES:
        stage = peer.call("begin_transaction", transaction="x", number=1)["stage"]
        first = 0
        for partition, bodies in enumerate(share):
            properties = {"stage": stage, "topic": "t", "partition": str(partition), "first": str(first)}
            assert peer.ask(T.STAGE, 9, data("t", *bodies), **properties).properties["status"] == "success"
            first += len(bodies)
        named.append({"stage": stage, "messages": first})
    return named


def run_into_the_step(broker: BrokerProcess) -> tuple[Others, Subscriber, list[dict[str, Any]]]:
    """Commit while others publish and a subscriber is joined, until the broker has killed itself."""
    named: list[dict[str, Any]] = []
    with Peer(broker.port) as peer:
        peer.hello()
        peer.create_topic("t", partitions=str(PARTITIONS))
        others, subscriber = Others(broker.port), Subscriber(broker.port)
        others.start()
        subscriber.start()
        assert others.some.wait(30)
        try:
            named = stage_all(peer)
            peer.call("commit_transaction", transaction="x", number=1, stages=named)
        except OSError:
            pass
    assert broker.wait() == -9
    others.join(30)
    subscriber.join(30)
    return others, subscriber, named


def transaction_of(seen: list[list[bytes]]) -> list[list[bytes]]:
    return [[body for body in bodies if not body.startswith(b"other")] for bodies in seen]


def look(peer: Peer) -> list[list[bytes]]:
    return [peer.bodies("t", partition) for partition in range(PARTITIONS)]


def check_others(others: Others, seen: list[list[bytes]]) -> None:
    """Everything that was acked is where it was acked, and nothing is there twice."""
    for partition, offset, body in others.acked:
        assert seen[partition][offset] == body
    counts = Counter(body for bodies in seen for body in bodies)
    assert counts.most_common(1)[0][1] == 1


def check_once(broker: BrokerProcess, others: Others) -> None:
    """The whole transaction is there once, in order, for a fetch and for a subscriber."""
    with Peer(broker.port) as peer:
        peer.hello()
        seen = look(peer)
        assert transaction_of(seen) == WHOLE
        check_others(others, seen)
        assert peer.call("list_transactions") == {"stages": [], "committing": [], "unfinished": [], "committed": 1}
        fresh = Subscriber(broker.port, "fresh")
        fresh.start()
        fresh.wait_for(sum(map(len, seen)))
        pushed: list[list[bytes]] = [[] for _ in range(PARTITIONS)]
        for frame in fresh.pushed:
            pushed[int(frame.properties["partition"])].append(frame.body)
        assert pushed == seen
    broker.stop()
    assert list((broker.data_dir / "staged").iterdir()) == []
    assert verify(broker.data_dir).findings == []


def killing(step: str) -> tuple[str, ...]:
    return sys.executable, str(SCRIPT), step


@pytest.mark.parametrize("step", UNDECIDED)
def test_a_kill_before_the_decision_leaves_nothing_and_the_commit_can_be_repeated(start_broker: StartBroker, step: str):
    others, subscriber, named = run_into_the_step(start_broker(prefix=killing(step)))
    assert subscriber.of_the_transaction() == []
    broker = start_broker()
    with Peer(broker.port) as peer:
        peer.hello()
        seen = look(peer)
        assert transaction_of(seen) == [[]] * PARTITIONS
        check_others(others, seen)
        if not named:  # it was killed while staging: what an attempt left goes when another one is committed
            named = stage_all(peer)
        receipt = peer.call("commit_transaction", transaction="x", number=1, stages=named)
        assert (receipt["replayed"], receipt["messages"]) == (False, 48)
    check_once(broker, others)


def check_finished(broker: BrokerProcess, others: Others, named: list[dict[str, Any]]) -> None:
    """The start has finished the transaction; a commit that is repeated finds it done."""
    with Peer(broker.port) as peer:
        peer.hello()
        assert transaction_of(look(peer)) == WHOLE
        receipt = peer.call("commit_transaction", transaction="x", number=1, stages=named)
        assert (receipt["replayed"], receipt["messages"]) == (True, 48)
        for share in receipt["partitions"]:
            assert share["messages"] == 12
            seen = peer.bodies("t", share["partition"])
            assert seen[share["first_offset"]] == WHOLE[share["partition"]][0]
            assert seen[share["last_offset"]] == WHOLE[share["partition"]][-1]
    check_once(broker, others)


@pytest.mark.parametrize("step", DECIDED)
def test_a_kill_after_the_decision_is_finished_by_the_start_and_not_repeated(start_broker: StartBroker, step: str):
    others, subscriber, named = run_into_the_step(start_broker(prefix=killing(step)))
    shown = list(DECIDED).index(step) > list(DECIDED).index("one log shows it")
    if not shown:
        assert subscriber.of_the_transaction() == []
    broker = start_broker()
    finished = "finished transaction 'x' number 1: 48 messages" in broker.log
    if list(DECIDED).index(step) < list(DECIDED).index("it is answered"):
        assert finished  # afterwards the receipt may be durable, since other writes take it along
    elif step == "the receipt is durable":
        assert not finished
    check_finished(broker, others, named)


@pytest.mark.parametrize("again", ["the copy begins", "a run is durable", "all of it is durable"])
def test_a_kill_while_a_start_finishes_the_transaction_is_finished_by_the_next_one(
    start_broker: StartBroker, again: str
):
    broker = start_broker(prefix=killing("a run is durable"))
    others, subscriber, named = run_into_the_step(broker)
    assert subscriber.of_the_transaction() == []
    environment = {name: value for name, value in os.environ.items() if not name.startswith("QB_")}
    environment |= {
        "QB_DATA_DIR": str(broker.data_dir),
        "QB_SERVER_PORT": "0",
        "QB_JSON_PORT": "0",
        "QB_HTTP_PORT": "0",
    }
    for _ in range(2):
        ended = subprocess.run(killing(again), env=environment, capture_output=True, timeout=60, check=False)
        assert ended.returncode == -9, ended.stderr
        assert b"listens" not in ended.stdout
    check_finished(start_broker(), others, named)


def publish_whole(peer: Peer) -> dict[str, Any]:
    """Send the transaction in one frame; returns its receipt."""
    parts = [
        encode_frame(T.STAGE, 0, 0, {"topic": "t", "partition": str(partition)}, data("t", *bodies))
        for partition, bodies in enumerate(WHOLE)
    ]
    answer = peer.ask(T.TRANSACTION, 1, b"".join(parts), transaction="x")
    assert answer.properties["status"] == "success", answer.properties
    return msgspec.json.decode(answer.body)


def run_whole_into_the_step(broker: BrokerProcess) -> tuple[Subscriber, dict[str, Any] | None]:
    """Publish it behind a message in each partition, until the broker has killed itself."""
    receipt = None
    with Peer(broker.port) as peer:
        peer.hello()
        peer.create_topic("t", partitions=str(PARTITIONS))
        subscriber = Subscriber(broker.port)
        subscriber.start()
        for partition in range(PARTITIONS):
            peer.publish("t", b"other", partition + 1, partition=str(partition))
        try:
            receipt = publish_whole(peer)
        except OSError:
            pass
    assert broker.wait() == -9
    subscriber.join(30)
    return subscriber, receipt


@pytest.mark.parametrize("step", WHOLE_UNDECIDED)
def test_a_kill_before_the_decision_of_a_whole_transaction_leaves_nothing(start_broker: StartBroker, step: str):
    subscriber, receipt = run_whole_into_the_step(start_broker(prefix=killing(step)))
    assert receipt is None
    assert subscriber.of_the_transaction() == []
    with Peer(start_broker().port) as peer:
        peer.hello()
        assert look(peer) == [[b"other"]] * PARTITIONS
        assert publish_whole(peer)["replayed"] is False
        assert look(peer) == [[b"other", *bodies] for bodies in WHOLE]


@pytest.mark.parametrize("step", WHOLE_DECIDED)
def test_what_was_shown_or_answered_of_a_whole_transaction_is_at_the_same_offsets_after_a_kill(
    start_broker: StartBroker, step: str
):
    subscriber, receipt = run_whole_into_the_step(start_broker(prefix=killing(step)))
    broker = start_broker()
    with Peer(broker.port) as peer:
        peer.hello()
        peer.publish("t", b"later", 1, partition="0")
        seen = look(peer)
        assert seen == [[b"other", *WHOLE[0], b"later"], *([b"other", *bodies] for bodies in WHOLE[1:])]
        for frame in subscriber.pushed:
            assert seen[int(frame.properties["partition"])][frame.sequence_number] == frame.body
        again = publish_whole(peer)
        assert again["replayed"] is True
        assert receipt is None or receipt | {"replayed": True} == again
    broker.stop()
    assert verify(broker.data_dir).findings == []
