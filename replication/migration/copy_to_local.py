"""Making an ordinary data directory of what a journal holds.

It is taken as a copy, as a follower does, and is no local directory before its checkpoint is removed: that is the mark.
One that was interrupted goes on where it was.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import trio

from qb.replication.engine.checkpoint import read_checkpoint
from qb.replication.engine.replicated_cell import ReplicatedCell
from qb.replication.journal.journal import Journal
from qb.storage.clean_stop import write_proof
from qb.storage.cut_back import CHECKPOINT
from qb.storage.engine import RecoveryReport
from qb.storage.files import CannotOpen, make_directory, replace_durably, sync_directory
from qb.storage.local_engine import EngineSettings, LocalEngine

UNDER_WAY = "migration"  # the file that says so
COPIED = "everything is here"  # what it says when only the directory is yet to be made a local one


def begin(data_dir: Path, source: str) -> None:
    """Make an empty directory ours. Blocks. Raises CannotOpen if it holds anything but an interrupted migration."""
    make_directory(data_dir)
    if (data_dir / UNDER_WAY).exists():
        return
    if any(data_dir.iterdir()):
        raise CannotOpen(f"{data_dir} is not empty: a journal can only be migrated into a new directory")
    replace_durably(data_dir / UNDER_WAY, f"from {source}\n".encode())


async def copy_to_local(
    settings: EngineSettings, journal: Journal, identity: str, source: str, *, own: Callable[[int], None] | None = None
) -> RecoveryReport:
    """Take everything that the journal holds, and stop it cleanly; returns what a start finds in it.

    Args:
        settings: Of storage; they name the directory.
        identity: Of the stream that the journal is in.
        source: Where the data comes from, for people.
        own: Called with the epoch when the journal is ours: then the lease can be held.

    A fence is written into the journal, so that nothing can come behind what was read.
    Raises CannotOpen, MigrationUnfinished, OSError, and as ReplicatedCell.take_over().
    """
    data_dir = Path(settings.data_dir)
    await trio.to_thread.run_sync(begin, data_dir, source)
    if not await trio.to_thread.run_sync(_is_copied, data_dir):
        cell = await trio.to_thread.run_sync(ReplicatedCell.open, settings, journal, identity)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(cell.run)
                await cell.take_over()
                if own is not None:
                    own(cell.epoch)
                await cell.release()
                nursery.cancel_scope.cancel()
        finally:
            cell.close()
        await trio.to_thread.run_sync(_copied, data_dir)
    return await _made_local(settings, data_dir)


def _copied(data_dir: Path) -> None:
    checkpoint = read_checkpoint(data_dir)
    assert checkpoint is not None
    assert checkpoint.ends is not None
    write_proof(data_dir, checkpoint.ends.log_ends())
    replace_durably(data_dir / UNDER_WAY, COPIED.encode())


def _is_copied(data_dir: Path) -> bool:
    return (data_dir / UNDER_WAY).read_text() == COPIED


async def _made_local(settings: EngineSettings, data_dir: Path) -> RecoveryReport:
    """Make a local directory of a whole copy, and see that it opens."""
    await trio.to_thread.run_sync(_remove, data_dir, CHECKPOINT)
    engine = await trio.to_thread.run_sync(LocalEngine.open, settings)
    try:
        await engine.end()
    finally:
        engine.close()
    await trio.to_thread.run_sync(_remove, data_dir, UNDER_WAY)
    return engine.recovery


def _remove(data_dir: Path, name: str) -> None:
    (data_dir / name).unlink(missing_ok=True)
    sync_directory(data_dir)
