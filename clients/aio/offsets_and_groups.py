"""All that AsyncBrokerClient can do with offsets and consumer groups."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from datetime import datetime
from typing import Any

from qb.clients.aio.consumer import AsyncConsumer
from qb.clients.aio.link import AsyncLink, AsyncPendingCall
from qb.clients.aio.read_ahead import AsyncReadAhead
from qb.clients.aio.waiting import now
from qb.clients.protocol.conversation import Conversation
from qb.clients.protocol.fetch_requests import (
    BulkFetchRequest,
    Fetched,
    FetchRequest,
    PartitionExtent,
    RawFetched,
    fetched,
    milliseconds,
    portion_in,
    raw_fetched,
)
from qb.clients.protocol.start_positions import Place, place_of
from qb.core.wire.frames import MessageType


class AsyncOffsetAndGroupMethods:
    """The part of AsyncBrokerClient that pulls messages and looks after consumer groups."""

    host: str
    port: int
    client_id: str | None
    _link: AsyncLink
    _conversation: Conversation
    _request_timeout: float
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
    ) -> Fetched:
        """Return messages from an offset on (-2: the earliest, -1: the end), none at or past the end.

        Whoever goes on where the last fetch ended finds the next messages asked for already. Waits up to `max_wait`
        seconds for `min_bytes`, and holds up no other call meanwhile. At least one message is
        returned if there is one, however long. Raises OffsetOutOfRange before the first kept offset, UnknownTopic,
        UnknownPartition, BadRequest.
        """
        wanted = FetchRequest(topic, partition, offset, max_messages, max_bytes, max_wait, min_bytes)
        deadline = now() + max_wait + self._request_timeout
        answer = await self._read_ahead.take(wanted, deadline)
        if answer is None:
            answer = await self._link.answer(await self._ask_for(wanted, deadline), deadline)
        portion = portion_in(answer, wanted)
        await self._read_ahead.go_on(wanted, portion.next_offset)
        return fetched(portion)

    async def _ask_for(self, wanted: FetchRequest | BulkFetchRequest, deadline: float) -> AsyncPendingCall:
        def compose() -> tuple[int, bytes]:
            return self._conversation.compose(MessageType.FETCH, wanted.properties())

        return await self._link.begin(compose, deadline)

    async def begin_fetch(self, wanted: BulkFetchRequest) -> Callable[[], Awaitable[RawFetched]]:
        """Ask for stored batches and return at once; call what is returned to wait for them.

        The broker reads them while whoever asked handles those before. Messages before the offset may come along. Both
        calls raise as fetch(), and ConnectionLost.
        """
        link, patience = self._link, self._request_timeout
        call = await self._ask_for(wanted, now() + patience)

        async def wait() -> RawFetched:
            return raw_fetched(await link.answer(call, now() + patience))

        return wait

    async def offsets(self, topic: str, partition: int = 0) -> PartitionExtent:
        """Return the first kept offset and the next one to be given out. Raises UnknownTopic, UnknownPartition."""
        found = await self._request("offsets", topic=topic, partition=partition)
        return PartitionExtent(found["first"], found["next"])

    async def offset_for_time(self, topic: str, partition: int, time: datetime | int) -> int:
        """Return the first offset that was stored at or after a time (a datetime, or ms since 1970), or the end."""
        found = await self._request("offsets", topic=topic, partition=partition, time_ms=milliseconds(time))
        offset: int = found["offset_for_time"]
        return offset

    async def add_partitions(self, topic: str, partitions: int) -> dict[str, Any]:
        """Give a topic more partitions, so that it has so many, and return it. Keys may change their partition."""
        changed: dict[str, Any] = await self._request("add_partitions", topic=topic, partitions=partitions)
        return changed

    # Consumer groups

    def consumer(self, group_id: str, topics: str | Iterable[str], **options: Any) -> AsyncConsumer:
        """Return a consumer with a connection of its own to the same broker; see Consumer for its options."""
        about = {"client_id": self.client_id, "request_timeout": self._request_timeout}
        return AsyncConsumer(group_id, topics, host=self.host, port=self.port, **about | options)

    async def commit_offsets(self, group_id: str, offsets: Iterable[tuple[str, int, int]]) -> None:
        """Store (topic, partition, next offset to handle) for a group, whoever is in it; for tools."""
        await self._request("commit_offsets", group=group_id, offsets=list(offsets))

    async def committed_offsets(self, group_id: str, topic: str | None = None) -> list[dict[str, Any]]:
        """Return what a group has committed: topic, partition, offset, updated_ms."""
        committed: list[dict[str, Any]] = await self._request("committed_offsets", group=group_id, topic=topic)
        return committed

    async def list_groups(self) -> list[dict[str, Any]]:
        """Return every group that has members or committed offsets."""
        groups: list[dict[str, Any]] = await self._request("list_groups")
        return groups

    async def describe_group(self, group_id: str) -> dict[str, Any]:
        """Return a group's members, who holds what, committed offsets, ends and lag. Raises UnknownGroup."""
        described: dict[str, Any] = await self._request("describe_group", group=group_id)
        return described

    async def reset_group(
        self, group_id: str, topic: str, to: Place, partition: int | None = None
    ) -> list[dict[str, Any]]:
        """Let a group without members go on from an offset, "earliest", "latest" or a time. Raises GroupInUse."""
        committed: list[dict[str, Any]] = await self._request(
            "reset_group", group=group_id, topic=topic, to=place_of(to), partition=partition
        )
        return committed

    async def delete_group(self, group_id: str) -> None:
        """Forget a group without members, and its offsets. Raises GroupInUse, UnknownGroup."""
        await self._request("delete_group", group=group_id)

    async def _request(self, method: str, **arguments: Any) -> Any:
        """Call a method of the broker."""
        raise NotImplementedError
