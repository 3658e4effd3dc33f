"""A consumer that reads one partition alone, beside its group: nothing is shared out, and offsets are committed."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from qb.clients.consuming.assigned_partitions import AssignedPartition
from qb.clients.consuming.consumer_options import ConsumerOptions
from qb.clients.consuming.consumer_state import ConsumerRequest, ConsumerState
from qb.clients.protocol.client_errors import RequestRefused
from qb.core.wire.errors import Code

_FINAL = {Code.BAD_REQUEST, Code.BAD_NAME, Code.UNKNOWN_TOPIC, Code.UNKNOWN_PARTITION}
PAUSE = 0.2  # seconds after a failure


class SinglePartitionState(ConsumerState):
    """A consumer that holds its partition from the beginning to the end, and is no member of the group."""

    def __init__(self, options: ConsumerOptions) -> None:
        super().__init__(options)
        assert options.partition is not None
        self.sure_until = self._heartbeat_at = inf
        self._joined = True
        self._commit_at = -inf if options.auto_commit else inf
        self.assigned.allow({AssignedPartition(options.topics[0], options.partition)})

    def due(self, now: float) -> float:
        """Return when there will be something to ask or to fetch, unless something happens before."""
        return now if self.over else super().due(now)

    def _commit(self, offsets: Mapping[AssignedPartition, int]) -> ConsumerRequest | None:
        ask = super()._commit(offsets)
        if ask is None:
            return None
        return ConsumerRequest(ask.method, {"group": self.options.group_id, "offsets": ask.arguments["offsets"]})

    def _leave(self) -> ConsumerRequest | None:
        self.over = not len(self.assigned)
        return None

    def refused(self, ask: ConsumerRequest, error: RequestRefused, now: float) -> None:
        """The broker said no."""
        if ask.method != "commit_offsets" and error.code in _FINAL:
            self.error = error
        elif ask.method != "commit_offsets":
            self._retry_at = now + PAUSE
        else:
            super().refused(ask, error, now)

    def connection_lost(self) -> None:
        """The partition stays ours: go on with what was fetched."""


def state_of(options: ConsumerOptions) -> ConsumerState:
    """Return what a consumer with these options begins with."""
    return ConsumerState(options) if options.partition is None else SinglePartitionState(options)
