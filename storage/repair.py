"""Going on without metadata that is damaged in both of its files: what that would cost, and doing it when asked.

docs/STORAGE.md, "Repair", says what is known, what is in doubt, and why no offset is given out twice.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from qb.core.wire.clock import now_ms
from qb.core.wire.errors import LogDamaged
from qb.storage.clean_stop import NAME as CLEAN_STOP
from qb.storage.clean_stop import BadProof, LogEnd, read_proof, write_proof
from qb.storage.cut_back import CHECKPOINT
from qb.storage.data_directory import VERSION, check_format, check_metadata, without_format
from qb.storage.engine import Topic
from qb.storage.files import CannotOpen, OpenFiles, create_file, datasync, make_directory, sync_directory
from qb.storage.log.log_extents import KEY as EXTENT
from qb.storage.log.log_extents import MARKS, UNKNOWN
from qb.storage.log.log_recovery import base_offsets
from qb.storage.log.sealed_batches import BadBatch, walk
from qb.storage.log.segment import reader, segment_name
from qb.storage.metadata.metadata_copy import MetadataCopy
from qb.storage.metadata.metadata_files import DIRECTORY, copy_of, log_path, log_paths, read_newest
from qb.storage.metadata.metadata_log import write_snapshot
from qb.storage.metadata.metadata_records import ChainEnd, Entries, StoredValue
from qb.storage.metadata.metadata_recovery import checked, notes_on_end, proof_key
from qb.storage.metadata.metadata_salvage import SalvagedMetadata, salvage
from qb.storage.metadata.noted_record import BadNote, read_noted
from qb.storage.stages.stage_store import NOTED
from qb.storage.topic_directories import TopicDirectories

ASIDE = "metadata-damaged-"
TOPIC = "topic/"
# What keys begin with, what they are about, and what an older value of one would mean.
MEANINGS = {
    "topic": "topics (they may have been changed or deleted since, or have more partitions)",
    "subscription": "subscriptions (they may have been changed or deleted since)",
    "cursor": "positions of subscriptions (what was acked since may be delivered again)",
    "dead": "dead letters of subscriptions (some may be listed that were settled, or not be listed)",
    "offset": "offsets of groups (what was committed since may be read again)",
    "group": "groups (they may have been deleted since)",
    "transaction": "transactions (one committed since may be visible in part, or be stored again when it is repeated)",
    "stage": "open stages (they may have been committed or ended since)",
    "owner": "owners of transactions",
    "producers": "producers",
    "groups": "groups as a whole",
}


class MetadataRepair(msgspec.Struct):
    """What a repair would go on with."""

    why: str  # the start is refused
    damages: list[str]  # file, position and what
    kept: int  # entries that are known
    doubtful: dict[str, list[str]]  # what is in doubt, by what its key begins with
    legible: list[str]  # keys that can be read in the damaged bytes, and prove nothing
    topics: list[str]  # directories that become topics, or topics that get more partitions
    number: int  # of the new file's snapshot


def plan(data_dir: Path) -> tuple[MetadataRepair, Entries] | None:
    """Return what a repair would go on with; None if the metadata needs none. Blocks.

    The caller has the lock of the directory. Raises CannotOpen if a repair of the metadata would not help.
    """
    check_repairable(data_dir)
    try:
        proof = read_proof(data_dir)
    except BadProof:
        proof = None
    why = _refusal(data_dir, proof)
    if why is None:
        return None
    found = salvage(data_dir / DIRECTORY)
    found = _compared(data_dir, found, proof)
    entries = dict(found.entries)
    topics = _adopt(data_dir, entries, found.doubtful)
    _forget_beginnings(entries, found.doubtful)
    for key in _ended_stages(data_dir, found.doubtful):
        del entries[key]
    numbers = [found.last_number, _noted(data_dir), *(int(path.name[:20]) for path in log_paths(data_dir / DIRECTORY))]
    in_doubt = {kind: sorted(each for each in found.doubtful if each.startswith(f"{kind}/")) for kind in MEANINGS}
    damages = [str(each).removesuffix("; see: qb verify") for each in found.damages]
    known = len(found.entries) - len(found.doubtful)
    doubtful = {kind: keys for kind, keys in in_doubt.items() if keys}
    return MetadataRepair(why, damages, known, doubtful, found.legible, topics, max(numbers) + 1), entries


def check_repairable(data_dir: Path) -> None:
    """Raises CannotOpen if the directory has no metadata of our format, or is a copy of a cell."""
    if (data_dir / CHECKPOINT).exists():
        raise CannotOpen(f"{data_dir} is the copy of a journal: it is taken anew; see: qb cluster repair")
    if not (data_dir / "format").is_file():
        raise CannotOpen(without_format(data_dir))
    if check_format(data_dir / "format") != VERSION:
        raise CannotOpen(f"{data_dir} is of an older format, whose metadata cannot be repaired")


def _refusal(data_dir: Path, proof: Mapping[str, LogEnd] | None) -> str | None:
    """Return why a start refuses the metadata."""
    try:
        check_metadata(data_dir)
        contents = read_newest(data_dir / DIRECTORY)
        if proof is None:
            notes_on_end(data_dir, contents)
        else:
            checked(contents, proof)
    except LogDamaged as damage:
        return str(damage).removesuffix("; see: qb verify")
    except CannotOpen:
        return f"{data_dir / DIRECTORY} has no metadata"
    return None


def _compared(data_dir: Path, found: SalvagedMetadata, proof: Mapping[str, LogEnd] | None) -> SalvagedMetadata:
    """Take everything to be in doubt if the log does not end where it should."""
    if proof is None:
        noted = _noted(data_dir)
        what = f"the records end with number {found.last_number}, but number {noted} was stored"
        is_short = noted > found.last_number
    else:
        stopped = proof.get(proof_key(found.path))
        what = f"the last record is not the one of the last clean stop, as {CLEAN_STOP} proves"
        is_short = stopped is None or stopped.last != found.end.last
    if not is_short:
        return found
    damages = [*found.damages, LogDamaged(str(found.path), found.end.size, what)]
    return found._replace(damages=damages, doubtful=frozenset(found.entries))


def _noted(data_dir: Path) -> int:
    try:
        return read_noted(data_dir)
    except BadNote:
        return 0


# What cannot be left as it was proved last


def _adopt(data_dir: Path, entries: Entries, doubtful: Iterable[str]) -> list[str]:
    """Enter topics that only have a directory, and partitions that have messages; returns them in words."""
    if not (data_dir / "topics").is_dir():
        return []
    directories, words = TopicDirectories(data_dir / "topics"), []
    for name in directories.names():
        key = TOPIC + name
        there = directories.count_partitions(name)
        if key not in entries:
            made: Any = Topic(topic=name, partitions=there, retention_hours=0, retention_bytes=0, created_ms=now_ms())
            words.append(
                f"{name}, with {there} partitions, is known by its directory alone: nothing of it will be dropped"
            )
            entries[key] = StoredValue(msgspec.json.encode(made), 1)
        elif key in doubtful:
            made = msgspec.json.decode(entries[key].data)
            used = [number for number in range(there) if _has_messages(directories.partition(name, number))]
            if made["partitions"] <= max(used, default=0):
                words.append(f"{name} has messages in {used[-1] + 1} partitions, not in {made['partitions']}")
                made["partitions"] = used[-1] + 1
                entries[key] = StoredValue(msgspec.json.encode(made), entries[key].version + 1)
    return words


def _has_messages(directory: Path) -> bool:
    """Say whether a partition has ever had messages: a segment that begins later, or a batch behind the first."""
    bases = base_offsets(directory)
    if bases != [0]:
        return bool(bases)
    fd = os.open(segment_name(directory, 0)[0], os.O_RDONLY)
    try:
        return any(batch.positions for batch in walk(reader(fd), 0, os.fstat(fd).st_size, 0))
    except BadBatch:
        return True  # the start says what is wrong with it
    finally:
        os.close(fd)


def _forget_beginnings(entries: Entries, doubtful: Iterable[str]) -> None:
    """Believe the files of logs where they begin: what retention has dropped may have been noted in what is lost."""
    for key in doubtful:
        if key.startswith(EXTENT) and not key.endswith(MARKS):
            _, following = msgspec.json.decode(entries[key].data)
            entries[key] = StoredValue(msgspec.json.encode((UNKNOWN.first, following)), entries[key].version + 1)


def _ended_stages(data_dir: Path, doubtful: Iterable[str]) -> list[str]:
    """Return the keys of stages in doubt that have no file: they ended, and their commit is refused either way."""
    keys = [key for key in doubtful if key.startswith(NOTED)]
    return [key for key in keys if not (data_dir / "staged" / f"{key.removeprefix(NOTED)}.log").exists()]


# Carrying it out


def repair(data_dir: Path, planned: MetadataRepair, entries: Entries) -> Path:
    """Go on with these entries; returns where the damaged files are. Blocks. Raises OSError.

    The caller has the lock of the directory. Killed anywhere, it leaves the directory as it was, or repaired.
    """
    aside = _set_aside(data_dir)
    path = log_path(data_dir / DIRECTORY, planned.number)
    make_directory(path.parent)
    size, end = write_snapshot(path.with_suffix(".new"), entries, ChainEnd(planned.number))
    try:
        proof = read_proof(data_dir)
    except BadProof:
        proof = None
    if proof is not None:
        write_proof(data_dir, {**proof, proof_key(path): LogEnd(size, end.crc)})
    os.replace(path.with_suffix(".new"), path)
    sync_directory(path.parent)
    files = OpenFiles()
    MetadataCopy(files, path).finish(size)
    files.close()
    return aside


def _set_aside(data_dir: Path) -> Path:
    """Copy what there is of the metadata durably to a directory of its own."""
    number = 1
    while (aside := data_dir / f"{ASIDE}{number}").exists():
        number += 1
    for directory in (data_dir / DIRECTORY, copy_of(data_dir / DIRECTORY / "any").parent):
        make_directory(aside / directory.name)
        for path in directory.glob("*.log"):
            fd = create_file(aside / directory.name / path.name)
            with path.open("rb") as source, open(fd, "wb") as target:
                shutil.copyfileobj(source, target)
                target.flush()
                datasync(fd)
        sync_directory(aside / directory.name)
    return aside
