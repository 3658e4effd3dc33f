"""A journal with every kind of fact, as a file that later versions must read.

`python -m tests.replication.stored_journal FILE` writes one. A file that is there is never written again:
`journal-1.bin` is what brokers of 0b715ad wrote.
"""

from __future__ import annotations

import gzip
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import trio

from qb.core.wire.frames import MessageType, encode_frame
from qb.replication.journal.memory_store import MemoryStore, MemoryStream
from qb.replication.journal.trio_timers import TrioTimers
from qb.storage.engine import Engine, Topic
from tests.support.cells import Cells, answers, caught_up
from tests.support.stores import Receipt, frames, store

MOST_BYTES = 2_000  # of a record: larger payloads are in pieces


class StoredJournal(msgspec.Struct):
    """What is in the file."""

    records: dict[int, bytes]  # by position
    kept: int  # the first position that a trim has left
    asked: Any  # all that clients could ask

    def stream(self, first: int = 1) -> MemoryStream:
        """Return the journal from a position on."""
        stream = MemoryStream()
        stream.records = {position: data for position, data in self.records.items() if position >= first}
        stream.last = max(self.records)
        return stream


def read_journal(path: Path) -> StoredJournal:
    """Return what a file holds."""
    return msgspec.msgpack.decode(gzip.decompress(path.read_bytes()), type=StoredJournal)


def plain(found: Mapping[str, Any]) -> Any:
    """Return answers as a file has them."""
    logs = sorted([*name, *values] for name, values in found["logs"].items())
    return msgspec.msgpack.decode(msgspec.msgpack.encode({**found, "logs": logs}))


async def write_facts(engine: Engine) -> None:
    """Every kind of fact that an owner writes."""
    await engine.create_topic(Topic(topic="t", partitions=2))
    await engine.create_topic(Topic(topic="gone"))
    log, other = engine.log("t", 0), engine.log("t", 1)
    await store(engine.log("gone", 0), b"deleted with its topic")
    await store(log, b"one", b"two", producer_id=7, first_number=1)
    await store(log, b"three", b"four" * 1_000, producer_id=7, first_number=3)
    await store(other, *[b"%d" % number for number in range(300)])
    await engine.delete_topic("gone")
    await engine.create_topic(Topic(topic="gone"))
    await store(engine.log("gone", 0), b"a namesake")
    await engine.metadata.put("cursor/workers/0", {"settled": 4})
    await engine.metadata.put("offset/readers/t/0", {"offset": 2, "updated_ms": 1})
    await engine.add_partitions("t", 3)
    await store(engine.log("t", 2), b"grown", producer_id=8, first_number=1)
    for transaction in ("open", "ended"):
        stage, receipt = await engine.begin_stage(transaction, None), Receipt()
        properties = {"stage": stage.stage_id, "topic": "t", "partition": "0"}
        frame = encode_frame(MessageType.STAGE, 0, 0, properties, b"".join(frames(0, [b"staged", b"too"])))
        stage.append(frame, ("t", 0), 2, receipt)
        await receipt.wait()
    await engine.delete_stages([stage.stage_id])


async def write_journal(directory: Path) -> StoredJournal:
    """Have two owners write a journal, one after the other, and trim it."""
    timers, stream = TrioTimers(), MemoryStream()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(timers.run)
        cells = Cells(nursery, directory, lambda: MemoryStore(stream, timers, most_bytes=MOST_BYTES), timers)
        first, second = await cells.node("a", segment_bytes=1_000), await cells.node("b", segment_bytes=1_000)
        async with cells.owner(first) as engine:
            await engine.create_topic(Topic(topic="early"))
            await caught_up(second, first.cell.applied)
            await second.cell.release()  # a checkpoint, to which the journal can be trimmed
            await write_facts(engine)
        await first.kill()
        stream.add(b"a record of a foreign program")
        async with cells.owner(second) as engine:
            for number in range(8):
                await store(engine.log("t", 1), b"%d" % number * 300)
            await second.cell._engine._drop(engine.log("t", 1), 2)  # type: ignore[arg-type]
            await second.cell._checkpoint()
            whole = dict(stream.records)
            await second.cell.trim()
            asked = plain(await answers(engine))
        await second.kill()
        nursery.cancel_scope.cancel()
    return StoredJournal(whole | stream.records, min(stream.records), asked)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        written = trio.run(write_journal, Path(scratch))
    with open(sys.argv[1], "xb") as file:
        file.write(gzip.compress(msgspec.msgpack.encode(written), mtime=0))
