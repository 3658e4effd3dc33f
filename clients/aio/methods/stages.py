"""A stage of a transaction."""

from __future__ import annotations

from qb.clients.aio.link import AsyncLink
from qb.clients.aio.waiting import many_answers, now
from qb.clients.protocol.client_errors import QBError
from qb.clients.protocol.conversation import Conversation
from qb.clients.protocol.publish_frames import Body
from qb.clients.protocol.staged_messages import (
    StageBundle,
    StageLedger,
    cut,
)
from qb.clients.protocol.unacked_publishes import UnackedBatch
from qb.core.wire.frames import Frames


class AsyncStage:
    """A place at the broker for messages that are not visible until they are committed. For one task.

    Returned by begin_transaction(). Once a call has raised or was cancelled, every later one raises: begin a new stage
    then. In a child of os.fork() it is the parent's, and raises UsedAfterFork.

    Args:
        stage_id: What the broker calls it.
        link: The connection.
        conversation: What the client knows of the broker.
        patience: Seconds that a call waits for the broker.
    """

    def __init__(self, stage_id: str, link: AsyncLink, conversation: Conversation, patience: float) -> None:
        self._link, self._conversation, self._patience = link, conversation, patience
        self._book = StageLedger(stage_id, link.abandon)
        self._answered = many_answers()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.stage_id}, {self.messages} messages>"

    @property
    def stage_id(self) -> str:
        """What the broker calls it; a commit names it."""
        return self._book.stage_id

    @property
    def messages(self) -> int:
        """How many messages it was given."""
        return self._book.messages

    async def add(self, topic: str, partition: int, frames: Body, count: int) -> None:
        """Send messages for one partition, as whole DATA frames. They are copied once.

        Returns before they are durable, which finish() waits for; waits while megabytes are unanswered. What was on its
        way when the connection was lost is sent again, and never staged twice.

        Args:
            topic: The topic.
            partition: The partition.
            frames: The frames, back to back.
            count: How many frames there are.

        Raises:
            MessageTooLarge: A body is longer than the broker takes.
            BadRequest: The frames make no sense.
            UnknownStage: The stage is not open any more, or another refusal of what was sent before.
            BrokerUnavailable, RequestTimedOut: The broker does not answer.
        """
        self._link.check_process()
        with self._book.whole():
            for bundle in cut(frames, count, self._conversation.max_message_size):
                await self._send(topic, partition, bundle)

    async def _send(self, topic: str, partition: int, bundle: StageBundle) -> None:
        def compose() -> tuple[UnackedBatch, Frames]:
            self._book.collect()
            batch = self._conversation.stage(self._book.properties(topic, partition), bundle.frames, self._answered)
            return batch, self._conversation.to_send(batch)

        batch = await self._link.transmit(compose, now() + self._patience)
        self._book.add(batch, bundle.count)

    async def finish(self) -> int:
        """Wait until all of it is durable.

        Returns:
            How many messages the stage holds.

        Raises:
            QBError: As add().
        """
        self._link.check_process()
        with self._book.whole():
            while self._book.pending:
                if not await self._link.wait(self._answered, now() + self._patience):
                    raise self._book.unanswered()
                self._book.collect()
        return self._book.held

    def abandon(self) -> None:
        """Send nothing any more, and nothing again."""
        self._book.spoil(QBError("this stage was abandoned"))
