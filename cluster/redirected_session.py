"""A binary peer that follows redirects, at a broker that does not own the cell: its requests are refused."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
import trio

from qb.cluster.cell_view import CellView
from qb.core.rights.known_users import LoggedIn
from qb.core.rights.log_ins import LogIns
from qb.core.wire.clock import now_ms
from qb.core.wire.errors import REPLIES, BrokerError, Forbidden, Unauthenticated
from qb.core.wire.frames import LENGTH_AND_TYPE, PROBE, Frame, MessageType, decode_frame, encode_frame
from qb.doors.binary.replies import refusal, success
from qb.doors.binary.server_connection import InflatedPortion, PublishRun, RefusedFrame, ServerConnection, StageFrame
from qb.doors.transport import Transport

MOST_HELLO = 131_072  # bytes of a HELLO that is looked into
OWNER_WITHIN = 0.5  # seconds for which the answer waits for an owner
IDLE = 60.0  # seconds that such a peer may be silent


def redirects(hello: Frame) -> bool:
    """Say whether a HELLO is from a peer that follows redirects."""
    return "redirect" in hello.properties.get("features", "").split(",")


async def first_frame(peer: Transport) -> tuple[bytes, Frame | None]:
    """Return what the peer has said first, and its HELLO if it is one; b"" if it has gone or said nothing for long."""
    said = b""
    with trio.move_on_after(IDLE):
        while True:
            data = await peer.receive()
            said += data
            if not data or len(said) < LENGTH_AND_TYPE.size:
                if data:
                    continue
                return said, None
            length, kind = LENGTH_AND_TYPE.unpack_from(said)
            if kind != MessageType.HELLO or length > MOST_HELLO:
                return said, None
            if len(said) >= length:
                return said, _decoded(said)
    return b"", None


def _decoded(said: bytes) -> Frame | None:
    try:
        return decode_frame(said)
    except BrokerError:
        return None  # the owner says what is wrong with it


class _VerifyArguments(msgspec.Struct):
    start: bool = False
    nodes: bool = False


async def _describe(view: CellView, arguments: bytes) -> dict[str, Any]:
    return await view.describe()


async def _verify(view: CellView, arguments: bytes) -> dict[str, Any]:
    try:
        wanted = msgspec.json.decode(arguments or b"{}", type=_VerifyArguments)
    except (msgspec.DecodeError, UnicodeDecodeError):
        wanted = _VerifyArguments()
    return view.scrub.verify(start=wanted.start, nodes=wanted.nodes)


OWN_METHODS: Mapping[str, Callable[[CellView, bytes], Awaitable[dict[str, Any]]]] = {
    "cluster": _describe,
    "verify_cell": _verify,
}  # which a broker answers whether it owns the cell or not


class RedirectedSession(LoggedIn):
    """From HELLO to the end of the connection."""

    def __init__(self, view: CellView, log_ins: LogIns, peer: Transport, address: str, max_message_size: int) -> None:
        self._view, self._log_ins, self._peer, self._address = view, log_ins, peer, address
        super().__init__(log_ins.users.without_token(peer.common_name))
        self._connection = ServerConnection(max_message_size)
        self._scope = trio.CancelScope()
        self.changed = self._scope.cancel
        log_ins.users.watch(self)

    async def run(self, said: bytes) -> None:
        """Answer what has come and what comes.

        Returns when the peer has gone, is silent, cannot be understood, or its user has changed.
        """
        with self._scope:
            await self._run(said)

    async def _run(self, said: bytes) -> None:
        data: bytes = said
        while data:
            self._connection.receive(data)
            try:
                while (event := self._connection.next_event()) is not None:
                    await self._answer(event)
            except BrokerError as error:
                self._peer.send(refusal(self._connection.peek_number(), error))
                return
            data = b""
            with trio.move_on_after(IDLE):
                data = await self._peer.receive()

    async def _answer(self, event: Frame | PublishRun | StageFrame | RefusedFrame | InflatedPortion) -> None:
        if isinstance(event, RefusedFrame):
            self._peer.send(refusal(event.number, event.error))
        elif isinstance(event, PublishRun):
            count = self._connection.skip_run(event.route)
            self._peer.send(refusal(event.first_number, self._view.refusal(), count))
        elif isinstance(event, StageFrame):
            self._peer.send(refusal(event.number, self._view.refusal()))
        elif isinstance(event, Frame):
            await self._answer_frame(event)

    async def _answer_frame(self, frame: Frame) -> None:
        if frame.type == MessageType.HEARTBEAT:
            if frame.sequence_number != PROBE:
                self._peer.send(encode_frame(MessageType.HEARTBEAT, frame.sequence_number, now_ms()))
        elif frame.type == MessageType.REQUEST and (own := OWN_METHODS.get(frame.properties.get("method", ""))):
            await self._answer_itself(frame, own)
        else:
            self._log_in(frame)
            if not self._view.lost:
                await self._view.wait_for(self._view.owner, OWNER_WITHIN)
            self._peer.send(refusal(frame.sequence_number, self._view.refusal()))

    async def _answer_itself(self, frame: Frame, own: Callable[[CellView, bytes], Awaitable[dict[str, Any]]]) -> None:
        method = frame.properties["method"]
        if wait := self._log_ins.pace.wait(self._host, trio.current_time()):
            await trio.sleep(wait)
        if self._log_ins.users.enabled and not self.principal.is_admin:
            refused = Unauthenticated if self.principal.is_stranger else Forbidden
            known = "this broker does not know the users of its cell yet" if self._log_ins.users.admits_no_peer else ""
            error = refused(known or "this needs the right admin:*; log in by `token` in HELLO")
            self._note(method, REPLIES[type(error)].code)
            self._peer.send(refusal(frame.sequence_number, error))
            if refused is Unauthenticated:
                self._scope.cancel()
            return
        self._note(method, "allowed")
        self._peer.send(success(frame, body=msgspec.json.encode(await own(self._view, frame.body))))

    @property
    def _host(self) -> str:
        return self._address.rpartition(":")[0]

    def _log_in(self, frame: Frame) -> None:
        """Be the user of a token in HELLO. One that is of no user is for the owner to refuse.

        What is answered to HELLO does not depend on it, so a peer that is sent to the owner need not wait here.
        """
        users = self._log_ins.users
        if not users.enabled or frame.type != MessageType.HELLO or "token" not in frame.properties:
            return
        try:
            self.principal = users.with_token(frame.properties["token"])
        except Unauthenticated:
            self._log_ins.pace.failed(self._host, trio.current_time())
            self._note("log in", "UNAUTHENTICATED")
        else:
            self._note("log in", "ok")

    def _note(self, action: str, outcome: str) -> None:
        if self._log_ins.users.enabled:
            self._log_ins.audit.note(self.principal.name, self._address, "frames", action, [], outcome)
