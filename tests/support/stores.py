"""What the storage tests share: a clock to turn, engines that run, messages in and bodies out."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import trio

from qb.core.settings import StorageSettings
from qb.core.wire.errors import BrokerError
from qb.core.wire.frames import MessageType, decode_frame, encode_frame
from qb.storage.commit.committer import LocalCommitter
from qb.storage.commit.completions import Completions
from qb.storage.commit.sync_pace import SyncPace
from qb.storage.commit.writer_threads import WriterThreads
from qb.storage.engine import AppendRun, PartitionLog, StoredChunk, Topic
from qb.storage.files import OpenFiles
from qb.storage.local_engine import LocalEngine
from qb.storage.metadata.metadata_files import log_paths
from qb.storage.metadata.metadata_recovery import recover_metadata
from qb.storage.metadata.metadata_store import MetadataStore

NOON = 1_700_000_000_000
HOUR = 3_600_000


class Clock:
    """Milliseconds that only move when a test says so."""

    def __init__(self, now: int = NOON) -> None:
        self.now = now

    def __call__(self) -> int:
        return self.now


def frames(first_offset: int, bodies: Sequence[bytes]) -> list[bytes]:
    return [encode_frame(MessageType.DATA, first_offset + i, NOON, b"topic=t\0", body) for i, body in enumerate(bodies)]


def make_run(first_offset: int, bodies: Sequence[bytes], producer_id: int = 0, first_number: int = 0) -> AppendRun:
    """The bodies as they come from a connection: stored frames, one after another."""
    parts = frames(first_offset, bodies)
    positions = [sum(map(len, parts[:i])) for i in range(len(parts))]
    return AppendRun(b"".join(parts), positions, first_offset, producer_id, first_number)


@asynccontextmanager
async def running(engine: LocalEngine) -> AsyncIterator[LocalEngine]:
    """The engine at work; at the end it has finished everything and is closed."""
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.run)
            yield engine
            nursery.cancel_scope.cancel()
    finally:
        engine.close()


def open_engine(directory: Path, clock: Clock | None = None, **settings: Any) -> LocalEngine:
    return LocalEngine.open(StorageSettings(data_dir=str(directory / "data"), **settings), clock or Clock())


@asynccontextmanager
async def opened(directory: Path, clock: Clock | None = None, **settings: Any) -> AsyncIterator[LocalEngine]:
    """An engine on `directory`/data with topic t, running."""
    async with running(open_engine(directory, clock, **settings)) as engine:
        if "t" not in engine.topics():
            await engine.create_topic(Topic(topic="t"))
        yield engine


class Receipt:
    """What became of one run."""

    def __init__(self) -> None:
        self.calls: list[tuple[BrokerError | None, int]] = []
        self.came = trio.Event()

    def __call__(self, *outcome: Any) -> None:
        error, append_ms = outcome[-2:]  # of a log, also which runs
        self.calls.append((error, append_ms))
        self.came.set()

    async def wait(self) -> int:
        """Return the append time. Raises the refusal."""
        await self.came.wait()
        error, append_ms = self.calls[0]
        if error:
            raise error
        return append_ms


def give(log: PartitionLog, bodies: Sequence[bytes], producer_id: int = 0, first_number: int = 0) -> Receipt:
    """Append a run without waiting."""
    receipt = Receipt()
    log.append(make_run(log.next_offset, bodies, producer_id, first_number), receipt)
    return receipt


async def store(log: PartitionLog, *bodies: bytes, producer_id: int = 0, first_number: int = 0) -> int:
    """Append a run and wait for it; returns its append time."""
    return await give(log, bodies, producer_id, first_number).wait()


def messages(chunk: StoredChunk) -> list[tuple[int, bytes]]:
    """Return (offset, body) of every record, checking that the chunk says what its frames say."""
    found = []
    for number, position in enumerate(chunk.positions):
        frame = decode_frame(chunk.data, position)
        assert frame.type == MessageType.DATA
        assert frame.sequence_number == chunk.first_offset + number
        found.append((frame.sequence_number, frame.body))
    return found


async def _batch_by_batch(log: PartitionLog, max_bytes: int) -> list[tuple[int, bytes]]:
    """Return (offset, body) of the whole log, read in bulk."""
    found: list[tuple[int, bytes]] = []
    offset = log.first_offset
    while offset < log.end_offset:
        chunk = await log.read_whole(offset, max_bytes)
        assert chunk.first_offset == offset  # since the one before ended with a batch
        found += messages(chunk)
        offset = chunk.next_offset
    return found


async def everything(log: PartitionLog, max_bytes: int = 1000) -> list[bytes]:
    """Return the bodies of the whole log, read chunk by chunk."""
    found: list[tuple[int, bytes]] = []
    offset = log.first_offset
    while offset < log.end_offset:
        chunk = await log.read(offset, max_bytes)
        assert chunk.first_offset == offset
        assert chunk.positions
        found += messages(chunk)
        offset = chunk.next_offset
    assert [offset for offset, _ in found] == list(range(log.first_offset, log.end_offset))
    assert await _batch_by_batch(log, max_bytes) == found
    return [body for _, body in found]


def edit_metadata(data_dir: Path, values: Mapping[str, Any | None]) -> None:
    """Change what is stored (None: remove) while no broker runs."""
    files, completions = OpenFiles(), Completions()
    writers = WriterThreads("unused", 0, completions)
    found = recover_metadata(files, data_dir)
    encoded = {key: None if value is None else msgspec.json.encode(value) for key, value in values.items()}
    committer = LocalCommitter(writers, SyncPace(), syncs=True)
    MetadataStore(found.log, found.entries, committer, completions, SyncPace()).write_now(encoded)
    writers.close()
    files.close()


def flip(path: Path, at: int) -> None:
    """Flip one bit of a byte."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << at % 8
    path.write_bytes(data)


def as_killed(data_dir: Path) -> None:
    """Take away what only a clean stop leaves: the proof of where its logs ended."""
    (data_dir / "clean-stop").unlink()


def metadata_log(data_dir: Path) -> Path:
    """The newest file of the metadata."""
    return log_paths(data_dir / "metadata")[-1]


def partition(directory: Path, topic: str = "t", number: int = 0) -> Path:
    return directory / "data" / "topics" / topic / str(number)


def logs(directory: Path) -> list[Path]:
    """The .log files of t/0, oldest first."""
    return sorted(partition(directory).glob("*.log"))


def indexes(directory: Path) -> list[Path]:
    return sorted(partition(directory).glob("*.idx"))


# The modules of storage that run what was queued, and the tasks that they run it in.
RUNNERS = {"completions.py", "commit_step.py", "writer_threads.py", "local_engine.py", "metadata_store.py", "faults.py"}


def storage_at_work() -> set[str]:
    """Return the modules of storage that are in the middle of something on this stack."""
    frame, found = sys._getframe(1), set()
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if "storage" in path.parts and "tests" not in path.parts and path.name not in RUNNERS:
            found.add(path.name)
        frame = frame.f_back  # type: ignore[assignment]
    return found
