"""The STAGE frames of one peer on their way into stages, and the answers to them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import trio

from qb.core.broker.message_broker import MessageBroker
from qb.core.wire.errors import BadRequest, BrokerError
from qb.core.wire.staged_frames import check_messages
from qb.doors.binary.methods import StageArguments, arguments_from_text
from qb.doors.binary.replies import refusal, staged
from qb.doors.binary.server_connection import StageFrame
from qb.storage.signals import Signal

AT_ONCE = 1 << 20  # bytes that are checked in one step of the event loop


class StageRequests:
    """Takes STAGE frames in the order in which they come; each is answered when its messages are durable."""

    def __init__(self, broker: MessageBroker, send: Callable[[bytes], None]) -> None:
        self._broker = broker
        self._send = send
        self._unsettled = 0  # frames that are not yet answered
        self._all_settled = Signal()

    async def stage(self, frame: StageFrame) -> None:
        """Carry a frame to its stage; waits while that is full."""
        self._unsettled += 1
        answer = partial(self._answer, frame.number)
        try:
            to = arguments_from_text(StageArguments, frame.properties)
            await self._broker.ready_topic(to.topic)
            count = await self._count(frame, to.topic)
            where = to.topic, to.partition
            stage = self._broker.transactions.stage(to.stage, where, to.first, count, frame.data, answer)
        except BrokerError as error:
            answer(error, 0)
            return
        if not stage.has_room:
            await stage.wait_for_room()

    async def _count(self, frame: StageFrame, topic: str) -> int:
        """Return how many messages a frame has. Raises BadRequest."""
        count, at, most = 0, frame.body_at, self._broker.settings.server.max_message_size
        while at < len(frame.data):
            checked, at = check_messages(frame.data, at, topic, most, AT_ONCE)
            count += checked
            if at < len(frame.data):
                await trio.lowlevel.checkpoint()
        if not count:
            raise BadRequest("a STAGE frame needs at least one message in its body")
        return count

    def _answer(self, number: int, error: BrokerError | None, messages: int) -> None:
        self._send(staged(number, messages) if error is None else refusal(number, error))
        self._unsettled -= 1
        if not self._unsettled:
            self._all_settled.set()

    async def wait_until_settled(self) -> None:
        """Return when every frame has been answered."""
        while self._unsettled:
            await self._all_settled.wait()
