"""The producers of AsyncBrokerClient."""

from __future__ import annotations

from qb.clients.aio.methods.publishing import AsyncPublishMethods
from qb.clients.aio.sending.producer import AsyncProducer
from qb.clients.aio.sending.send_handles import OnDelivery
from qb.clients.producing.producer_options import (
    BATCH_BYTES,
    BATCH_SIZE,
    LINGER_MS,
    MAX_BUFFERED_BYTES,
    RETRIES,
    RETRY_BACKOFF_MS,
    checked_producer_options,
)


class AsyncProducerMethods(AsyncPublishMethods):
    """The part of AsyncBrokerClient that makes producers."""

    def producer(
        self,
        topic: str,
        *,
        batch_size: int = BATCH_SIZE,
        batch_bytes: int = BATCH_BYTES,
        linger_ms: float = LINGER_MS,
        acks: str = "all",
        compression: str | None = None,
        retries: int = RETRIES,
        retry_backoff_ms: float = RETRY_BACKOFF_MS,
        max_buffered_bytes: int = MAX_BUFFERED_BYTES,
        when_full: str = "block",
        partition: int | None = None,
        on_delivery: OnDelivery | None = None,
    ) -> AsyncProducer:
        """Make a producer: send() returns at once, and messages travel in batches.

        Args:
            topic: The topic.
            batch_size: Messages that make a batch full.
            batch_bytes: Bytes that make a batch full, with what frames add.
            linger_ms: How long the first message of a batch waits for others, in milliseconds; 0 sends what has
                gathered while the batch before it was sent.
            acks: When a message counts as sent. "all": when it is as safe as the broker makes it; "leader": when the
                broker that owns the topic has it on stable storage; with one broker both mean fsynced. "none": when it
                is handed to the connection: it may be lost, or refused, and only the log would say so.
                `receipt.durability` says what was reached.
            compression: "zstd" or "lz4": batches travel compressed if the broker agrees. None takes that of the client.
            retries: How often a batch is tried again when there is no broker within `request_timeout` seconds, or it
                has no room on its disk. What was sent and not answered is sent again after every reconnect, and is
                uncertain after (retries + 1) times `request_timeout`.
            retry_backoff_ms: How long to wait before each retry, in milliseconds.
            max_buffered_bytes: Bytes of messages that are not stored yet, at most.
            when_full: What send() does when so much is buffered: "block" until there is room, or "raise" BufferFull.
                Under an event loop send() cannot block: it raises, and room() waits.
            partition: The partition of the messages whose send() names none.
            on_delivery: Called with a Delivery for each message when its batch is settled, beside the sending.
                It may be async.

        Returns:
            The producer.

        Raises:
            ValueError: An argument makes no sense.
            TypeError: `on_delivery` is no function, or one that cannot be called here.
            ImportError: The package that compresses is not installed.

        Example:
            >>> async with client.producer("orders") as producer:
            ...     producer.send(b"tea", key="customer-7")
        """
        options = checked_producer_options(
            batch_size,
            batch_bytes,
            linger_ms,
            acks,
            compression,
            retries,
            retry_backoff_ms,
            max_buffered_bytes,
            when_full,
            partition,
        )
        return AsyncProducer(self, topic, options, on_delivery)
