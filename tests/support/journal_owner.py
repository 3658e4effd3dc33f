"""A process that owns a journal and appends as fast as its window lets it: `python -m tests.support.journal_owner`.

Arguments: addresses of NATS with commas between, the cell, its name, the window. It prints `owner EPOCH`, then
`ack NUMBER POSITION` for each committed payload, and `fenced` at the end.
"""

from __future__ import annotations

import logging
import sys
from functools import partial

import trio

from qb.replication.jetstream.jetstream_store import JetStreamStore
from qb.replication.journal.journal import Journal
from qb.replication.journal.journal_store import JournalError
from qb.replication.journal.trio_timers import TrioTimers
from qb.replication.nats.nats_client import NatsClient
from qb.storage.signals import Signal


def payload_of(name: str, number: int) -> bytes:
    """Return what the process of this name appends as its number-th payload."""
    return f"{name} {number} ".encode() + b"x" * 100


async def own(urls: str, cell: str, name: str, window: int) -> None:
    client, timers = NatsClient(urls.split(",")), TrioTimers()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.run)
        nursery.start_soon(timers.run)
        store = JetStreamStore(client, timers, cell)
        await store.open()
        journal = Journal(store, timers, name, window=window)
        print("owner", (await journal.take_over()).tenure.epoch, flush=True)
        number, answered = 0, Signal()
        while journal.failure is None:
            while journal.in_flight < window:
                journal.append(payload_of(name, number), partial(shown, number, answered))
                number += 1
            await answered.wait()
        print("fenced", flush=True)
        nursery.cancel_scope.cancel()


def shown(number: int, answered: Signal, outcome: int | JournalError) -> None:
    answered.set()
    if isinstance(outcome, int):
        print("ack", number, outcome, flush=True)


if __name__ == "__main__":
    logging.basicConfig()
    trio.run(own, sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
