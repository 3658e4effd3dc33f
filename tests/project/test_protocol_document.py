"""The examples in docs/PROTOCOL.md are a dialogue with the real session code, byte for byte.

`python tests/project/test_protocol_document.py` plays it again and writes the examples anew.
"""

from __future__ import annotations

import socket
import sys
import tempfile
from unittest import mock

import trio

from tests.support.brokers import ROOT

sys.path.insert(0, str(ROOT))

from qb.core.broker.message_broker import MessageBroker
from qb.core.settings import Settings, StorageSettings
from qb.core.wire.frames import HEAD, Frame, MessageType, decode_frame, encode_frame, frame_length
from qb.doors.binary.session import Session
from qb.doors.transport import Transport
from qb.storage.local_engine import LocalEngine

DOCUMENT = ROOT / "docs" / "PROTOCOL.md"
BEGIN = "<!-- examples: begin -->\n"
END = "<!-- examples: end -->\n"
NOON = 1_767_268_800_000  # 2026-01-01 12:00 UTC, in ms
T = MessageType
STAGE = "0000000000000007"  # what the broker calls the stage when chance gives it a 7

# What the client sends, how many frames it waits for, and what is shown of it.
Step = tuple[str, list[bytes], int]

BASIC: list[Step] = [
    ("Make a topic", [encode_frame(T.CREATE_TOPIC, 1, NOON, {"topic": "orders", "partitions": "2"})], 1),
    ("Publish one message", [encode_frame(T.PUBLISH, 2, NOON, {"topic": "orders", "key": "k1"}, b"hello")], 1),
    ("A refusal", [encode_frame(T.PUBLISH, 3, NOON, {"topic": "ordres"}, b"hello")], 1),
    ("A heartbeat and its answer", [encode_frame(T.HEARTBEAT, 4, NOON)], 1),
    (
        "Make a subscription",
        [encode_frame(T.CREATE_SUBSCRIPTION, 6, NOON, {"subscription_id": "till", "topic": "orders"})],
        1,
    ),
    ("Join it: the answer, then the message", [encode_frame(T.SUBSCRIBE, 7, NOON, {"subscription_id": "till"})], 2),
    ("Leave it", [encode_frame(T.UNSUBSCRIBE, 8, NOON, {"subscription_id": "till"})], 1),
    ("Remove it", [encode_frame(T.DELETE_SUBSCRIPTION, 9, NOON, {"subscription_id": "till"})], 1),
    ("An unknown type", [encode_frame(99, 5, NOON)], 1),
    ("Bytes that are no frame: the answer, and the broker closes", [b"GET / HT"], 1),
]
FAST: list[Step] = [
    (
        "Hello, asking for idempotent publishing",
        [encode_frame(T.HELLO, 2**63, NOON, {"protocol": "1", "client_id": "till-1", "producer_id": "new"})],
        1,
    ),
    (
        "A run of two publishes, one answer",
        [
            encode_frame(T.PUBLISH, 1, NOON, {"topic": "orders", "partition": "1"}, b"a"),
            encode_frame(T.PUBLISH, 2, NOON, {"topic": "orders", "partition": "1"}, b"b"),
        ],
        1,
    ),
    (
        "The second one sent again",
        [encode_frame(T.PUBLISH, 2, NOON, {"topic": "orders", "partition": "1"}, b"b")],
        1,
    ),
    (
        "Its number with another message",
        [encode_frame(T.PUBLISH, 2, NOON, {"topic": "orders", "partition": "1"}, b"c")],
        1,
    ),
    ("A request by name", [encode_frame(T.REQUEST, 2**63 + 1, NOON, {"method": "list_topics"})], 1),
    (
        "Fetch: stored frames, a seal behind them",
        [encode_frame(T.FETCH, 2**63 + 3, NOON, {"topic": "orders", "partition": "1", "offset": "2"})],
        1,
    ),
    (
        "Fetch in bulk: where its frames start, then the whole batch that holds the offset",
        [encode_frame(T.FETCH, 2**63 + 10, NOON, {"topic": "orders", "partition": "1", "offset": "2", "bulk": "1"})],
        1,
    ),
    (
        "Begin a transaction",
        [
            encode_frame(
                T.REQUEST,
                2**63 + 7,
                NOON,
                {"method": "begin_transaction"},
                b'{"transaction":"night-run","number":12}',
            )
        ],
        1,
    ),
    (
        "Stage a message: durable, and not visible",
        [
            encode_frame(
                T.STAGE,
                2**63 + 8,
                NOON,
                {"stage": STAGE, "topic": "orders", "partition": "0", "first": "0"},
                encode_frame(T.DATA, 0, NOON, {"topic": "orders"}, b"c"),
            )
        ],
        1,
    ),
    (
        "Commit it",
        [
            encode_frame(
                T.REQUEST,
                2**63 + 9,
                NOON,
                {"method": "commit_transaction"},
                b'{"transaction":"night-run","number":12,"stages":[{"stage":"0000000000000007","messages":1}]}',
            )
        ],
        1,
    ),
    (
        "A whole transaction in one frame",
        [
            encode_frame(
                T.TRANSACTION,
                2**63 + 10,
                NOON,
                {"transaction": "night-run", "number": "13"},
                encode_frame(
                    T.STAGE,
                    0,
                    NOON,
                    {"topic": "orders", "partition": "0"},
                    encode_frame(T.DATA, 0, NOON, {"topic": "orders"}, b"d"),
                ),
            )
        ],
        1,
    ),
    (
        "Make a subscription and join it: the answers, then a run of messages",
        [
            encode_frame(
                T.REQUEST,
                2**63 + 4,
                NOON,
                {"method": "create_subscription"},
                b'{"subscription_id":"kitchen","topic":"orders","start_offset":1}',
            ),
            encode_frame(T.SUBSCRIBE, 2**63 + 5, NOON, {"subscription_id": "kitchen", "announces": "true"}),
        ],
        4,
    ),
    (
        "Ack both; a SETTLE is not answered, the heartbeat behind it is",
        [
            encode_frame(T.SETTLE, 1, NOON, {"subscription_id": "kitchen"}, b'{"acks":[[1,1,2,1]]}'),
            encode_frame(T.HEARTBEAT, 2**63 + 6, NOON),
        ],
        1,
    ),
    ("A second HELLO is refused", [encode_frame(T.HELLO, 2**63 + 2, NOON, {"protocol": "1"})], 1),
]


def zstd(data: bytes) -> bytes:
    """Return a frame of zstd with one raw block: the same bytes whichever version of the package there is."""
    return bytes.fromhex("28b52ffd20") + bytes([len(data)]) + (len(data) << 3 | 1).to_bytes(3, "little") + data


PUBLISHED = b"".join(encode_frame(T.PUBLISH, n, NOON, {"topic": "orders", "partition": "1"}, b"e") for n in (1, 2))
COMPRESSING: list[Step] = [
    ("Hello, offering compression", [encode_frame(T.HELLO, 2**63, NOON, {"protocol": "1", "compression": "zstd"})], 1),
    (
        "Two publishes in a compressed frame (its zstd frame has one block, which is raw)",
        [encode_frame(T.COMPRESSED, 1, NOON, {"codec": "zstd", "size": str(len(PUBLISHED))}, zstd(PUBLISHED))],
        1,
    ),
]
IN_A_RUN = b"".join(
    bytes(16) + NOON.to_bytes(8) + bytes(4) + properties + bytes(4) + body
    for properties, body in ((b"topic=orders\0partition=1\0", b"f"), (b"topic=orders\0partition=1\0key=k1\0", b"gg"))
)
TABLE = bytes.fromhex("00000001 00000002 00000019 00000020")
IN_RUNS: list[Step] = [
    (
        "Hello, from a peer that sends tables",
        [encode_frame(T.HELLO, 2**63, NOON, {"protocol": "1", "features": "publish_runs"})],
        1,
    ),
    (
        "Two publishes with a table of their lengths",
        [encode_frame(T.PUBLISH_RUN, 1, 0, {"count": "2"}, TABLE + IN_A_RUN)],
        1,
    ),
]


async def play(broker: MessageBroker, steps: list[Step], *, goodbye: bool) -> str:
    ours, theirs = socket.socketpair()
    session = Session(broker, Transport(theirs), "example")
    stream = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
    unread, shown = b"", []

    async def receive() -> bytes:
        nonlocal unread
        while len(unread) < 4 or len(unread) < frame_length(unread):
            unread += await stream.receive_some()
        frame, unread = unread[: frame_length(unread)], unread[frame_length(unread) :]
        return frame

    async with trio.open_nursery() as nursery:
        nursery.start_soon(session.run)
        for title, sent, answers in steps:
            await stream.send_all(b"".join(sent))
            received = [await receive() for _ in range(answers)]
            marked = any(b"bulk=1" in frame for frame in sent)
            lines = [show(">", frame) for frame in sent] + [show("<", frame, marked) for frame in received]
            shown.append(f"**{title}**\n```\n" + "\n".join(lines) + "\n```\n")
        if goodbye:
            session.drain()
            shown.append(f"**The broker shuts down**\n```\n{show('<', await receive())}\n```\n")
        await stream.aclose()
    return "\n".join(shown)


def show(arrow: str, data: bytes, marked: bool = False) -> str:
    """Return a frame as hex, a field a line, with its meaning; `marked` if an index of the frames in it comes first."""
    if len(data) < 32:
        return f"{arrow} {data.hex(' ', 4)}    ({data!r})"
    frame: Frame = decode_frame(data)
    names = {kind.value: kind.name for kind in MessageType}
    total, kind, number, timestamp, length = HEAD.unpack_from(data)
    body_at = HEAD.size + length
    lines = [f"{arrow} {total:08x} {kind:08x} {number:016x} {timestamp:016x} {length:08x}   {names.get(kind, kind)}"]
    at = HEAD.size
    for name, value in frame.properties.items():
        size = len(f"{name}={value}".encode()) + 1
        lines.append(f"  {data[at : at + size].hex()}   {name}={value}")
        at += size
    if kind in (MessageType.DELIVER, MessageType.STAGE, MessageType.TRANSACTION) or (
        kind == MessageType.ACK and "offset" in frame.properties and frame.body
    ):
        marks = 4 * int(frame.properties["count"]) if marked else 0
        between = f" {frame.body[:marks].hex(' ', -4)}   where they start;" if marked else "  "
        lines.append(f"  {data[body_at : body_at + 4].hex()}{between} the body is these frames:")
        lines += [f"    {line}" for inner in _split(frame.body[marks:]) for line in show("-", inner).splitlines()]
        return "\n".join(lines)
    if kind == MessageType.PUBLISH_RUN:
        table = frame.body[: 8 * int(frame.properties["count"])]
        length = data[body_at : body_at + 4].hex()
        lines.append(f"  {length} {table.hex(' ', -4)}   lengths of bodies, of properties; the frames:")
        at, lengths = len(table), [int.from_bytes(table[at : at + 4]) for at in range(0, len(table), 4)]
        for body, properties in zip(lengths[: len(lengths) // 2], lengths[len(lengths) // 2 :], strict=True):
            following = at + 32 + properties + body
            lines.append(f"    - {frame.body[at:following].hex()}")
            at = following
        return "\n".join(lines)
    try:
        body = f"   {frame.body.decode()}" if frame.body else ""
    except UnicodeDecodeError:
        body = "   crc32, count, data_length, producer ranges" if kind == MessageType.SEAL else ""
    lines.append(f"  {data[body_at : body_at + 4].hex()} {frame.body.hex()}{body}".rstrip())
    return "\n".join(lines)


def _split(data: bytes) -> list[bytes]:
    frames = []
    while data:
        frames.append(data[: frame_length(data)])
        data = data[frame_length(data) :]
    return frames


async def render(directory: str) -> str:
    settings = Settings(storage=StorageSettings(data_dir=directory))
    engine = LocalEngine.open(settings.storage, clock=lambda: NOON)
    try:
        with (
            mock.patch("time.time_ns", lambda: NOON * 1_000_000),
            mock.patch("secrets.randbits", lambda bits: 7),
            mock.patch("secrets.token_hex", lambda size: "07" * size),
        ):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(engine.run)
                broker = MessageBroker(engine, settings)
                nursery.start_soon(broker.run)
                basic = await play(broker, BASIC, goodbye=False)
                fast = await play(broker, FAST, goodbye=True)
                compressing = await play(broker, COMPRESSING, goodbye=False)
                in_runs = await play(broker, IN_RUNS, goodbye=False)
                nursery.cancel_scope.cancel()
    finally:
        engine.close()
    return (
        f"### A basic peer\n\n{basic}\n### A fast peer\n\n{fast}\n### A peer that compresses\n\n{compressing}\n"
        f"### A peer that sends tables\n\n{in_runs}"
    )


async def test_every_example_is_what_the_code_sends_and_answers(tmp_path):
    text = DOCUMENT.read_text()
    examples = text[text.index(BEGIN) + len(BEGIN) : text.index(END)]
    assert examples == await render(str(tmp_path)), "play it again: python tests/project/test_protocol_document.py"


def test_there_is_an_example_of_every_frame():
    examples = DOCUMENT.read_text().partition(BEGIN)[2]
    for kind in MessageType:
        assert f"   {kind.name}\n" in examples, kind


def test_the_document_names_every_type_and_every_code():
    from qb.core.wire.errors import Code

    text = DOCUMENT.read_text()
    for kind in MessageType:
        assert f"| {kind.value} | {kind.name} |" in text
    for code in Code:
        assert f"`{code}`" in text


if __name__ == "__main__":
    whole = DOCUMENT.read_text()
    with tempfile.TemporaryDirectory() as data:
        new = trio.run(render, data)
    DOCUMENT.write_text(whole[: whole.index(BEGIN) + len(BEGIN)] + new + whole[whole.index(END) :])
