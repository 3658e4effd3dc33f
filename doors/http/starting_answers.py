"""What peers of all doors are answered while the broker starts: that it lives, and is not ready."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import NamedTuple

import trio

from qb.core.wire.errors import Recovering
from qb.doors.binary.replies import refusal
from qb.doors.http.requests.http_errors import raw_response
from qb.doors.json_lines.json_answers import failure, words

HEAD_LIMIT = 16_384
PATIENCE = 5.0  # seconds
MOST = 256  # connections at once; one more is closed at once
SHORT = 3.0  # seconds of a start in which peers wait for the broker itself; clients wait 5 for an answer
_WHY = "starting: the broker recovers its data directory and takes up its subscriptions"
_RECOVERING = Recovering(_WHY)
_HEALTHY = raw_response(200, {"status": "healthy"})
_NOT_READY = raw_response(503, {"status": "recovering", "reason": _WHY, "error": _WHY, "code": "RECOVERING"})


class StartingDoor(NamedTuple):
    """What a door answers until the broker is there."""

    listeners: Sequence[socket.socket]
    answer: Callable[[bytes], bytes | None]  # to what a peer has sent; None: more of it is to come
    silent_for: float = 0.0  # seconds in which peers are not even accepted


def answer_to_frames(received: bytes) -> bytes | None:
    """Refuse a peer of the binary door by the answer to its first frame."""
    return refusal(0, _RECOVERING)


def answer_to_lines(received: bytes) -> bytes | None:
    """Refuse a peer of the JSON-lines door by the answer to its first line."""
    return failure(words(_RECOVERING)) if b"\n" in received or len(received) >= HEAD_LIMIT else None


def answer_to_http(received: bytes) -> bytes | None:
    """Answer a request: alive, but not ready."""
    if b"\r\n\r\n" not in received and len(received) < HEAD_LIMIT:
        return None
    return _HEALTHY if received.startswith(b"GET /health ") else _NOT_READY


class StartingAnswers:
    """Answers at all doors from run() to end()."""

    def __init__(self, doors: Sequence[StartingDoor]) -> None:
        self._doors = doors
        self._scope = trio.CancelScope()
        self._ended = trio.Event()

    async def run(self) -> None:
        """Answer until end() is called, and then those who were accepted before."""
        async with trio.open_nursery() as answers:
            with self._scope:
                async with trio.open_nursery() as accepting:
                    for door in self._doors:
                        for listener in door.listeners:
                            accepting.start_soon(_accept, listener, door, answers)
            self._ended.set()

    async def end(self) -> None:
        """Return when the listeners are free."""
        self._scope.cancel()
        await self._ended.wait()


async def _accept(listener: socket.socket, door: StartingDoor, answers: trio.Nursery) -> None:
    await trio.sleep(door.silent_for)
    while True:
        await trio.lowlevel.wait_readable(listener)
        try:
            peer, _ = listener.accept()
        except OSError:
            await trio.sleep(0.1)
            continue
        if len(answers.child_tasks) >= MOST:
            peer.close()
            continue
        peer.setblocking(False)
        answers.start_soon(_answer, trio.SocketStream(trio.socket.from_stdlib_socket(peer)), door)


async def _answer(stream: trio.SocketStream, door: StartingDoor) -> None:
    """Answer one request and close."""
    received, answer = b"", None
    try:
        async with stream:
            with trio.move_on_after(PATIENCE):
                while answer is None:
                    data = await stream.receive_some()
                    if not data:
                        return
                    received += data
                    answer = door.answer(received)
                await stream.send_all(answer)
                await stream.send_eof()
                while await stream.receive_some():  # what is not read when a connection is closed takes the answer away
                    pass
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        pass
