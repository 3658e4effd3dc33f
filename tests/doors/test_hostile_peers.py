"""Peers that lie, stall, flood and vanish, against a real server process that others go on using."""

from __future__ import annotations

import json
import os
import random
import re
import socket
from collections.abc import Callable, Iterator
from typing import Any

import lz4.frame
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qb import BrokerClient
from qb.core.wire.frames import PROBE, Frame, MessageType, decode_frame, encode_frame, frame_length
from qb.doors.binary.methods import METHODS
from tests.support.brokers import BrokerProcess, free_port
from tests.support.bystanders import GoodClient, memory
from tests.support.peers import Peer
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

MiB = 2**20
MAX_MESSAGE = MiB
StartBroker = Callable[..., BrokerProcess]


@pytest.fixture(scope="module")
def besieged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[BrokerProcess, GoodClient]]:
    """A broker with a good client; after all that this module does to it, both must be as well as before."""
    broker = BrokerProcess(
        tmp_path_factory.mktemp("besieged"),
        max_message_size=MAX_MESSAGE,
        max_partitions=8,
        tail_bytes="4MiB",
        segment_bytes="1MiB",
    )
    try:
        good = GoodClient(broker.port)
        good.wait_for_more()
        before = memory(broker)
        yield broker, good
        good.wait_for_more()
        good.stop()
        with Peer(broker.port) as peer:
            assert peer.bodies("good") == [b"%d" % number for number in range(good.published)]
        assert memory(broker) - before < 64 * MiB
        assert broker.stop() == 0
        assert "Traceback" not in broker.log
        assert "fault of ours" not in broker.log
    finally:
        if broker.process.poll() is None:
            broker.kill()


# Bytes of every kind

names = st.just("hostile") | st.sampled_from(["hostile.2", "", ".", "../../etc/passwd", "x" * 201, "ä", "a\nb"])
numbers = st.integers(-3, 10) | st.sampled_from([2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30])
words = st.text(max_size=20) | st.sampled_from(["1e999", "nan", "-0", "0x10", "٣", "\ud7ff", "true"])
json_values = st.recursive(
    st.none() | st.booleans() | numbers | words | names | st.floats(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words, inner, max_size=3),
    max_leaves=8,
)
sequence_numbers = st.integers(0, 5) | st.sampled_from([PROBE, 2**63, 2**64 - 2])
free_properties = st.dictionaries(
    st.sampled_from(["topic", "partition", "key", "offset", "max_bytes", "max_wait", "protocol", "producer_id"])
    | st.text(st.characters(exclude_characters="=\0", exclude_categories=["Cs"]), min_size=1, max_size=5),
    (words | names | numbers.map(str)).filter(lambda value: "\0" not in value),
    max_size=4,
)
WAITING = {"join_group", "sync_group"}  # these are answered late by design
NAMED = ("topic", "subscription_id", "new_id", "group", "member")


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """A REQUEST of a method that exists, with arguments that may even be right."""
    method = draw(st.sampled_from(sorted(METHODS.keys() - WAITING)))
    fields = METHODS[method].arguments.__struct_fields__
    arguments = {name: draw(names if name in NAMED else json_values) for name in fields if draw(st.integers(0, 4))}
    body = json.dumps(arguments).encode()
    return encode_frame(MessageType.REQUEST, draw(sequence_numbers), 0, {"method": method}, body)


@st.composite
def messages(draw: st.DrawFn) -> bytes:
    """A frame whose topic and subscription may exist, and whose other properties may make sense."""
    known = {"topic": draw(names), "subscription_id": draw(names), "offset": str(draw(numbers))}
    kind = draw(st.just(MessageType.PUBLISH) | st.sampled_from([*MessageType, 0, 33, 2**32 - 1]))
    properties = known | draw(free_properties)
    settle = st.fixed_dictionaries({"acks": st.lists(st.lists(numbers, min_size=2, max_size=4), max_size=2)})
    body = draw(
        st.binary(max_size=50) | json_values.map(json.dumps).map(str.encode) | settle.map(json.dumps).map(str.encode)
    )
    return encode_frame(kind, draw(sequence_numbers), draw(st.sampled_from([0, 1, 2**64 - 1])), properties, body)


@st.composite
def mutations(draw: st.DrawFn, data: bytes) -> bytes:
    """The bytes with a few of them changed, removed or added."""
    changed = bytearray(data)
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(changed)))
        length = draw(st.integers(0, 5))
        changed[at : at + length] = draw(st.binary(max_size=5))
    return bytes(changed)


@st.composite
def compressed(draw: st.DrawFn) -> bytes:
    """A COMPRESSED frame of other frames, whose size and codec may be lies."""
    inside = b"".join(draw(st.lists(messages(), min_size=1, max_size=6)))
    codec, body = draw(st.sampled_from([("zstd", zstandard.compress(inside)), ("lz4", lz4.frame.compress(inside))]))
    about = {"codec": draw(st.just(codec) | words), "size": str(draw(st.just(len(inside)) | numbers))}
    if "\0" in about["codec"]:
        about["codec"] = codec
    return encode_frame(MessageType.COMPRESSED, draw(sequence_numbers), 0, about, draw(st.just(body) | mutations(body)))


COMPRESSING = {"protocol": "1", "compression": "zstd,lz4", "compressed_answers": "zstd"}
valid = st.lists(requests() | messages() | compressed(), min_size=1, max_size=6).map(b"".join)
openings = st.sampled_from(
    [
        b"",
        encode_frame(MessageType.HELLO, 1, 0, {"protocol": "1"}),
        encode_frame(MessageType.HELLO, 1, 0, {"protocol": "1", "producer_id": "new"}),
        encode_frame(MessageType.HELLO, 1, 0, COMPRESSING),
        encode_frame(MessageType.CREATE_TOPIC, 1, 0, {"topic": "hostile", "partitions": "2"})
        + encode_frame(MessageType.CREATE_SUBSCRIPTION, 2, 0, {"topic": "hostile", "subscription_id": "hostile"})
        + encode_frame(MessageType.SUBSCRIBE, 3, 0, {"subscription_id": "hostile"}),
    ]
)
conversations = st.tuples(openings, valid | valid.flatmap(mutations) | st.binary(max_size=200)).map(b"".join)


def send_and_listen(port: int, sent: bytes, pieces: int) -> list[Frame]:
    """Send the bytes in pieces, end, and return all that is answered until the broker closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
        answered = bytearray()
        try:
            step = max(len(sent) // pieces, 1)
            for start in range(0, len(sent), step):
                sock.sendall(sent[start : start + step])
            sock.shutdown(socket.SHUT_WR)
        except OSError as error:
            assert not isinstance(error, TimeoutError)  # the broker has closed already: see what it said
        try:
            while data := sock.recv(65_536):
                answered += data
        except ConnectionError:
            pass
    return list(whole_frames(bytes(answered)))


def whole_frames(data: bytes) -> Iterator[Frame]:
    """Yield the frames; only the last one may be cut, by a reset."""
    at = 0
    while len(data) - at >= 4 and frame_length(data, at) <= len(data) - at:
        yield decode_frame(data, at)
        at += frame_length(data, at)


@given(sent=conversations, kept=st.just(1.0) | st.floats(0, 1), pieces=st.sampled_from([1, 3, 50]))
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_bytes_whatever_disturb_the_broker_or_another_peer(besieged, sent, kept, pieces):
    broker, good = besieged
    for frame in send_and_listen(broker.port, sent[: int(kept * len(sent))], pieces):
        assert frame.properties.get("code") != "INTERNAL", frame
    good.check()
    assert broker.process.poll() is None


def test_two_hundred_peers_that_vanish_in_the_middle_of_a_publish_leave_nothing_behind(besieged):
    broker, good = besieged
    dice = random.Random(4)
    with Peer(broker.port) as watcher:
        watcher.create_topic("vanishing")
        connected, files = watcher.call("server_info")["connections"], open_files(broker)
        for number in range(200):
            peer = Peer(broker.port)
            if number % 2:
                peer.send(MessageType.HELLO, 0, protocol="1", producer_id="new")
            frames = [
                encode_frame(MessageType.PUBLISH, n, 0, {"topic": "vanishing"}, dice.randbytes(dice.randrange(5_000)))
                for n in range(1, 20)
            ]
            burst = b"".join(frames)
            peer.send_bytes(burst[: dice.randrange(len(burst))])
            peer.abort()
        wait_until(lambda: watcher.call("server_info")["connections"] == connected)
        wait_until(lambda: open_files(broker) <= files + 10)  # of logs that were rolled meanwhile
        good.wait_for_more()
        for message in watcher.messages("vanishing"):
            assert message.properties == {"topic": "vanishing"}
        assert watcher.publish("vanishing", b"still here").properties["status"] == "success"


@pytest.mark.parametrize(
    "acks", [[[0, 0, 2**32 - 1]], [[0, 2**63 - 1, 2**32 - 1, 2**32 - 1]], [[0, 0, 2**32 - 1, 1]] * 1_000]
)
def test_acks_of_more_messages_than_there_are_hold_up_no_other(besieged, acks):
    broker, good = besieged
    with Peer(broker.port) as peer:
        peer.hello()
        peer.create_topic("acked")
        named = {"subscription_id": "acked", "topic": "acked"}
        peer.ask(MessageType.CREATE_SUBSCRIPTION, 5, **named)
        assert peer.ask(MessageType.SUBSCRIBE, 6, subscription_id="acked").properties["status"] == "success"
        peer.send(MessageType.SETTLE, 7, json.dumps({"acks": acks}).encode(), subscription_id="acked")
        good.wait_for_more()
        assert is_served(peer)


def open_files(broker: BrokerProcess) -> int:
    return len(os.listdir(f"/proc/{broker.process.pid}/fd"))


def test_what_a_peer_makes_the_broker_remember_of_its_properties_is_bounded(besieged):
    broker, good = besieged
    before = memory(broker)
    with Peer(broker.port) as peer:
        peer.create_topic("wordy")
        for number in range(1_500):
            key = f"{number} " + "k" * 60_000
            assert peer.publish("wordy", b"", key=key).properties["status"] == "success"
        assert memory(broker) - before < 32 * MiB
    good.wait_for_more()


# Peers that stall: a broker with short heartbeats of its own, so that they are dropped soon


@pytest.fixture
def impatient(start_broker: StartBroker) -> BrokerProcess:
    """A broker that drops a peer that it has not heard of, or that has not read, for a second."""
    return start_broker(heartbeat_interval=0.5, tail_bytes="4MiB", max_message_size=MAX_MESSAGE)


@pytest.mark.parametrize("sent", [0, 3, 27, 40, 500])
def test_a_peer_that_stalls_in_the_middle_of_a_frame_is_probed_and_dropped(impatient, sent):
    frame = encode_frame(MessageType.PUBLISH, 1, 0, {"topic": "a"}, b"x" * 1_000)
    with Peer(impatient.port) as staller:
        staller.send_bytes(frame[:sent])
        heard = []
        while (answer := staller.receive()) is not None:
            heard.append((answer.type, answer.sequence_number))
    assert set(heard) == {(MessageType.HEARTBEAT, PROBE)}
    assert "silent for 1 s" in impatient.log


def flood(peer: Peer, data: bytes) -> None:
    """Send the same again and again, reading nothing, until the broker hangs up."""
    peer.socket.settimeout(60)
    try:
        while True:
            peer.send_bytes(data)
    except ConnectionError:
        return


def unreading_peer(broker: BrokerProcess) -> Peer:
    """Return a peer for whom the kernel keeps little."""
    peer = Peer(broker.port)
    peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    return peer


def test_a_peer_that_publishes_and_never_reads_its_acks_costs_little_and_is_dropped(impatient):
    good = GoodClient(impatient.port)
    good.wait_for_more()
    frames = [encode_frame(MessageType.PUBLISH, n, 0, {"topic": "good-too"}, b"x" * 50) for n in range(5_000)]
    with Peer(impatient.port) as other:
        other.create_topic("good-too")
    before = memory(impatient, "VmHWM")
    with unreading_peer(impatient) as peer:
        flood(peer, b"".join(frames))
    assert memory(impatient, "VmHWM") - before < 64 * MiB
    assert was_dropped(impatient)
    good.wait_for_more()
    good.stop()


def was_dropped(broker: BrokerProcess) -> bool:
    return re.search("dropped .*: (has not read|silent for)", broker.log) is not None


def test_a_peer_that_fetches_and_never_reads_the_messages_costs_little_and_is_dropped(impatient):
    with BrokerClient(port=impatient.port) as client:
        client.create_topic("a")
        client.publish_many("a", [bytes(100_000)] * 100)
    good = GoodClient(impatient.port)
    good.wait_for_more()
    before = memory(impatient, "VmHWM")
    fetch = {"topic": "a", "offset": "0", "max_bytes": str(4 * MiB)}
    with unreading_peer(impatient) as peer:
        flood(peer, b"".join([encode_frame(MessageType.FETCH, number, 0, fetch) for number in range(1_000)]))
    assert memory(impatient, "VmHWM") - before < 64 * MiB
    good.wait_for_more()
    good.stop()


@pytest.mark.parametrize("dialect", ["basic", "fast"])
def test_a_subscriber_that_never_reads_its_messages_costs_little_and_is_dropped(impatient, dialect):
    with BrokerClient(port=impatient.port) as client:
        client.create_topic("a")
        client.publish_many("a", [bytes(100_000)] * 1_000)
    good = GoodClient(impatient.port)
    good.wait_for_more()
    before = memory(impatient, "VmHWM")
    with unreading_peer(impatient) as peer:
        if dialect == "fast":
            peer.hello()
        peer.ask(MessageType.CREATE_SUBSCRIPTION, 1, subscription_id="s", topic="a")
        peer.send(MessageType.SUBSCRIBE, 2, subscription_id="s")
        flood(peer, encode_frame(MessageType.HEARTBEAT, 3) * 1_000)
    assert memory(impatient, "VmHWM") - before < 64 * MiB
    good.wait_for_more()
    good.stop()


# Too many


def test_connections_over_the_limit_are_answered_so_and_a_slot_that_is_left_can_be_taken(start_broker):
    broker = start_broker(max_connections=20, json_port=free_port())
    peers = [Peer(broker.port) for _ in range(20)]
    assert all(is_served(peer) for peer in peers)
    json_port = int(broker._settings["json_port"])
    for _ in range(30):
        with socket.create_connection(("127.0.0.1", json_port), timeout=30) as refused:
            assert b"QB_MAX_CONNECTIONS" in refused.makefile("rb").read()
    for _ in range(30):
        with Peer(broker.port) as operator:  # on this machine: there is always one more
            assert is_served(operator)
    assert all(is_served(peer) for peer in peers)
    peers.pop().abort()
    wait_until(lambda: gets_in(broker, peers))
    assert all(is_served(peer) for peer in peers)
    for peer in peers:
        peer.socket.close()
    client = BrokerClient(port=broker.port)
    client.connect(wait=60)
    wait_until(lambda: client.server_info()["connections"] == 1)
    client.disconnect()


def is_served(peer: Peer) -> bool:
    """Say whether the broker answers, in whatever else it has to say."""
    peer.send(MessageType.HEARTBEAT, 7)
    while (answer := peer.receive()) is not None:
        assert answer.properties.get("code") != "INTERNAL"
        if (answer.type, answer.sequence_number) == (MessageType.HEARTBEAT, 7):
            return True
    return False


def gets_in(broker: BrokerProcess, peers: list[Peer]) -> bool:
    """Try to connect; a peer that is let in joins the others."""
    peer = Peer(broker.port)
    peer.send(MessageType.HEARTBEAT, 7)
    answer: Any = peer.receive()
    if answer is not None and answer.type == MessageType.HEARTBEAT:
        peers.append(peer)
        return True
    peer.socket.close()
    return False
