"""One connection of HTTP/1.1: requests are taken one after another, and answered in that order."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from qb.doors.http.requests.http_answers import HttpAnswer, encode_answer, encode_head
from qb.doors.http.requests.http_errors import HttpError, answer_of
from qb.doors.http.requests.http_peer import HttpPeer
from qb.doors.http.requests.request_bodies import PeerGone, Receive
from qb.doors.http.requests.request_parser import RequestHead, RequestParser
from qb.doors.http.streams.event_stream import STREAM_HEADERS, STREAM_TYPE, EventStream
from qb.storage.signals import Signal

READ_AHEAD = 65_536  # bytes that have come and were not taken: with more, the peer is not read
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"


class HttpRequest(NamedTuple):
    """A request whose body has not been read."""

    head: RequestHead
    receive: Receive  # raises HttpError too
    peer: HttpPeer


Respond = Callable[[HttpRequest], Awaitable[HttpAnswer | EventStream]]


class HttpConnection:
    """The state of one connection. `read` and `converse` are two tasks, which end with the connection."""

    def __init__(self, peer: HttpPeer, respond: Respond) -> None:
        """`respond` is called with each request. Raises PeerGone, and nothing else."""
        self.peer = peer
        self.is_idle = True  # is no request being answered?
        self.is_heard = False  # set when something comes
        self.is_gone = False  # does the peer send no more?
        self._transport = peer.transport
        self._respond = respond
        self._parser = RequestParser()
        self._came = Signal()
        self._room = Signal()
        self._expects = False  # does the peer wait for our word before it sends the body?
        self._discards = False  # is what comes not kept any more?
        self._ends = False

    # Reading

    async def read(self) -> None:
        """Keep what the peer sends, until it sends no more."""
        while await self._transport.attend(self._take):
            while self._parser.unread > READ_AHEAD and not self._discards:
                await self._room.wait()
        self.is_gone = True
        self._came.set()

    def _take(self, data: memoryview) -> bool:
        self.is_heard = True
        if self._discards:
            return True
        self._parser.receive(data)
        self._came.set()
        self.peer.received(len(data))
        return self._parser.unread <= READ_AHEAD

    async def wait_until_gone(self) -> None:
        """Return when the peer sends no more."""
        while not self.is_gone:
            await self._came.wait()

    def end(self) -> None:
        """Take no further request."""
        self._ends = True
        self._came.set()

    # Requests

    async def converse(self) -> None:
        """Answer requests until the peer sends no more, one of them was the last, or end() is called."""
        try:
            while (head := await self._next_head()) is not None:
                request = HttpRequest(head, self._next_part, self.peer)
                if not await self._answer(request, await self._respond(request)):
                    return
                self.peer.began(self._parser.unread)
        except HttpError as error:  # nothing behind it can be understood
            await self._send_last(encode_answer(answer_of(error), keeps_alive=False))
        except PeerGone:
            pass

    async def _next_head(self) -> RequestHead | None:
        """Return the next head; None: there is none, or it is not wanted."""
        self.is_idle = True
        head = None
        while not self._ends and (head := self._parser.next_head()) is None and not self.is_gone:
            self._room.set()
            await self._came.wait()
        if head is None:
            return None
        self.is_idle = False
        self._expects = head.is_http_1_1 and head.headers.get("expect", "").lower() == "100-continue"
        if self._parser.has_body:
            self.peer.began(self._parser.unread)
        else:
            self.peer.finished()
        return head

    async def _next_part(self) -> tuple[bytes, bool]:
        """Return the next part of a body and whether there may be more. Raises PeerGone, HttpError."""
        while (part := self._parser.next_part()) is None:
            if self.is_gone:
                raise PeerGone
            if self._expects:
                self._expects = False
                self._transport.send(CONTINUE)
            self._room.set()
            await self._came.wait()
        return part, self._parser.has_body

    # Answers

    async def _answer(self, request: HttpRequest, answer: HttpAnswer | EventStream) -> bool:
        """Send an answer; returns whether another request may follow."""
        keeps_alive = request.head.keeps_alive and not self._ends and self._reach_end_of_body()
        if isinstance(answer, EventStream):
            return await self._push(answer, request.head.is_http_1_1) and keeps_alive and not self._ends
        encoded = encode_answer(answer, keeps_alive=keeps_alive, is_head=request.head.method == "HEAD")
        if not keeps_alive:
            await self._send_last(encoded)
            return False
        self._transport.send(encoded)
        await self._transport.wait_for_turn(0, len(encoded))
        return not self._transport.gone

    def _reach_end_of_body(self) -> bool:
        """Skip what is left of a body, if all of it has come; else returns False."""
        while self._parser.has_body:
            if self._parser.next_part() is None:
                return False
        return True

    async def _send_last(self, encoded: bytes) -> None:
        """Send the last answer. A peer that reads none before it has sent everything is read meanwhile."""
        self._discards = True
        self._room.set()
        self._transport.send(encoded)
        await self._transport.wait_for_room(0)

    async def _push(self, stream: EventStream, is_http_1_1: bool) -> bool:
        """Send an answer without end; returns whether it has ended well. Its parts are chunks, except in HTTP/1.0."""
        headers = {**STREAM_HEADERS, **({"transfer-encoding": "chunked"} if is_http_1_1 else {})}
        head = encode_head(200, STREAM_TYPE, headers, keeps_alive=is_http_1_1)
        send = self._transport.send

        def send_chunk(data: bytes) -> None:
            send(b"%x\r\n%b\r\n" % (len(data), data) if is_http_1_1 else data)

        send(head)
        await stream.push(send_chunk, self.wait_until_gone)
        if is_http_1_1 and not self.is_gone:
            send(LAST_CHUNK)
        await self._transport.wait_for_room(0)
        return is_http_1_1 and not self._transport.gone
