"""COMPRESSED frames at the door of a real broker: stored plain, bounded, and hostile ones hold up no other peer."""

from __future__ import annotations

import zlib

import lz4.frame
import pytest
import zstandard

from qb.core.wire.compression.compressed_frames import compress
from qb.core.wire.frames import Frame, MessageType, encode_frame
from tests.support.brokers import BrokerProcess
from tests.support.bystanders import memory
from tests.support.peers import Peer, stored_messages

COMPRESSED, PUBLISH = MessageType.COMPRESSED, MessageType.PUBLISH
BOTH = "zstd,lz4"


def publishes(topic: str, *bodies: bytes, first: int = 1) -> bytes:
    return b"".join(encode_frame(PUBLISH, n, 0, {"topic": topic}, body) for n, body in enumerate(bodies, first))


def packed(frames: bytes, codec: str = "zstd") -> bytes:
    made = compress(codec, (frames,), 1)
    assert made is not None
    return made


def a_peer(port: int, topic: str) -> Peer:
    peer = Peer(port)
    answer = peer.hello(compression=BOTH, producer_id="new")
    assert answer.properties["compression"] == BOTH
    peer.create_topic(topic)
    return peer


def await_stored(peer: Peer, count: int) -> None:
    """Return when so many publishes, numbered from 1 on, are answered, in runs."""
    stored = 0
    while stored < count:
        answer = peer.receive()
        assert answer is not None
        assert answer.properties["status"] == "success", answer.properties
        assert answer.sequence_number == stored + 1
        stored += int(answer.properties["count"])
    assert stored == count


def refusal(peer: Peer) -> Frame:
    """Return the last frame before the broker closed the connection."""
    last = None
    while (frame := peer.receive()) is not None:
        last = frame
    assert last is not None
    return last


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_a_run_in_a_compressed_frame_is_stored_plain_and_answered_like_any_run(shared, topic, codec):
    bodies = [b'{"number": %d}' % n for n in range(500)]
    with a_peer(shared.port, topic) as peer:
        peer.send_bytes(packed(publishes(topic, *bodies), codec) + publishes(topic, b"behind it", first=501))
        await_stored(peer, 501)
        assert [frame.body for frame in stored_messages(peer.fetch(topic, 0, max_messages="1000").body)] == [
            *bodies,
            b"behind it",
        ]


def test_a_message_of_many_portions_and_frames_that_arrive_byte_by_byte_are_stored_whole(shared, topic):
    large = b'{"row": 17}' * 200_000
    sent = packed(publishes(topic, b"first", large)) + packed(publishes(topic, *[b"x" * 40] * 100, first=3))
    with a_peer(shared.port, topic) as peer:
        peer.send_bytes(sent[:7])
        for at in range(7, 60):
            peer.send_bytes(sent[at : at + 1])
        peer.send_bytes(sent[60:])
        await_stored(peer, 102)
        with Peer(shared.port) as reader:
            assert [message.body for message in reader.messages(topic)] == [b"first", large, *[b"x" * 40] * 100]


def test_the_numbers_in_a_compressed_frame_are_idempotent(shared, topic):
    frames = packed(publishes(topic, *[b"%04d" % n for n in range(100)]))
    with a_peer(shared.port, topic) as peer:
        for expected in (None, "true"):
            peer.send_bytes(frames)
            answer = peer.receive()
            assert answer is not None
            assert answer.properties.get("duplicate") == expected
        assert len(peer.messages(topic)) == 100


def test_stage_frames_may_be_compressed(shared, topic):
    with a_peer(shared.port, topic) as peer:
        stage = peer.call("begin_transaction", transaction=topic)["stage"]
        frames = b"".join(encode_frame(MessageType.DATA, 0, 0, {"topic": topic}, b"staged") for _ in range(200))
        about = {"stage": stage, "topic": topic, "partition": "0", "first": "0"}
        peer.send_bytes(packed(encode_frame(MessageType.STAGE, 9, 0, about, frames)))
        answer = peer.receive()
        assert answer is not None
        assert (answer.sequence_number, answer.properties["messages"]) == (9, "200")


def zeros(size: int) -> bytes:
    """Return a zstd stream of so many zero bytes, made without holding them."""
    made = zstandard.ZstdCompressor(level=1).compressobj()
    block = bytes(1 << 20)
    return b"".join([*[made.compress(block) for _ in range(size >> 20)], made.flush()])


BOMB = zeros(1 << 30)
FEW = publishes("t", *[b"a"] * 100)
HOSTILE = {
    "a bomb that says what it is": ("zstd", BOMB, 1 << 30),
    "a bomb that lies": ("zstd", BOMB, 4096),
    "a bomb within the limit": ("zstd", zeros(16 << 20), 16 << 20),
    "a bomb of lz4": ("lz4", lz4.frame.compress(bytes(64 << 20)), 64 << 20),
    "a size that lies upwards": ("zstd", zstandard.compress(FEW), len(FEW) + 1),
    "a size that lies downwards": ("lz4", lz4.frame.compress(FEW), len(FEW) - 1),
    "a truncated body": ("zstd", zstandard.compress(FEW)[:-3], len(FEW)),
    "garbage": ("zstd", b"garbage" * 100, len(FEW)),
    "no body": ("lz4", b"", len(FEW)),
    "another codec than it says": ("lz4", zstandard.compress(FEW), len(FEW)),
    "a codec that there is not": ("gzip", zlib.compress(FEW), len(FEW)),
    "a compressed frame in a compressed frame": ("zstd", zstandard.compress(packed(FEW)), len(packed(FEW))),
    "a request in a compressed frame": (
        "zstd",
        zstandard.compress(hello := encode_frame(MessageType.HEARTBEAT, 5) * 40),
        len(hello),
    ),
    "half a frame": ("zstd", zstandard.compress(FEW[:-1]), len(FEW) - 1),
    "a length that is none": ("zstd", zstandard.compress(bytes(2000)), 2000),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_compressed_frame_ends_its_own_connection_alone(shared, topic, name):
    codec, body, size = HOSTILE[name]
    with a_peer(shared.port, topic) as good, a_peer(shared.port, topic) as peer:
        peer.send(COMPRESSED, 7, body, codec=codec, size=str(size))
        answer = refusal(peer)
        assert answer.properties["code"] == "BAD_FRAME", answer.properties
        assert good.publish(topic, b"still here").properties["status"] == "success"
    assert "fault of ours" not in shared.log


def test_without_an_agreement_in_hello_a_compressed_frame_is_refused(shared, topic):
    frames = packed(publishes(topic, *[b"%04d" % n for n in range(100)]))
    for properties in ({}, {"compression": "gzip"}, {"compression": "lz4"}):
        with Peer(shared.port) as peer:
            answer = peer.hello(**properties)
            assert answer.properties.get("compression") == ("lz4" if "lz4" in properties.values() else None)
            peer.send_bytes(frames)
            refused = refusal(peer)
            assert (refused.sequence_number, refused.properties["code"]) == (1, "BAD_FRAME")
            assert "not agreed in HELLO" in refused.properties["error"]
    with Peer(shared.port) as basic:
        basic.send_bytes(frames)
        assert refusal(basic).properties["code"] == "BAD_FRAME"


def test_an_operator_says_which_codecs_peers_may_use(start_broker):
    for setting, agreed in (("lz4", "lz4"), ("", None)):
        with Peer(start_broker(f"with-{setting}", compression=setting).port) as peer:
            assert peer.hello(compression=BOTH, compressed_answers="zstd").properties.get("compression") == agreed


def test_what_peers_inflate_counts_in_the_budget_of_unfinished_input(start_broker):
    """A frame whose inflated bytes are over what all peers may hold is refused, and one within it is stored."""
    broker: BrokerProcess = start_broker(max_unfinished_bytes="1MiB")
    with Peer(broker.port) as peer:
        peer.hello(compression=BOTH)
        peer.create_topic("t")
        peer.send_bytes(packed(publishes("t", bytes(900_000))))
        answer = peer.receive()
        assert answer is not None
        assert answer.properties["status"] == "success"
        peer.send_bytes(packed(publishes("t", bytes(2 << 20), first=2)))
        refused = refusal(peer)
        assert refused.properties["code"] == "LIMIT_REACHED"
        assert "QB_MAX_UNFINISHED_BYTES" in refused.properties["error"]


def test_forty_peers_that_inflate_a_message_each_hold_no_more_than_the_budget(start_broker):
    """Each sends 2 KB that stand for 16 MiB; one byte is missing, so that nothing is stored."""
    broker: BrokerProcess = start_broker(max_unfinished_bytes="32MiB")
    frame = packed(publishes("t", bytes(16 << 20))[:-1])
    with Peer(broker.port) as maker:
        maker.create_topic("t")
    before = memory(broker, "VmHWM")
    peers = [Peer(broker.port, timeout=50) for _ in range(40)]
    for peer in peers:
        peer.hello(compression=BOTH)
    for peer in peers:
        peer.send_bytes(frame)
    codes = {refusal(peer).properties["code"] for peer in peers}
    for peer in peers:
        peer.socket.close()
    assert codes == {"BAD_FRAME"}
    assert memory(broker, "VmHWM") - before < 256 << 20
    with Peer(broker.port) as reader:
        assert reader.publish("t", b"still here").properties["offset"] == "0"


def test_answers_are_compressed_for_a_peer_that_asks_for_it(shared, topic):
    with a_peer(shared.port, topic) as peer:
        peer.send_bytes(packed(publishes(topic, *[b'{"number": %d}' % n for n in range(500)])))
        peer.receive()
    with Peer(shared.port) as peer:
        answer = peer.hello(compression=BOTH, compressed_answers="lz4")
        assert answer.properties["compressed_answers"] == "lz4"
        peer.send(MessageType.FETCH, 3, topic=topic, partition="0", offset="0")
        frame = peer.receive()
        assert frame is not None
        assert (frame.type, frame.properties["codec"]) == (COMPRESSED, "lz4")
        assert len(lz4.frame.decompress(frame.body)) == int(frame.properties["size"])
    with Peer(shared.port) as peer:
        answer = peer.hello(compression="zstd", compressed_answers="lz4")
        assert "compressed_answers" not in answer.properties
        assert peer.fetch(topic, 0).type == MessageType.ACK
