"""A plain socket that speaks frames: what a peer in any language could send, and what it would see."""

from __future__ import annotations

import socket
import struct
from typing import Any

import msgspec
import trio

from qb.core.wire.frames import Frame, MessageType, decode_frame, encode_frame, frame_length


def stored_messages(stored: bytes) -> list[Frame]:
    """Return the messages among stored frames, without their seals."""
    found, at = [], 0
    while at < len(stored):
        frame = decode_frame(stored, at)
        assert frame.type in (MessageType.DATA, MessageType.SEAL)
        if frame.type == MessageType.DATA:
            found.append(frame)
        at += frame_length(stored, at)
    return found


def identity(hello: Frame) -> dict[str, str]:
    """Return what a later HELLO needs to continue as the producer that this answer gave out."""
    return {name: hello.properties[name] for name in ("producer_id", "producer_secret")}


def die_with(port: int, subscription_id: str, count: int) -> None:
    """Join, take so many messages, and be gone without a word; returns when the broker knows."""
    with Peer(port) as observer:
        with Peer(port) as peer:
            peer.hello()
            peer.ask(MessageType.SUBSCRIBE, 1, subscription_id=subscription_id, announces="true")
            while observer.call("describe_subscription", subscription_id=subscription_id)["in_flight"] < count:
                pass
        while observer.call("describe_subscription", subscription_id=subscription_id)["subscribers"]:
            pass


class Peer:
    """One connection to a broker, byte by byte under the test's control."""

    def __init__(self, port: int, timeout: float = 20.0, host: str = "127.0.0.1") -> None:
        self.socket = socket.create_connection((host, port), timeout=timeout)
        self._unread = b""

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.socket.close()

    def send(self, type: int, number: int = 0, body: bytes = b"", **properties: str) -> None:
        self.socket.sendall(encode_frame(type, number, 0, properties, body))

    def send_bytes(self, data: bytes) -> None:
        self.socket.sendall(data)

    def receive(self) -> Frame | None:
        """Return the next frame, or None when the broker has closed the connection."""
        while len(self._unread) < 4 or len(self._unread) < frame_length(self._unread):
            try:
                data = self.socket.recv(262_144)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._unread += data
        frame = decode_frame(self._unread)
        self._unread = self._unread[frame_length(self._unread) :]
        return frame

    def ask(self, type: int, number: int = 1, body: bytes = b"", **properties: str) -> Frame:
        """Send a request and return the answer to it. Raises ConnectionError if the broker goes away meanwhile."""
        self.send(type, number, body, **properties)
        while True:
            answer = self.receive()
            if answer is None:
                raise ConnectionError("the broker closed the connection")
            if answer.type == MessageType.ACK and answer.sequence_number == number:
                return answer

    def hello(self, **properties: str) -> Frame:
        return self.ask(MessageType.HELLO, 2**63, protocol="1", **properties)

    def create_topic(self, topic: str, **properties: str) -> Frame:
        return self.ask(MessageType.CREATE_TOPIC, 2**63 + 1, topic=topic, **properties)

    def publish(self, topic: str, body: bytes, number: int = 1, **properties: str) -> Frame:
        return self.ask(MessageType.PUBLISH, number, body, topic=topic, **properties)

    def call(self, method: str, **arguments: Any) -> Any:
        """Return what a method answers; a refusal fails the test."""
        answer = self.ask(MessageType.REQUEST, 2**63 + 2, msgspec.json.encode(arguments), method=method)
        assert answer.properties["status"] == "success", answer.properties
        return msgspec.json.decode(answer.body)

    def fetch(self, topic: str, offset: int = -2, partition: int = 0, **properties: str) -> Frame:
        """Return the answer to a FETCH."""
        properties |= {"topic": topic, "partition": str(partition), "offset": str(offset)}
        return self.ask(MessageType.FETCH, 2**63 + 3, **properties)

    def messages(self, topic: str, partition: int = 0) -> list[Frame]:
        """Return every stored message of a partition, from the earliest to the end; their offsets must be dense."""
        found: list[Frame] = []
        offset = -2
        while True:
            answer = self.fetch(topic, offset, partition, max_messages="100000")
            assert answer.properties["status"] == "success", answer.properties
            got = stored_messages(answer.body)
            assert len(got) == int(answer.properties["count"])
            if not got:
                return found
            first = int(answer.properties["offset"])
            assert [message.sequence_number for message in got] == list(range(first, first + len(got)))
            assert offset in (-2, first)
            found += got
            offset = first + len(got)

    def bodies(self, topic: str, partition: int = 0) -> list[bytes]:
        """Return the bodies of every stored message of a partition."""
        return [message.body for message in self.messages(topic, partition)]

    def abort(self) -> None:
        """Vanish: the other side gets a reset."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


class TrioPeer:
    """The same plain peer on trio."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._unread = b""

    async def send(self, type: int, number: int = 0, body: bytes = b"", **properties: str) -> None:
        await self.stream.send_all(encode_frame(type, number, 0, properties, body))

    async def receive(self) -> Frame | None:
        while len(self._unread) < 4 or len(self._unread) < frame_length(self._unread):
            try:
                data = await self.stream.receive_some()
            except trio.BrokenResourceError:
                return None
            if not data:
                return None
            self._unread += data
        frame = decode_frame(self._unread)
        self._unread = self._unread[frame_length(self._unread) :]
        return frame

    async def ask(self, type: int, number: int = 1, body: bytes = b"", **properties: str) -> Frame:
        """Send a request and return the next frame."""
        await self.send(type, number, body, **properties)
        answer = await self.receive()
        assert answer is not None, "the broker closed the connection"
        return answer

    async def call(self, method: str, **arguments: Any) -> Any:
        """Return what a method answers, or the code of its refusal."""
        answer = await self.ask(MessageType.REQUEST, 5, msgspec.json.encode(arguments), method=method)
        return answer.properties.get("code") or msgspec.json.decode(answer.body)

    async def publish(self, topic: str, body: bytes = b"x", number: int = 1, **properties: str) -> Frame:
        return await self.ask(MessageType.PUBLISH, number, body, topic=topic, **properties)
