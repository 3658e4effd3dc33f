"""All that AsyncBrokerClient can do with offsets and consumer groups."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from datetime import datetime
from typing import Any

from qb.clients.aio.consumer import AsyncConsumer
from qb.clients.aio.link import AsyncPendingCall
from qb.clients.aio.methods.client_base import AsyncClientBase
from qb.clients.aio.read_ahead import AsyncReadAhead
from qb.clients.aio.waiting import now
from qb.clients.consuming.start_positions import Place, place_of
from qb.clients.protocol.fetch_requests import (
    BulkFetchRequest,
    Fetched,
    FetchRequest,
    PartitionExtent,
    RawFetched,
    consistently,
    fetched,
    milliseconds,
    portion_in,
    raw_fetched,
)
from qb.clients.results import GroupInfo, OffsetInfo
from qb.core.wire.frames import MessageType


class AsyncOffsetAndGroupMethods(AsyncClientBase):
    """The part of AsyncBrokerClient that pulls messages and looks after consumer groups."""

    _read_ahead: AsyncReadAhead

    async def fetch(
        self,
        topic: str,
        partition: int = 0,
        offset: int = 0,
        max_messages: int = 500,
        max_bytes: int = 1 << 20,
        max_wait: float = 0.0,
        min_bytes: int = 1,
        consistent: bool = False,
    ) -> Fetched:
        """Pull messages of one partition, none at or past its end.

        A caller that goes on where the last fetch ended finds the next messages asked for already. At least one message
        is returned if there is one, however long it is. Other calls are not held up while this one waits.

        Args:
            topic: The topic.
            partition: The partition.
            offset: The first message; -2 is the earliest, -1 the end.
            max_messages: The most messages to return.
            max_bytes: About how many bytes to return at most.
            max_wait: Seconds to wait until there are `min_bytes`.
            min_bytes: How many bytes are worth an answer.
            consistent: In a cluster, have the broker commit a record first: the answer has everything that was acked
                before the call, whatever the clocks of the brokers do. It costs about as much as a publish.

        Returns:
            The messages, made as they are asked for; `next_offset` is where to go on.

        Raises:
            OffsetOutOfRange: The offset is before the first kept one, or past the end.
            UnknownTopic: There is no such topic.
            UnknownPartition: The topic has no such partition.
            BadRequest: A number makes no sense.

        Example:
            >>> messages = await client.fetch("orders", offset=-2)
            >>> messages = await client.fetch("orders", offset=messages.next_offset, max_wait=5)
        """
        wanted = FetchRequest(topic, partition, offset, max_messages, max_bytes, max_wait, min_bytes, consistent)
        deadline = now() + max_wait + self._request_timeout
        answer = None if consistent else await self._read_ahead.take(wanted, deadline)
        if answer is None:
            answer = await self._repeat(lambda: self._compose_fetch(wanted), deadline)
        portion = portion_in(answer, wanted)
        if not consistent:
            await self._read_ahead.go_on(wanted, portion.next_offset)
        return fetched(portion)

    async def _ask_for(self, wanted: FetchRequest | BulkFetchRequest, deadline: float) -> AsyncPendingCall:
        return await self._link.begin(lambda: self._compose_fetch(wanted), deadline)

    def _compose_fetch(self, wanted: FetchRequest | BulkFetchRequest) -> tuple[int, bytes]:
        return self._conversation.compose(MessageType.FETCH, wanted.properties())

    async def begin_fetch(self, wanted: BulkFetchRequest) -> Callable[[], Awaitable[RawFetched]]:
        """Ask for stored batches and return at once, so that the broker reads them meanwhile.

        Args:
            wanted: Which batches; messages before its offset may come along.

        Returns:
            A function that waits for the batches.

        Raises:
            QBError: As fetch(); the function that is returned raises so too.
        """
        call = await self._ask_for(wanted, self._deadline())

        async def wait() -> RawFetched:
            return raw_fetched(await self._repeat(lambda: self._compose_fetch(wanted), self._deadline(), call))

        return wait

    async def offsets(self, topic: str, partition: int = 0, consistent: bool = False) -> PartitionExtent:
        """Ask which offsets a partition holds.

        Args:
            topic: The topic.
            partition: The partition.
            consistent: As in fetch().

        Returns:
            The first kept offset, and the next one to be given out.

        Raises:
            UnknownTopic: There is no such topic.
            UnknownPartition: The topic has no such partition.
        """
        found = await self._request("offsets", topic=topic, partition=partition, **consistently(consistent))
        return PartitionExtent(found["first"], found["next"])

    async def offset_for_time(self, topic: str, partition: int, time: datetime | int) -> int:
        """Find the first message that was stored at or after a time.

        Args:
            topic: The topic.
            partition: The partition.
            time: A datetime (local time if it has no zone), or milliseconds since 1970.

        Returns:
            Its offset; the end of the partition if there is none.

        Raises:
            UnknownTopic: There is no such topic.
            UnknownPartition: The topic has no such partition.
        """
        found = await self._request("offsets", topic=topic, partition=partition, time_ms=milliseconds(time))
        offset: int = found["offset_for_time"]
        return offset

    # Consumer groups

    def consumer(self, group_id: str, topics: str | Iterable[str], **options: Any) -> AsyncConsumer:
        """Return a consumer with a connection of its own to the same broker.

        Args:
            group_id: The group; its members share the partitions of their topics.
            topics: The name of a topic, or several.
            **options: See AsyncConsumer, which has them as arguments.

        Returns:
            The consumer, not connected yet.

        Example:
            >>> async with client.consumer("billing", "orders") as consumer:
            ...     async for message in consumer:
            ...         print(message.text())
        """
        about = {
            "client_id": self.client_id,
            "request_timeout": self._request_timeout,
            "compression": self._conversation.compression.codec,
        }
        return AsyncConsumer(group_id, topics, servers=[str(each) for each in self._servers], **about | options)

    async def commit_offsets(self, group_id: str, offsets: Iterable[tuple[str, int, int]]) -> None:
        """Store offsets for a group, whether it has members or not; for tools.

        Args:
            group_id: The group.
            offsets: Tuples of topic, partition, and the next offset to handle.

        Raises:
            UnknownTopic: There is no such topic.
            UnknownPartition: A topic has no such partition.
            OffsetOutOfRange: An offset is past the end of its partition.
        """
        await self._request("commit_offsets", group=group_id, offsets=list(offsets))

    async def committed_offsets(
        self, group_id: str, topic: str | None = None, consistent: bool = False
    ) -> list[OffsetInfo]:
        """Return what a group has committed.

        Args:
            group_id: The group.
            topic: Only this topic; None returns all.
            consistent: As in fetch().

        Returns:
            The next offset to handle, for each partition.

        Raises:
            BrokerUnavailable: There is no broker; nothing was asked.
            RequestTimedOut: The broker did not answer within `request_timeout` seconds.
        """
        committed = await self._request("committed_offsets", group=group_id, topic=topic, **consistently(consistent))
        return [OffsetInfo(each) for each in committed]

    async def list_groups(self) -> list[GroupInfo]:
        """List the groups that have members or committed offsets.

        Returns:
            The groups as the broker describes them.

        Raises:
            BrokerUnavailable: There is no broker; nothing was asked.
            RequestTimedOut: The broker did not answer within `request_timeout` seconds.
        """
        return [GroupInfo(each) for each in await self._request("list_groups")]

    async def describe_group(self, group_id: str) -> GroupInfo:
        """Describe a group.

        Args:
            group_id: The group.

        Returns:
            Its members, their partitions, committed offsets, ends and lag.

        Raises:
            UnknownGroup: It has neither members nor committed offsets.
        """
        return GroupInfo(await self._request("describe_group", group=group_id))

    async def reset_group(self, group_id: str, topic: str, to: Place, partition: int | None = None) -> list[OffsetInfo]:
        """Let a group without members go on from another place.

        Args:
            group_id: The group.
            topic: The topic.
            to: The next message to handle: an offset, "earliest", "latest", or a time.
            partition: Only this partition; None resets all.

        Returns:
            What is committed now; see committed_offsets().

        Raises:
            GroupInUse: The group has members.
            UnknownTopic: There is no such topic.
        """
        committed = await self._request(
            "reset_group", group=group_id, topic=topic, to=place_of(to), partition=partition
        )
        return [OffsetInfo(each) for each in committed]

    async def delete_group(self, group_id: str) -> None:
        """Forget a group without members, and its offsets.

        Args:
            group_id: The group.

        Raises:
            GroupInUse: The group has members.
            UnknownGroup: There is no such group.
        """
        await self._request("delete_group", group=group_id)
