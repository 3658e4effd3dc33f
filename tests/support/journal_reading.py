"""All records that a journal in JetStream holds, and whether a fence was passed by any of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing

import trio

from qb.replication.jetstream.jetstream_store import JetStreamStore
from qb.replication.journal.journal_records import JournalRecordKind, decode, decode_fence
from qb.replication.journal.journal_store import StoredRecord
from qb.replication.journal.trio_timers import TrioTimers
from qb.replication.nats.nats_client import NatsClient


def stored_records(urls: Sequence[str], cell: str, seconds: float = 120.0) -> list[StoredRecord]:
    """Return them in their order; no broker may append meanwhile."""
    return trio.run(_stored_records, urls, cell, seconds)


async def _stored_records(urls: Sequence[str], cell: str, seconds: float) -> list[StoredRecord]:
    client, timers = NatsClient(urls), TrioTimers()
    found: list[StoredRecord] = []
    with trio.fail_after(seconds):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.run)
            nursery.start_soon(timers.run)
            store = JetStreamStore(client, timers, cell)
            await store.open()
            end = await store.last_position()
            async with aclosing(store.follow(1)) as following:
                async for some in following:
                    found += some
                    if found[-1].position >= end:
                        break
            nursery.cancel_scope.cancel()
    return found


def behind_fences(records: Sequence[StoredRecord]) -> int:
    """Return how many records of an older epoch lie behind a whole fence."""
    epoch = found = 0
    for each in records:
        record = decode(each.data)
        if record is None:
            continue
        found += record.epoch < epoch
        fence = decode_fence(record.payload) if record.kind is JournalRecordKind.FENCE else None
        if fence is not None and fence.index == fence.count - 1:
            epoch = max(epoch, record.epoch)
    return found
