"""The STAGE frames of one peer on their way into stages, and the answers to them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from qb.core.broker.message_broker import MessageBroker
from qb.core.wire.errors import REPLIES, BrokerError
from qb.doors.binary.methods import StageArguments, arguments_from_text
from qb.doors.binary.replies import SessionEnded, refusal, staged
from qb.doors.binary.server_connection import StageFrame
from qb.doors.peer_identity import PeerIdentity
from qb.storage.signals import Signal


class StageRequests:
    """Takes STAGE frames in the order in which they come; each is answered when its messages are durable."""

    def __init__(
        self,
        broker: MessageBroker,
        send: Callable[[bytes], None],
        identity: PeerIdentity,
        failed: Callable[[Exception], None],
    ) -> None:
        """`failed` is called with a fault of ours that leaves a frame without an answer."""
        self._broker = broker
        self._failed = failed
        self._send = send
        self._identity = identity
        self._unsettled = 0  # frames that are not yet answered
        self._all_settled = Signal()

    async def stage(self, frame: StageFrame) -> None:
        """Carry a frame to its stage; waits while that is full."""
        self._unsettled += 1
        answer = partial(self._answer, frame.number)
        try:
            to = arguments_from_text(StageArguments, frame.properties)
            self._identity.check_stage(to.stage, to.topic)
            count = await self._broker.appends.admit_staged(
                to.topic, frame.data, frame.body_at, self._identity.principal.name
            )
            where = to.topic, to.partition
            stage = self._broker.transactions.stage(to.stage, where, to.first, count, frame.data, answer)
        except BrokerError as error:
            answer(error, 0)
            if not REPLIES[type(error)].survives:
                raise SessionEnded(str(error)) from None
            return
        if not stage.has_room:
            await stage.wait_for_room()

    def _answer(self, number: int, error: BrokerError | None, messages: int) -> None:
        try:
            self._send(staged(number, messages) if error is None else refusal(number, error))
        except Exception as fault:
            self._failed(fault)
        self._unsettled -= 1
        if not self._unsettled:
            self._all_settled.set()

    async def wait_until_settled(self) -> None:
        """Return when every frame has been answered."""
        while self._unsettled:
            await self._all_settled.wait()
