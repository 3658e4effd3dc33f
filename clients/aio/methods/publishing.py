"""All that AsyncBrokerClient can do to publish."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from datetime import datetime
from typing import Any

from qb.clients.aio.body_batches import Bodies, portions
from qb.clients.aio.methods.topics import AsyncTopicMethods
from qb.clients.aio.waiting import many_answers, one_answer, wait_for_answer
from qb.clients.protocol.client_errors import QBError
from qb.clients.protocol.fetch_requests import milliseconds
from qb.clients.protocol.message import to_json
from qb.clients.protocol.partition_spread import PartitionSpread, check_keys
from qb.clients.protocol.publish_frames import Body, PublishForm, as_bytes, check_size, form_of
from qb.clients.protocol.publish_tally import PublishTally
from qb.clients.protocol.receipts import Offsets, Receipt
from qb.clients.protocol.unacked_publishes import UnackedBatch
from qb.clients.tracing import Sender, note_stored, tracing

Send = Callable[[PublishForm, Sequence[bytes]], Awaitable[UnackedBatch]]  # on the link that a publish_many began with


class AsyncPublishMethods(AsyncTopicMethods):
    """The part of AsyncBrokerClient that publishes messages."""

    async def publish(
        self,
        topic: str,
        data: Body,
        partition: int | None = None,
        key: str | None = None,
        *,
        timestamp_ms: int | datetime = 0,
        properties: Mapping[str, str] | None = None,
        **more: str,
    ) -> Receipt:
        """Store one message, and return when the broker has it.

        Args:
            topic: The topic.
            data: The body: bytes, a bytearray or a memoryview.
            partition: The partition; None lets the key or the broker choose.
            key: Messages with one key go to one partition, in order.
            timestamp_ms: The time of the message: a datetime, or milliseconds since 1970; 0 takes the broker's clock.
            properties: Text to store beside the body.
            **more: More of it, as keywords.

        Returns:
            Where the message is, and how safely it is stored.

        Raises:
            UnknownTopic: There is no such topic, and the broker does not create it.
            UnknownPartition: The topic has no such partition.
            MessageTooLarge: The body is longer than `max_message_size`.
            BadRequest: A property has a reserved name, or an argument makes no sense.
            BrokerUnavailable: There is no broker; nothing was sent.
            PublishUncertain: The answer was lost for good: it may or may not be stored.
            TypeError: The body is not bytes.

        Example:
            >>> receipt = await client.publish("orders", b"one", key="customer-7", colour="red")
        """
        beside = {**properties, **more} if properties else more
        if (spans := tracing()) is None:
            return await self._publish(topic, data, partition, key, timestamp_ms, beside)
        with spans.sending(self._sender(topic)) as span:
            receipt = await self._publish(topic, data, partition, key, timestamp_ms, spans.carried(beside))
            note_stored(span, len(data), receipt)
            return receipt

    async def _publish(
        self,
        topic: str,
        data: Body,
        partition: int | None,
        key: str | None,
        timestamp_ms: int | datetime,
        properties: Mapping[str, str],
    ) -> Receipt:
        form = form_of(topic, partition, key, properties, milliseconds(timestamp_ms))
        body = data if type(data) is bytes else as_bytes(data)
        check_size(body, self._conversation.max_message_size)
        link, deadline, answered = self._link, self._deadline(), one_answer()
        batch = await link.publish(form, (body,), answered, deadline)
        try:
            await link.wait(answered, deadline)
        finally:
            if batch.left:
                link.abandon(batch)
        return batch.receipt(topic)

    async def publish_text(
        self,
        topic: str,
        text: str,
        partition: int | None = None,
        key: str | None = None,
        *,
        timestamp_ms: int | datetime = 0,
        properties: Mapping[str, str] | None = None,
        **more: str,
    ) -> Receipt:
        """Store one message whose body is a text in UTF-8.

        Args:
            topic: The topic.
            text: The body.
            partition: The partition; None lets the key or the broker choose.
            key: Messages with one key go to one partition, in order.
            timestamp_ms: The time of the message: a datetime, or milliseconds since 1970; 0 takes the broker's clock.
            properties: Text to store beside the body.
            **more: More of it, as keywords.

        Returns:
            Where the message is, and how safely it is stored.

        Raises:
            QBError: As publish().
        """
        beside = {**(properties or {}), **more}
        return await self.publish(topic, text.encode(), partition, key, timestamp_ms=timestamp_ms, properties=beside)

    async def publish_json(
        self,
        topic: str,
        value: Any,
        partition: int | None = None,
        key: str | None = None,
        *,
        timestamp_ms: int | datetime = 0,
        properties: Mapping[str, str] | None = None,
        **more: str,
    ) -> Receipt:
        """Store one message whose body is a value in JSON.

        Args:
            topic: The topic.
            value: What JSON can carry: also a dataclass, a datetime, a msgspec.Struct and the like.
            partition: The partition; None lets the key or the broker choose.
            key: Messages with one key go to one partition, in order.
            timestamp_ms: The time of the message: a datetime, or milliseconds since 1970; 0 takes the broker's clock.
            properties: Text to store beside the body.
            **more: More of it, as keywords.

        Returns:
            Where the message is, and how safely it is stored.

        Raises:
            TypeError: JSON cannot carry the value.
            QBError: As publish().

        Example:
            >>> await client.publish_json("orders", {"id": 7, "item": "tea"}, key="customer-7")
        """
        beside = {**(properties or {}), **more}
        return await self.publish(topic, to_json(value), partition, key, timestamp_ms=timestamp_ms, properties=beside)

    async def publish_many(
        self,
        topic: str,
        bodies: Bodies,
        partition: int | None = None,
        key: str | None = None,
        properties: Mapping[str, str] | None = None,
        *,
        keys: Iterable[str | None] | None = None,
        timestamp_ms: int | datetime = 0,
    ) -> Offsets:
        """Store many messages in order, with many in flight at once.

        In a topic with several partitions, bodies with a key go where it belongs and the others take turns, unless all
        go to one `partition`. Stops at the first failure and raises once all that is on its way is settled.

        Args:
            topic: The topic.
            bodies: The bodies; from a generator, sync or async: no more of them are held than are in flight.
            partition: The partition of all of them.
            key: The key of all of them.
            properties: Text to store beside each body.
            keys: The key of each body, as many as there are bodies; None stands for no key.
            timestamp_ms: The time of all of them: a datetime, or milliseconds since 1970; 0 takes the broker's clock.

        Returns:
            The offsets of the bodies, as a compact sequence; its `partitions` says where each is.

        Raises:
            PublishFailed: A body was refused; see `index` and `stored`.
            PublishUncertain: From body `index` on it is not known what is stored.
            Exception: What the iterable itself raised, unchanged.

        Example:
            >>> offsets = await client.publish_many("orders", [b"a", b"b"], keys=["k1", "k2"])
        """
        if (spans := tracing()) is None:
            return await self._publish_many(topic, bodies, partition, key, properties, keys, timestamp_ms)
        with spans.sending(self._sender(topic)) as span:
            beside = spans.carried(properties or {})
            offsets = await self._publish_many(topic, bodies, partition, key, beside, keys, timestamp_ms)
            span.set_attribute("messaging.batch.message_count", len(offsets))
            return offsets

    async def _publish_many(
        self,
        topic: str,
        bodies: Bodies,
        partition: int | None,
        key: str | None,
        properties: Mapping[str, str] | None,
        keys: Iterable[str | None] | None,
        timestamp_ms: int | datetime,
    ) -> Offsets:
        timestamp_ms = milliseconds(timestamp_ms)
        form = PublishForm(topic, partition, key, properties, timestamp_ms)
        check_keys(partition, key, keys)
        await self._link.open(self._deadline(), patient=True)  # to know the broker's size limit
        tally, answered, link = PublishTally(), many_answers(), self._link
        count = await self._partitions_of(topic) if partition is None and key is None else 1

        async def send(form: PublishForm, bodies: Sequence[bytes]) -> UnackedBatch:
            return await link.publish(form, bodies, answered, self._deadline(), tally.check)

        try:
            with link.attended():
                if count > 1 or keys is not None:
                    scatter = PartitionSpread(topic, count, self._routes, properties, timestamp_ms)
                    await self._scatter(scatter, bodies, keys, tally, send)
                else:
                    await self._send_many(form, bodies, tally, send)
                patience = 0 if tally.hopeless else self._request_timeout
                while tally.pending and await wait_for_answer(answered, patience):
                    tally.collect()
        finally:
            for _, batch in tally.pending:
                link.abandon(batch)
        return self._routes.checked(topic, tally)

    def _sender(self, topic: str) -> Sender:
        return Sender(self.client_id, self._link.server, topic)

    async def _partitions_of(self, topic: str) -> int:
        """Return how many partitions a topic has; 1 if that cannot be found out: then the broker does the routing."""
        try:
            return await self._count_partitions(topic)
        except QBError:
            return 1

    async def _scatter(
        self,
        scatter: PartitionSpread,
        bodies: Bodies,
        keys: Iterable[str | None] | None,
        tally: PublishTally,
        send: Send,
    ) -> None:
        """Send to several partitions until the bodies end or something fails, which is noted in the tally."""
        try:
            bodies = bodies if keys is None else scatter.with_keys(bodies, keys)
            limit = self._conversation.max_message_size
            async with aclosing(portions(bodies, scatter.overhead, limit, scatter.block_bytes)) as blocks:
                async for block in blocks:
                    for _, indexes, form, some in scatter.pieces(block):
                        tally.add(await send(form, some), indexes)
        except Exception as error:
            tally.fail(scatter.next_index, error)

    async def _send_many(self, form: PublishForm, bodies: Bodies, tally: PublishTally, send: Send) -> None:
        """Send until the bodies end or something fails, which is noted in the tally."""
        try:
            async with aclosing(portions(bodies, form.overhead, self._conversation.max_message_size)) as pieces:
                async for portion in pieces:
                    tally.add(await send(form, portion))
        except Exception as error:
            tally.fail(tally.sent, error)
