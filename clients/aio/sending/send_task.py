"""What a producer does behind the caller's back: it cuts batches, sends pieces, and reports what became of them."""

from __future__ import annotations

from qb.clients.aio.methods.publishing import AsyncPublishMethods
from qb.clients.aio.sending.send_handles import OnDelivery, call_back, caller_id
from qb.clients.aio.waiting import AsyncGuard, now
from qb.clients.producing.batch_routing import pieces_of
from qb.clients.producing.buffered_messages import BufferedMessages
from qb.clients.producing.message_notes import MessageNote
from qb.clients.producing.producer_options import ProducerOptions
from qb.clients.producing.send_batch import Delivery, SendBatch, SendPiece, messages_are
from qb.clients.protocol.client_errors import BrokerUnavailable, ConnectionLost, QBError, RequestTimedOut
from qb.clients.protocol.reconnecting import log
from qb.clients.tracing import end_batch, tracing
from qb.core.wire.frames import Frames


class AsyncSendTask:
    """One producer at work, from its first message until stop()."""

    def __init__(
        self,
        client: AsyncPublishMethods,
        buffered: BufferedMessages,
        changed: AsyncGuard,
        plain: MessageNote,
        options: ProducerOptions,
        on_delivery: OnDelivery | None,
    ) -> None:
        self._client, self._link, self._buffered, self._changed = client, client._link, buffered, changed
        self._queue, self._plain, self._options, self._on_delivery = buffered.queue, plain, options, on_delivery
        self._stopped = False
        self._reporter: int | None = None  # who calls `on_delivery` now
        self._unheard: list[Exception] = []  # refusals of messages whose answers no handle waits for
        client._background.start(f"qb produces {plain.topic}", self._run)
        if on_delivery is not None:
            client._background.start(f"qb reports {plain.topic}", self._report_forever)

    def stop(self, error: QBError) -> None:
        """Give up all that is not finished, with this error, and end."""
        self.give_up(error)
        with self._changed:
            self._stopped, unreported = True, [*self._queue.answered]
            self._queue.answered.clear()
            for batch in unreported:
                self._buffered.finish(batch)
            self._changed.notify_all()
        for batch in unreported:
            _log_failure(batch)

    def check_caller(self) -> None:
        """Raise RuntimeError if the caller is `on_delivery`, which must not wait for itself."""
        if self._reporter is not None and self._reporter == caller_id():
            raise RuntimeError("flush() and close() wait for on_delivery: it must not call them")

    @property
    def awaits_answers(self) -> bool:
        """Is anything on its way?"""
        return bool(self._queue.in_flight)

    def give_up(self, error: QBError) -> None:
        """Have all that is not settled fail: with this error, or as uncertain what is on its way."""
        with self._changed:
            self._buffered.close_batch()
            self._queue.give_up(error)
            pieces = self._queue.in_flight
            self._changed.notify_all()
        for piece in pieces:
            self._abandon(piece)

    def _abandon(self, piece: SendPiece) -> None:
        """Wait no more for the answers to a piece."""
        assert piece.unacked is not None
        self._link.abandon(piece.unacked)
        self._answered(piece)

    # Sending

    async def _run(self) -> None:
        try:
            while await self._has_work():
                with self._link.attended():
                    while not self._stopped and (self._must_report or not self._queue.is_idle):
                        await self._step()
        finally:
            self.stop(ConnectionLost("the client has ended before the message was sent"))

    async def _has_work(self) -> bool:
        """Wait until there is something to send; False at the end."""
        with self._changed:
            while not self._stopped:
                self._buffered.close_if_due(now())
                if self._must_report or not self._queue.is_idle:
                    return True
                await self._changed.wait(self._buffered.wait(now()))
        return False

    async def _step(self) -> None:
        with self._changed:
            self._buffered.close_if_due(now())
            step = self._queue.next_step(now())
            if step is None and not self._must_report:
                await self._changed.wait(self._buffered.wait(now()))
        if isinstance(step, SendBatch):
            await self._cut(step)
        elif step is not None and step.unacked is not None:
            self._abandon(step)
        elif step is not None:
            await self._send(step)
        if self._must_report:
            await self._report()

    async def _cut(self, batch: SendBatch) -> None:
        """Cut a batch into pieces; the broker is asked for the number of partitions every now and then."""
        client, topic = self._client, batch.topic
        count = await client._partitions_of(topic)
        turn = client._routes.turn(topic) % count
        pieces = pieces_of(batch, self._plain, count, turn)
        client._routes.pass_turn(topic, turn + 1)
        with self._changed:
            if self._queue.in_hand is batch:
                self._queue.cut(pieces, client._conversation.max_message_size)
                self._changed.notify_all()

    async def _send(self, piece: SendPiece) -> None:
        """Send a piece, once there is a connection and room."""
        patience = self._client._request_timeout
        for attempt in range(self._options.retries + 1):
            try:
                await self._link.transmit(lambda: self._compose(piece), now() + patience)
                return
            except (BrokerUnavailable, RequestTimedOut) as error:
                failure: QBError = error
            except ConnectionLost as error:
                failure = error
                break
            if attempt < self._options.retries:
                await self._pause(self._options.retry_backoff)
        with self._changed:
            if self._queue.in_hand is piece:
                self._queue.in_hand = None
                self._queue.fail(piece, failure)
                self._finish_answered()

    def _compose(self, piece: SendPiece) -> tuple[SendPiece, Frames]:
        """Number a piece that is still wanted. Called when it is its turn on the connection."""
        conversation, options, closed = self._client._conversation, self._options, self._queue.in_hand is not piece
        if not closed:
            piece.on_answered = self._answered
            piece.unacked = conversation.publish(piece.form, piece.bodies, piece, options.compression)
            if (spans := tracing()) is not None:
                piece.span = spans.batch(self._client._sender(piece.batch.topic), piece.properties, len(piece.bodies))
            with self._changed:
                closed = self._queue.in_hand is not piece
                if not closed:
                    self._queue.sent(piece, now() + self._client._request_timeout * (options.retries + 1))
                    self._finish_answered()
        if closed:
            if piece.unacked is not None:
                conversation.abandon(piece.unacked)
            raise ConnectionLost("the producer was closed before the message was sent")
        assert piece.unacked is not None
        return piece, conversation.to_send(piece.unacked)

    async def _pause(self, seconds: float) -> None:
        until = now() + seconds
        with self._changed:
            await self._changed.wait_for(lambda: self._stopped or now() >= until, seconds)

    # Reporting

    def _answered(self, piece: SendPiece) -> None:
        """Take in the answers to a piece. May be called by the link, with its lock held."""
        if piece.span is not None:
            failure = piece.unacked.failure() if piece.unacked is not None else None
            end_batch(piece.span, failure.error if failure is not None else None)
        with self._changed:
            error = self._queue.answer(piece)
            if error is not None:
                self._unheard.append(error)
            self._finish_answered()
            self._changed.notify_all()

    @property
    def _must_report(self) -> bool:
        return bool(self._unheard or (self._queue.answered and self._on_delivery is None))

    def _finish_answered(self) -> None:
        """Finish what needs no report; with the lock held."""
        answered = self._queue.answered
        while answered and not answered[0].failed and self._on_delivery is None:
            self._buffered.finish(answered.popleft())

    async def _report_forever(self) -> None:
        while not self._stopped:
            with self._changed:
                if not self._queue.answered and not self._stopped:
                    await self._changed.wait()
            await self._report()

    async def _report(self) -> None:
        """Report what became of the batches that are settled, and finish them."""
        while self._unheard:
            text = "a message for topic %s that was sent with acks=none is not stored: %s"
            log.error(text, self._plain.topic, self._unheard.pop())
        while self._queue.answered:
            batch = self._queue.answered[0]
            _log_failure(batch)
            if self._on_delivery is not None:
                for delivery in batch.deliveries():
                    await self._call_back(self._on_delivery, delivery)
            with self._changed:
                if self._queue.answered:  # else stop() has finished it
                    self._buffered.finish(self._queue.answered.popleft())
                    self._changed.notify_all()

    async def _call_back(self, on_delivery: OnDelivery, delivery: Delivery) -> None:
        self._reporter = caller_id()
        try:
            await call_back(on_delivery, delivery)
        except Exception:
            log.exception("on_delivery of a producer for topic %s has raised", self._plain.topic)
        finally:
            self._reporter = None


def _log_failure(batch: SendBatch) -> None:
    if batch.failed:
        log.error("%s not stored: %s", messages_are(batch.failed, batch.topic), batch.error)
