"""Count the files and module boundaries that a publish, a delivery and an ack cross: `python tools/trace_path.py`.

A broker runs in this process and a peer speaks frames to it over a socket. While the broker handles one message, every
call of a function of ours is recorded. A boundary is a call from one of our files into another; code of Python's or
of trio's between the two does not count. With --list the boundaries are printed in the order of the calls.
"""

from __future__ import annotations

import socket
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import trio

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT / "src"))

from qb.core.settings import ServerSettings, Settings, StorageSettings  # noqa: E402
from qb.core.wire.frames import MessageType, decode_frame, encode_frame, frame_length  # noqa: E402
from qb.doors.listening import BinaryDoor, ListeningDoor, listen  # noqa: E402
from qb.server import serve  # noqa: E402
from qb.storage.local_engine import LocalEngine  # noqa: E402

OURS = (str(PROJECT / "src"), *(str(PROJECT / room) for room in ("core", "storage", "doors")))
REPEATS = 60  # the first calls build what later ones reuse; of all, the shortest trace counts

Boundaries = list[tuple[str, str]]  # the file of the caller and of the called, in the order of the calls


class Trace:
    """The boundaries between files of ours that calls cross while it is on, in all threads."""

    def __init__(self) -> None:
        self.boundaries: Boundaries = []
        self._on = False
        threading.setprofile(self._note)  # threads that start from now on
        sys.setprofile(self._note)

    def __enter__(self) -> None:
        self.boundaries = []
        self._on = True

    def __exit__(self, *_: object) -> None:
        self._on = False

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if self._on and event == "call" and (callee := _file(frame)) is not None:
            caller = _nearest(frame.f_back)
            if caller is not None and caller != callee:
                self.boundaries.append((caller, callee))


def _file(frame: FrameType) -> str | None:
    name = frame.f_code.co_filename
    return str(Path(name).resolve().relative_to(PROJECT)) if name.startswith(OURS) else None


def _nearest(frame: FrameType | None) -> str | None:
    while frame is not None:
        if (found := _file(frame)) is not None:
            return found
        frame = frame.f_back
    return None


class Peer:
    """A socket that speaks frames with no code of ours between it and the broker."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._unread = b""
        self._number = 0

    def send(self, kind: MessageType, properties: dict[str, str], body: bytes = b"") -> Callable[[], None]:
        """Encode a frame; returns what sends it."""
        self._number += 1
        return partial(self._socket.sendall, encode_frame(kind, self._number, 0, properties, body))

    async def received(self) -> bytes:
        """Return the next frame."""
        while len(self._unread) < 4 or len(self._unread) < int.from_bytes(self._unread[:4], "big"):
            await trio.lowlevel.wait_readable(self._socket)
            self._unread += self._socket.recv(65536)
        size = frame_length(self._unread)
        frame, self._unread = self._unread[:size], self._unread[size:]
        return frame

    async def ask(self, kind: MessageType, properties: dict[str, str], body: bytes = b"") -> None:
        """Send a frame and expect an answer that is no refusal."""
        self.send(kind, properties, body)()
        answer = decode_frame(await self.received())
        assert answer.properties.get("status") != "error", answer.properties


async def traced(trace: Trace, *step: tuple[Callable[[], None], Peer]) -> Boundaries:
    """Return the boundaries crossed from the first sending until each of these peers has received a frame."""
    with trace:
        for send, _ in step:
            send()
        for _, peer in step:
            await peer.received()
    return trace.boundaries


async def measure(trace: Trace, port: int) -> dict[str, Boundaries]:
    """Return the boundaries of a publish, of its delivery to a subscriber, and of the ack of that."""
    publisher, subscriber = Peer(port), Peer(port)
    for peer in (publisher, subscriber):
        await peer.ask(MessageType.HELLO, {"protocol": "1"})
    for topic in ("alone", "pushed"):
        await publisher.ask(MessageType.CREATE_TOPIC, {"topic": topic})
    await publisher.ask(MessageType.CREATE_SUBSCRIPTION, {"subscription_id": "s", "topic": "pushed"})
    await subscriber.ask(MessageType.SUBSCRIBE, {"subscription_id": "s"})

    def publish(topic: str) -> Callable[[], None]:
        return publisher.send(MessageType.PUBLISH, {"topic": topic}, b"x" * 100)

    def acked(offset: int) -> Callable[[], None]:
        ack = subscriber.send(MessageType.SETTLE, {"subscription_id": "s"}, b'{"acks":[[0,%d,1,1]]}' % offset)
        heartbeat = subscriber.send(MessageType.HEARTBEAT, {})  # is answered, so the SETTLE before it was handled
        return lambda: (ack(), heartbeat())[0]

    found: dict[str, list[Boundaries]] = {}

    async def note(what: str, *step: tuple[Callable[[], None], Peer]) -> None:
        found.setdefault(what, []).append(await traced(trace, *step))

    for offset in range(REPEATS):
        await note("publish", (publish("alone"), publisher))
        await note("publish and delivery", (publish("pushed"), publisher), (lambda: None, subscriber))
        await note("ack and heartbeat", (acked(offset), subscriber))
        await note("heartbeat", (subscriber.send(MessageType.HEARTBEAT, {}), subscriber))
    quietest = {what: min(traces, key=len) for what, traces in found.items()}  # no other task ran in between
    return {
        "publish": quietest["publish"],
        "delivery": without(quietest["publish and delivery"], quietest["publish"]),
        "ack": without(quietest["ack and heartbeat"], quietest["heartbeat"]),
    }


def without(both: Boundaries, one: Boundaries) -> Boundaries:
    """Return what the longer trace has more, in its order."""
    left = Counter(one)
    rest: Boundaries = []
    for pair in both:
        left[pair] -= 1
        if left[pair] < 0:
            rest.append(pair)
    return rest


async def main() -> None:
    """Start a broker, measure, print."""
    trace = Trace()
    with tempfile.TemporaryDirectory() as directory:
        settings = Settings(server=ServerSettings(port=0), storage=StorageSettings(data_dir=directory))
        engine = await trio.to_thread.run_sync(LocalEngine.open, settings.storage)
        door = ListeningDoor("frames", BinaryDoor, listen("127.0.0.1", 0))
        stop = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve, settings, engine, [door], stop)
            found = await measure(trace, door.listeners[0].getsockname()[1])
            stop.set()
        engine.close()
    for what, boundaries in found.items():
        files = {file for pair in boundaries for file in pair}
        print(f"{what}: {len(files)} files, {len(boundaries)} boundaries, {len(set(boundaries))} different ones")
        if "--list" in sys.argv[1:]:
            print(*(f"    {caller} -> {callee}" for caller, callee in boundaries), sep="\n")


if __name__ == "__main__":
    trio.run(main)
