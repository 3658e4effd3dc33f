"""The partitions of a running broker."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from pyspark_qb.arrow.decoding import FrameChunk
from pyspark_qb.options.spark_options import SourceOptions
from pyspark_qb.read.fetches import Fetches, again_if_lost, log
from pyspark_qb.read.logs import Slice, chosen
from pyspark_qb.read.query_offsets import OffsetRange, Positions, TopicPartition
from qb.clients.blocking.client import BrokerClient
from qb.clients.protocol.client_errors import LogDamaged, UnknownTopic
from qb.clients.protocol.fetch_requests import PartitionExtent
from qb.core.wire.errors import Code


def connected(options: SourceOptions) -> BrokerClient:
    """Return a client that never publishes; it connects when it is used."""
    assert options.servers is not None
    return BrokerClient(
        client_id="spark-source",
        servers=options.servers,
        request_timeout=options.request_timeout,
        idempotent=False,
        compression=options.compression,
        token_file=options.token_file,
        ca_file=options.ca_file,
    )


class BrokerSlice(Slice):
    """A range that a task fetches over a connection of its own."""

    def __init__(self, range: OffsetRange, options: SourceOptions) -> None:
        super().__init__(range)
        self._options, self._fail = options, options.fail_on_data_loss

    def chunks(self) -> Iterator[FrameChunk]:
        client = connected(self._options)
        try:
            for got in Fetches(client, self.range, fail_on_data_loss=self._fail):
                starts = np.frombuffer(got.starts, ">u4").astype(np.uint32)
                positions = (starts - starts[0]).astype(np.int64)  # modulo 2^32, as they are counted
                yield FrameChunk(np.frombuffer(got.frames, np.uint8), positions, got.offset)
        except UnknownTopic as gone:
            if self._fail:
                raise
            log.warning("%s", gone)
        finally:
            client.disconnect()


class BrokerLogs:
    """What a broker holds of the topics that are read. Can be pickled until it is used."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options

    @cached_property
    def _client(self) -> BrokerClient:
        return connected(self._options)

    def extents(self, *, missing_ok: bool = False) -> dict[TopicPartition, PartitionExtent]:
        """Return what each partition holds, all of them at one moment. Raises LogDamaged, and UnknownTopic."""
        described = again_if_lost(lambda: self._client.describe_topics(self._topics(missing_ok)))
        return {
            TopicPartition(topic["topic"], one["partition"]): _extent(topic["topic"], one)
            for topic in described
            for one in topic["logs"]
        }

    def at_time(self, partition: TopicPartition, time_ms: int) -> int:
        """Return the first offset that was appended at a time or later, or the end."""
        return again_if_lost(lambda: self._client.offset_for_time(*partition, time_ms))

    def slices(self, ranges: Collection[OffsetRange]) -> list[Slice]:
        """Return what tasks can read."""
        return [BrokerSlice(range, self._options) for range in ranges]

    def commit(self, group: str, positions: Positions) -> None:
        """Report to the broker how far a group has come, for its tools to show."""
        offsets = [(*partition, offset) for partition, offset in positions.items()]
        again_if_lost(lambda: self._client.commit_offsets(group, offsets))

    def close(self) -> None:
        """End the connection; a later use makes another."""
        if "_client" in vars(self):
            self._client.disconnect()
            del self._client

    def _topics(self, missing_ok: bool) -> list[str]:
        topics, pattern = self._options.topics, self._options.pattern
        if pattern is None and not missing_ok:
            return list(topics)
        known = [topic["topic"] for topic in self._client.list_topics()]
        return chosen(topics, pattern, known)


def _extent(topic: str, state: Mapping[str, Any]) -> PartitionExtent:
    if state["status"] == "damaged":
        raise LogDamaged(Code.LOG_DAMAGED, f"{topic}/{state['partition']}: {state['reason']}")
    return PartitionExtent(state["first_offset"], state["next_offset"])
