"""Owners of a journal and NATS nodes are killed and stopped at random, and the ledger of acks is checked at the end.

python -m tests.campaign --minutes 5 [--seed 1]

It prints each fault, and one JSON line with what was found. The same seed gives the same faults, not the same outcome:
the processes are real. It exits with 1 if an ack was lost, a payload was stored twice, or an old record lies behind a
fence.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

import trio

from qb.replication.jetstream.jetstream_store import JetStreamStore
from qb.replication.journal.journal import EntryReader, Journal, JournalEntry
from qb.replication.journal.journal_records import JournalRecordKind, decode, decode_fence
from qb.replication.journal.journal_store import StoredRecord
from qb.replication.journal.record_chain import ChainPoint
from qb.replication.journal.trio_timers import TrioTimers
from qb.replication.nats.nats_client import NatsClient
from tests.support.journal_ledger import OwnerProcess, lost
from tests.support.nats_cluster import NatsCluster
from tests.support.waiting import holds_for, wait_until

CELL = "campaign"
SETTLING = 60.0  # seconds for elections and restarts


class Campaign:
    """One run."""

    def __init__(self, seed: int, directory: Path) -> None:
        self._draw = random.Random(seed)
        self._cluster = NatsCluster(directory)
        self.owners: list[OwnerProcess] = []
        self.faults: Counter[str] = Counter()

    def run(self, seconds: float) -> dict[str, object]:
        """Do harm for so long, then check everything; returns what was found."""
        self._cluster.start()
        try:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                self._start_owner()
                self._pass(0.5, 3)
                self._do(self._draw.choice((self._nothing, self._kill_owner, self._stop_owner, *self._harm_to_nats)))
            for owner in self.owners:
                owner.kill()
            records, entries = trio.run(self._everything)
            return self._found(records, entries)
        finally:
            for owner in self.owners:
                owner.kill()
            self._cluster.kill()

    @property
    def _harm_to_nats(self) -> tuple[Callable[[], None], ...]:
        return self._kill_node, self._stop_node, self._kill_all_nodes

    def _do(self, fault: Callable[[], None]) -> None:
        name = fault.__name__.strip("_").replace("_", " ")
        self.faults[name] += 1
        print(f"{name}: {sum(len(owner.acks) for owner in self.owners)} acks", file=sys.stderr, flush=True)
        fault()

    def _pass(self, least: float, most: float) -> None:
        """Let time pass."""
        holds_for(self._draw.uniform(least, most), lambda: True)

    def _start_owner(self) -> None:
        owner = OwnerProcess(",".join(self._cluster.urls), CELL, f"owner{len(self.owners)}")
        self.owners.append(owner)
        wait_until(lambda: owner.epoch, SETTLING)

    def _nothing(self) -> None:
        """The next owner takes over from one that is well."""

    def _kill_owner(self) -> None:
        self.owners[-1].kill()

    def _stop_owner(self) -> None:
        """It goes on when the next one has taken over."""
        owner = self.owners[-1]
        owner.signal(signal.SIGSTOP)
        self._start_owner()
        self._pass(0, 1)
        owner.signal(signal.SIGCONT)

    def _kill_node(self) -> None:
        node = self._draw.choice(self._cluster.nodes)
        node.kill()
        self._pass(0.5, 4)
        node.start()
        node.wait()

    def _stop_node(self) -> None:
        node = self._draw.choice(self._cluster.nodes)
        assert node.process is not None
        node.process.send_signal(signal.SIGSTOP)
        self._pass(0.5, 8)
        node.process.send_signal(signal.SIGCONT)

    def _kill_all_nodes(self) -> None:
        self._cluster.kill()
        self._cluster.start()

    async def _everything(self) -> tuple[list[StoredRecord], list[JournalEntry]]:
        """Take over a last time, and return all records and the valid entries among them."""
        client, timers = NatsClient(self._cluster.urls), TrioTimers()
        records: list[StoredRecord] = []
        entries: list[JournalEntry] = []
        with trio.fail_after(SETTLING * 2):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(client.run)
                nursery.start_soon(timers.run)
                store = JetStreamStore(client, timers, CELL)
                await store.open()
                taken = await Journal(store, timers, "the last").take_over()
                reader = EntryReader(ChainPoint())
                async with aclosing(store.follow(1)) as following:
                    async for some in following:
                        records += some
                        entries += reader.take(some)
                        if records[-1].position >= taken.tenure.position:
                            break
                nursery.cancel_scope.cancel()
        return records, entries

    def _found(self, records: list[StoredRecord], entries: list[JournalEntry]) -> dict[str, object]:
        payloads = Counter(entry.payload for entry in entries if entry.payload is not None)
        return {
            "takeovers": len(self.owners) + 1,
            "faults": dict(self.faults),
            "acks": sum(len(owner.acks) for owner in self.owners),
            "records": len(records),
            "lost": sum(len(lost(owner, entries)) for owner in self.owners),
            "stored_twice": sum(count > 1 for count in payloads.values()),
            "behind_a_fence": behind_fences(records),
        }


def behind_fences(records: list[StoredRecord]) -> int:
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


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaign")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=None, help="default: drawn, and printed")
    arguments = parser.parse_args()
    seed = random.randrange(1 << 32) if arguments.seed is None else arguments.seed
    with tempfile.TemporaryDirectory(prefix="qb-campaign-") as directory:
        found = Campaign(seed, Path(directory)).run(arguments.minutes * 60)
    print(json.dumps({"seed": seed, "minutes": arguments.minutes, **found}))
    return int(bool(found["lost"] or found["stored_twice"] or found["behind_a_fence"]))


if __name__ == "__main__":
    raise SystemExit(main())
