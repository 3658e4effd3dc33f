"""A broker in memory, on a real socket, that fails where a test wants it.

It speaks enough of the fast dialect for the clients: HELLO, PUBLISH with producer ids, STAGE, REQUEST, HEARTBEAT. Each
connection follows the next plan; when the plans are used up, it behaves.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from qb.core.wire.frames import PROBE, Frame, MessageType, decode_frame, encode_frame, frame_length


@dataclass
class Plan:
    """What happens on one connection. The numbers count the publishes that it stores."""

    drop_after: int | None = None  # hang up once so many are stored and acked; the next ones are not stored
    lose_acks_after: int | None = None  # store so many without acking any of them, then hang up
    goodbye_after: int | None = None  # as drop_after, but say goodbye
    lose_stages_after: int | None = None  # take so many STAGE frames without answering any of them, then hang up
    lose_answer_to: str = ""  # hang up instead of answering this method
    silent: bool = False  # after the welcome, answer nothing at all
    mute: bool = False  # do not even answer HELLO
    turn_away: str = ""  # refuse the connection with this code
    refuse_hello: str = ""  # answer HELLO with this code, and hang up
    new_producer: bool = False  # give a new producer id, whichever was asked for
    probe: bool = False  # after the welcome, ask whether the peer is there
    ack_one_by_one: bool = False
    greeting: bytes = b""  # bytes to send instead of reading anything


@dataclass
class Message:
    topic: str
    partition: int
    offset: int
    body: bytes
    timestamp: int
    properties: dict[str, str] = field(default_factory=dict)


class HangUp(Exception):
    """The plan says that the connection ends here."""


class ScriptedBroker:
    """Listens at once. Use it as a context manager."""

    def __init__(self, *plans: Plan, partitions: int = 1, max_message_size: int = 1 << 20, port: int = 0) -> None:
        self.messages: list[Message] = []
        self.hellos: list[dict[str, str]] = []
        self.frames: list[Frame] = []  # everything received but PUBLISH
        self.refuse: dict[bytes, str] = {}  # body -> code
        self.refuse_stages: dict[int, str] = {}  # `first` -> code
        self.answers: dict[str, Any] = {}  # method -> what it is answered with; others are answered with the question
        self.staged = 0  # messages
        self.connections = 0
        self.duplicates = 0
        self.ignored = 0  # frames that silent connections received
        self._plans = list(plans)
        self._partitions, self._max_message_size = partitions, max_message_size
        self._next_offsets = [0] * partitions
        self._seen: dict[tuple[str, int], Message] = {}
        self._changed = threading.Condition()
        self._sockets: set[socket.socket] = set()
        self._closed = False
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> ScriptedBroker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            sockets = [self._listener, *self._sockets]
        for sock in sockets:
            _hang_up(sock)
        self._listener.close()

    def stop_listening(self) -> None:
        """Accept no more connections; those that are open stay."""
        _hang_up(self._listener)
        self._listener.close()

    @property
    def bodies(self) -> list[bytes]:
        with self._changed:
            return [message.body for message in self.messages]

    def wait_for(self, condition: Callable[[], object], timeout: float = 20) -> None:
        """Return when the condition holds; it is checked whenever something arrives."""
        with self._changed:
            assert self._changed.wait_for(condition, timeout), "the scripted broker waited in vain"

    def drop_connections(self) -> None:
        """Close every connection."""
        with self._changed:
            for sock in self._sockets:
                _hang_up(sock)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with self._changed:
                self.connections += 1
                plan = self._plans.pop(0) if self._plans else Plan()
                self._sockets.add(sock)
                self._changed.notify_all()
            threading.Thread(target=self._serve, args=(sock, plan), daemon=True).start()

    def _serve(self, sock: socket.socket, plan: Plan) -> None:
        try:
            _Peer(self, sock, plan).run()
        except (HangUp, OSError):
            pass
        finally:
            with self._changed:
                self._sockets.discard(sock)
            _hang_up(sock)
            sock.close()

    def _store(self, producer: str, frame: Frame) -> tuple[Message, bool]:
        """Return the message and whether it was there already."""
        key = (producer, frame.sequence_number)
        if producer and key in self._seen:
            self.duplicates += 1
            return self._seen[key], True
        partition = int(frame.properties.get("partition", len(self.messages) % self._partitions))
        offset = self._next_offsets[partition]
        self._next_offsets[partition] += 1
        message = Message(frame.properties["topic"], partition, offset, frame.body, frame.timestamp, frame.properties)
        self.messages.append(message)
        self._seen[key] = message
        return message, False


class _Peer:
    """One connection."""

    def __init__(self, broker: ScriptedBroker, sock: socket.socket, plan: Plan) -> None:
        self.broker, self.sock, self.plan = broker, sock, plan
        self.producer = ""
        self.stored = self.stages = 0
        self.acks: list[dict[str, Any]] = []

    def run(self) -> None:
        if self.plan.greeting:
            self.sock.sendall(self.plan.greeting)
            raise HangUp
        buffer = bytearray()
        while data := self.sock.recv(1 << 18):
            buffer += data
            with self.broker._changed:
                try:
                    for frame in _frames(buffer):
                        self.handle(frame)
                finally:
                    replies = self.flush()
                    self.broker._changed.notify_all()
            self.sock.sendall(replies)

    def handle(self, frame: Frame) -> None:
        if frame.type != MessageType.PUBLISH:
            self.broker.frames.append(frame)
        if frame.type == MessageType.HELLO:
            self.hello(frame)
        elif self.plan.silent:
            self.broker.ignored += 1
        elif frame.type == MessageType.PUBLISH:
            self.publish(frame)
        elif frame.type == MessageType.STAGE:
            self.stage(frame)
        elif frame.type == MessageType.REQUEST:
            self.request(frame)
        elif frame.type == MessageType.HEARTBEAT and frame.sequence_number != PROBE:
            self.sock.sendall(encode_frame(MessageType.HEARTBEAT, frame.sequence_number))

    def hello(self, frame: Frame) -> None:
        self.broker.hellos.append(frame.properties)
        if self.plan.mute:
            return
        if self.plan.turn_away:
            refusal = {"status": "error", "code": self.plan.turn_away, "error": "go away"}
            self.sock.sendall(encode_frame(MessageType.ACK, 0, properties=refusal))
            raise HangUp
        if self.plan.refuse_hello:
            refusal = {"status": "error", "code": self.plan.refuse_hello, "error": "not you"}
            self.sock.sendall(encode_frame(MessageType.ACK, frame.sequence_number, properties=refusal))
            raise HangUp
        answer = {"status": "success", "protocol": "1", "server": "qb/scripted", "heartbeat_interval": "30"}
        answer["max_message_size"] = str(self.broker._max_message_size)
        if asked := frame.properties.get("producer_id"):
            is_new = asked == "new" or self.plan.new_producer
            self.producer = str(1000 + self.broker.connections) if is_new else asked
            answer |= {"producer_id": self.producer, "producer_secret": f"secret of {self.producer}"}
        self.sock.sendall(encode_frame(MessageType.ACK, frame.sequence_number, properties=answer))
        if self.plan.probe:
            self.sock.sendall(encode_frame(MessageType.HEARTBEAT, PROBE))

    def publish(self, frame: Frame) -> None:
        if code := self.broker.refuse.get(frame.body):
            self.acks.append({"number": frame.sequence_number, "count": 1, "code": code})
            return
        message, duplicate = self.broker._store(self.producer, frame)
        self.stored += 1
        self.add_ack(frame.sequence_number, message, duplicate)
        self.follow_plan()

    def follow_plan(self) -> None:
        if self.stored == self.plan.lose_acks_after:
            self.acks.clear()
            raise HangUp
        if self.stored == self.plan.drop_after:
            self.sock.sendall(self.flush())
            raise HangUp
        if self.stored == self.plan.goodbye_after:
            goodbye = encode_frame(MessageType.GOODBYE, properties={"reason": "the test says so"})
            self.sock.sendall(self.flush() + goodbye)
            raise HangUp

    def add_ack(self, number: int, message: Message, duplicate: bool) -> None:
        last = self.acks[-1] if self.acks and not self.plan.ack_one_by_one else {"code": "none"}
        follows = "code" not in last and (
            (last["number"] + last["count"], last["partition"], last["offset"] + last["count"], last["duplicate"])
            == (number, message.partition, message.offset, duplicate)
        )
        if follows:
            last["count"] += 1
            return
        ack = {"number": number, "count": 1, "partition": message.partition, "offset": message.offset}
        self.acks.append(ack | {"duplicate": duplicate, "topic": message.topic})

    def flush(self) -> bytes:
        acks, self.acks = self.acks, []
        if self.plan.lose_acks_after is not None:
            return b""
        return b"".join(map(_encode_ack, acks))

    def stage(self, frame: Frame) -> None:
        """Count what was not there yet, as the broker does; a gap is refused."""
        first = int(frame.properties["first"])
        self.stages += 1
        if code := self.broker.refuse_stages.get(first, "OUT_OF_SEQUENCE" if first > self.broker.staged else ""):
            properties = {"status": "error", "code": code, "error": f"refused: {code}"}
        else:
            self.broker.staged = max(self.broker.staged, first + len(list(_frames(bytearray(frame.body)))))
            properties = {"status": "success", "messages": str(self.broker.staged)}
        if self.plan.lose_stages_after is None:
            self.sock.sendall(encode_frame(MessageType.ACK, frame.sequence_number, properties=properties))
        elif self.stages == self.plan.lose_stages_after:
            raise HangUp

    def request(self, frame: Frame) -> None:
        method, arguments = frame.properties["method"], json.loads(frame.body or b"{}")
        if method == self.plan.lose_answer_to:
            raise HangUp
        properties = {"status": "success"}
        if arguments.get("topic") == "unknown":
            properties = {"status": "error", "code": "UNKNOWN_TOPIC", "error": "there is no topic 'unknown'"}
        echo = {"method": method, "arguments": arguments}
        body = json.dumps(self.broker.answers.get(method, [echo] if method.startswith("list_") else echo)).encode()
        self.sock.sendall(encode_frame(MessageType.ACK, frame.sequence_number, properties=properties, body=body))


def _encode_ack(ack: dict[str, Any]) -> bytes:
    if "code" in ack:
        properties = {"status": "error", "code": ack["code"], "error": f"refused: {ack['code']}"}
    else:
        properties = {"status": "success", "topic": ack["topic"], "partition": str(ack["partition"])}
        properties |= {"offset": str(ack["offset"]), "durability": "fsynced"}
        properties |= {"duplicate": "true"} if ack["duplicate"] else {}
    properties["count"] = str(ack["count"])
    return encode_frame(MessageType.ACK, ack["number"], 1_700_000_000_123, properties)


def _frames(buffer: bytearray) -> Iterator[Frame]:
    """Yield the whole frames and remove them."""
    while len(buffer) >= 4 and len(buffer) >= (length := frame_length(buffer)):
        frame = decode_frame(buffer)
        del buffer[:length]
        yield frame


def _hang_up(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
