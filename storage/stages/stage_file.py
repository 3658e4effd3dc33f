"""One stage on disk: STAGE frames as they came, each with a seal behind it.

The first frame has no body and says whose stage it is. What a stage holds is what its seals prove from the front on:
a commit names the number of messages, so a stage that has lost some is never taken for whole.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from qb.core.wire.errors import DiskFull, LogPoisoned
from qb.core.wire.frames import HEAD, LENGTH, OVERHEAD, MessageType, decode_properties, encode_frame
from qb.core.wire.runs.staged_frames import skip_messages
from qb.storage.commit.batch_commit import FailedBatch
from qb.storage.engine import StagedMessages, Where
from qb.storage.files import NO_ROOM, OpenFiles, SyncFailed, datasync, sync_directory, write_all, write_durably
from qb.storage.log.sealed_batches import SEAL, SEAL_HEAD, WINDOW, BadBatch, Read, find_seal, seal
from qb.storage.log.segment import reader

STAGE = int(MessageType.STAGE)
NEWEST = 64  # records of which is known where they begin: those that are sent again after a lost connection
LOOKED_BEHIND = 64 * 1024 * 1024  # how far a seal is looked for behind what is not proved


class StageRecord(NamedTuple):
    """A STAGE frame that its seal proves."""

    first: int  # how many messages came before it
    count: int  # type: ignore[assignment]  # messages in it
    frame: memoryview
    end: int  # where the next record begins

    @property
    def properties(self) -> Mapping[str, str]:
        return decode_properties(bytes(self.frame[HEAD.size : HEAD.size + self._properties_length]))

    @property
    def body(self) -> memoryview:
        return body_of(self.frame)

    @property
    def where(self) -> Where:
        properties = self.properties
        return properties["topic"], int(properties["partition"])

    @property
    def _properties_length(self) -> int:
        return HEAD.unpack_from(self.frame)[4]  # type: ignore[no-any-return]


def body_of(frame: memoryview) -> memoryview:
    """Return the body of a whole frame, not copied."""
    return frame[HEAD.size + HEAD.unpack_from(frame)[4] + LENGTH.size :]


class RecoveredStage(NamedTuple):
    """What a start finds in a stage."""

    transaction: str
    number: int | None
    counts: dict[Where, int]  # messages for each partition
    size: int  # up to here it is proved
    note: str | None  # for the operator
    newest: Sequence[tuple[int, int]] = ()  # of its last records: how many messages came before, and where it begins


class StageRepeat(NamedTuple):
    """A STAGE frame whose numbers were used before."""

    frame: bytes
    where: Where
    first: int  # how many messages came before it
    count: int  # type: ignore[assignment]


class StagePiece(NamedTuple):
    """A STAGE frame on its way into a stage."""

    frame: bytes
    where: Where
    count: int  # type: ignore[assignment]


def walk(read: Read, position: int, end: int, first: int | None = 0, window: int = WINDOW) -> Iterator[StageRecord]:
    """Yield the records from `position` up to `end`; `first` messages came before, or (None) as many as the seal says.

    Raises BadBatch at the first byte that does not belong to a sealed record.
    """
    base, view = position, memoryview(b"")
    while position < end:
        record = _next_record(view[position - base :], position, first)
        if record is None:
            have = base + len(view)
            more = read(have, min(max(window, have - position), end - have)) if have < end else b""
            if not more:
                raise BadBatch(position, first or 0, "the record that begins here ends before its seal")
            base, view = position, memoryview(bytes(view[position - base :]) + more)
            continue
        yield record
        position, first = record.end, record.first + record.count


def _next_record(view: memoryview, position: int, first: int | None) -> StageRecord | None:
    """Return the record at the front of `view`, which lies at `position`; None if it needs more. Raises BadBatch."""
    if len(view) < HEAD.size:
        return None
    total, kind, _, _, properties_length = HEAD.unpack_from(view)
    if kind != STAGE or total < OVERHEAD + properties_length:
        raise BadBatch(position, first or 0, "here stands no STAGE frame")
    if len(view) < total + SEAL_HEAD.size:
        return None
    _, kind, before, append_ms, _, _, _, count, _ = SEAL_HEAD.unpack_from(view, total)
    if kind != SEAL or first not in (None, before):
        raise BadBatch(position, first or 0, "the STAGE frame that begins here has no seal of its own")
    end = total + SEAL_HEAD.size
    if view[total:end] != seal((view[:total],), before, count, append_ms):
        raise BadBatch(position, before, "the checksum of the STAGE frame that begins here does not match")
    return StageRecord(before, count, view[:total], position + end)


def other_stage(head: StageRecord, path: Path) -> str | None:
    """Return what is wrong with a file whose first record says that it is of another stage."""
    said = head.properties.get("stage", path.stem)
    return None if said == path.stem else f"it is the file of stage {said}, under a wrong name"


class StageFile:
    """The file of one stage."""

    def __init__(self, files: OpenFiles, path: Path) -> None:
        self.path = str(path)
        self._files = files

    def create(self, transaction: str, number: int | None, now_ms: int) -> int:
        """Make it durably and return its size. Raises OSError; a file that no client knows may be left then."""
        properties = {"stage": Path(self.path).stem, "transaction": transaction}
        if number is not None:
            properties["number"] = str(number)
        head = encode_frame(MessageType.STAGE, 0, now_ms, properties)
        record = head + seal((head,), 0, 0, now_ms)
        with self._files.use(self.path, create=True) as fd:
            try:
                write_durably(fd, (record,), 0)
            except OSError as error:
                error.filename = self.path
                raise
        sync_directory(Path(self.path).parent)
        return len(record)

    def find(self) -> RecoveredStage | None:
        """Return what it holds; None if its creation was never finished, so that no client knows it. Raises OSError."""
        with self._files.use(self.path) as fd:
            end, note, size = os.fstat(fd).st_size, None, 0
            head: Mapping[str, str] | None = None
            counts: dict[Where, int] = {}
            newest: deque[tuple[int, int]] = deque(maxlen=NEWEST)
            try:
                for record in walk(reader(fd), 0, end):
                    if head is None:
                        head = record.properties
                        if other := other_stage(record, Path(self.path)):
                            raise OSError(errno.EIO, other)
                    else:
                        counts[record.where] = counts.get(record.where, 0) + record.count
                    newest.append((record.first, size))
                    size = record.end
            except BadBatch as bad:
                note = f"{self.path} is used up to byte {size} only; behind it: {bad.what}"
                damaged = find_seal(reader(fd)(size, min(end - size, LOOKED_BEHIND)), bad.offset) is not None
                if damaged and head is None:
                    raise OSError(errno.EIO, f"it does not say whose it is: {bad.what}") from bad
            datasync(fd)  # what a killed broker had written but not synced may be committed now
        self._files.forget(self.path)  # there may be many, and few are asked for again
        if head is None:
            return None
        number = int(head["number"]) if "number" in head else None
        return RecoveredStage(head["transaction"], number, counts, size, note, newest)

    def read(self, position: int, max_bytes: int, size: int) -> tuple[Sequence[StagedMessages], int]:
        """Return the messages of about `max_bytes` from `position` on, gathered by partition, and where to go on.

        Raises BadBatch, OSError.
        """
        frames: dict[Where, bytearray] = {}
        counts: dict[Where, int] = {}
        start = position
        with self._files.use(self.path) as fd:
            for record in walk(reader(fd), start, size, None, window=max_bytes):
                position = record.end
                if record.count:
                    where = record.where
                    frames.setdefault(where, bytearray()).extend(record.body)
                    counts[where] = counts.get(where, 0) + record.count
                if frames and position - start >= max_bytes // 2:
                    break  # the rest of the window is a part of the next record
        return [StagedMessages(*where, counts[where], data) for where, data in frames.items()], position

    def holds(self, repeat: StageRepeat, position: int, size: int) -> bool:
        """Say whether the same messages are stored under the same numbers; none of them stands before `position`.

        Blocks. Raises BadBatch, OSError.
        """
        first, wanted = repeat.first, body_of(memoryview(repeat.frame))
        last = first + repeat.count
        with self._files.use(self.path) as fd:
            for record in walk(reader(fd), position, size, None):
                skipped = max(0, first - record.first)
                if skipped >= record.count:
                    continue
                body = record.body[skip_messages(record.body, skipped) :]
                count = min(record.count - skipped, last - first)
                body = body[: skip_messages(body, count)]
                if record.where != repeat.where or body != wanted[: len(body)]:
                    return False
                first, wanted = first + count, wanted[len(body) :]
                if first == last:
                    return not wanted
        return False

    def delete(self) -> None:
        """Delete it. Raises OSError."""
        self._files.forget(self.path)
        Path(self.path).unlink(missing_ok=True)

    def write(self, data: bytes, size: int, *, sync: bool = True) -> None:
        """Write records behind the first `size` bytes, durably, and forget whatever stood there. Raises OSError.

        It syncs whatever the settings say: a decision is durable, so what it decides about must be. Without `sync` the
        caller has made it durable elsewhere.
        """
        with self._files.use(self.path) as fd:
            if os.fstat(fd).st_size != size:
                os.ftruncate(fd, size)  # what a start found behind the last seal
            try:
                if sync:
                    write_durably(fd, (data,), size)
                else:
                    write_all(fd, data, size)
            except SyncFailed:
                raise
            except OSError as error:
                _cut(fd, size, error)
                raise


class StageWrite(NamedTuple):
    """What a stage hands to a committer. It is the only write of that stage meanwhile."""

    file: StageFile
    pieces: Sequence[StagePiece]
    first: int  # how many messages the stage holds
    size: int  # and in how many bytes
    append_ms: int
    sync: bool = True

    @property
    def stage_id(self) -> str:
        """The stage that it writes to."""
        return Path(self.file.path).stem

    def carry_out(self) -> int | FailedBatch:
        """Write and sync; returns the new size. Blocks; never raises OSError."""
        parts: list[bytes] = []
        first = self.first
        for frame, _, count in self.pieces:
            parts += (frame, seal((frame,), first, count, self.append_ms))
            first += count
        data = b"".join(parts)
        try:
            self.file.write(data, self.size, sync=self.sync)
        except SyncFailed as failure:
            text = f"the stage is ended, since {self.file.path} could not be made durable: {failure.strerror}"
            return FailedBatch(LogPoisoned(text), poisoned=True)
        except OSError as failure:
            kind = DiskFull if failure.errno in NO_ROOM else LogPoisoned
            return FailedBatch(
                kind(f"{self.file.path} could not store the messages: {failure.strerror}"), poisoned=False
            )
        return self.size + len(data)


def _cut(fd: int, size: int, failure: OSError) -> None:
    """Take back what may have been written. Raises SyncFailed if that cannot be done."""
    try:
        os.ftruncate(fd, size)
    except OSError as error:
        text = f"{failure.strerror}, and its remains cannot be cut off: {error.strerror}"
        raise SyncFailed(failure.errno, text) from error
