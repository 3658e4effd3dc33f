"""The stages of an engine: messages that are durable before they can be read.

Everything here belongs to the event loop. A stage has at most one write under way; what arrives meanwhile goes with the
next one, as publishes do.
"""

from __future__ import annotations

import logging
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import trio

from qb.core.wire.errors import (
    BrokerError,
    Internal,
    LogDamaged,
    LogPoisoned,
    OutOfSequence,
    ShuttingDown,
    UnknownStage,
)
from qb.storage.clean_stop import LogEnd
from qb.storage.commit.batch_commit import FailedBatch
from qb.storage.engine import Settled, StagedMessages, Where
from qb.storage.files import make_directory, sync_directory
from qb.storage.log.log_context import LogContext
from qb.storage.log.sealed_batches import SEAL_HEAD, BadBatch
from qb.storage.signals import Signal
from qb.storage.stages.stage_file import NEWEST, RecoveredStage, StageFile, StagePiece, StageRepeat, StageWrite

logger = logging.getLogger(__name__)
WRITE_BYTES = 1_000_000  # at most so much goes into one write, as in a log


class _Waiting(NamedTuple):
    """A caller to be answered; without a piece, when what came before is durable."""

    piece: StagePiece | None
    done: Settled

    @property
    def size(self) -> int:
        return len(self.piece.frame) if self.piece else 0


class LocalStage:
    """One stage in a file; what its methods promise stands in qb.storage.engine.Stage."""

    def __init__(self, stage_id: str, shared: LogContext, file: StageFile, found: RecoveredStage) -> None:
        self.stage_id = stage_id
        self.transaction, self.number, self._counts, self._size, _, newest = found
        self._newest = deque(newest, maxlen=NEWEST)  # as in RecoveredStage
        self.failure: BrokerError | None = None
        self.file = file
        self._shared = shared
        self._messages = self._taken = sum(self._counts.values())
        self._waiting: deque[_Waiting] = deque()
        self._waiting_bytes = 0
        self._writing: list[_Waiting] = []
        self._changed = Signal()  # a write has ended

    @property
    def messages(self) -> int:
        return self._messages

    @property
    def taken(self) -> int:
        return self._taken

    @property
    def counts(self) -> Mapping[Where, int]:
        return self._counts

    @property
    def noted(self) -> NotedStage:
        """What the metadata notes of it."""
        return NotedStage(self.transaction, self.number)

    @property
    def size(self) -> int:
        return self._size

    # Appending

    @property
    def has_room(self) -> bool:
        return self._waiting_bytes < self._shared.settings.max_pending_bytes

    async def wait_for_room(self) -> None:
        while not self.has_room:
            await self._changed.wait()

    def append(self, frame: bytes, where: Where, count: int, done: Settled) -> None:
        if self.failure:
            raise self.failure.with_traceback(None)
        self._taken += count
        self._add(_Waiting(StagePiece(frame, where, count), done))
        if not self._writing:
            self._write()

    def repeat(self, frame: bytes, where: Where, first: int, count: int, done: Settled) -> None:
        compare = partial(self._compare, StageRepeat(frame, where, first, count), done)
        if self._writing:
            self._add(_Waiting(None, compare))
        else:
            self._answer([_Waiting(None, compare)], self.failure, self._shared.clock())

    def _compare(self, repeat: StageRepeat, done: Settled, error: BrokerError | None, append_ms: int) -> None:
        """Look whether the messages, which are durable, are the same; in a writer thread, since files are read."""
        if error is not None:
            done(error, append_ms)
            return
        before = [position for first, position in self._newest if first <= repeat.first]
        look = partial(self.file.holds, repeat, max(before, default=0), self._size)
        self._shared.writers.submit(look, partial(self._compared, repeat, done, append_ms))

    def _compared(self, repeat: StageRepeat, done: Settled, append_ms: int, found: bool | BaseException) -> None:
        error: BrokerError | None = None
        if isinstance(found, BadBatch):
            error = LogDamaged(self.file.path, found.position, found.what)
        elif isinstance(found, BaseException):
            error = self.failure or Internal(f"{self.file.path} cannot be read now: {found}")
        elif not found:
            error = OutOfSequence(
                f"stage {self.stage_id!r} holds other messages with the numbers {repeat.first} to "
                f"{repeat.first + repeat.count - 1}: two publishers fill it; begin a stage for each"
            )
        self._answer([_Waiting(None, done)], error, append_ms)

    def _answer(self, waiting: Iterable[_Waiting], error: BrokerError | None, append_ms: int) -> None:
        for _, done in waiting:
            self._shared.completions.add(partial(done, error, append_ms))

    def _add(self, waiting: _Waiting) -> None:
        self._waiting.append(waiting)
        self._waiting_bytes += waiting.size

    def _write(self) -> None:
        """Hand what has gathered to a writer thread."""
        size = 0
        while self._waiting and (not self._writing or size + self._waiting[0].size <= WRITE_BYTES):
            self._writing.append(self._waiting.popleft())
            size += self._writing[-1].size
        self._waiting_bytes -= size
        pieces = [waiting.piece for waiting in self._writing if waiting.piece]
        writing = self._write_of(pieces, self._shared.clock())
        self._shared.committer.submit(writing, partial(self._written, writing))

    def _write_of(self, pieces: Sequence[StagePiece], append_ms: int) -> StageWrite:
        return StageWrite(self.file, pieces, self._messages, self._size, append_ms, self._shared.committer.syncs_stages)

    def replay(self, pieces: Sequence[StagePiece], append_ms: int) -> tuple[StageWrite, Callable[[Any], None]]:
        """Return the work that brings frames here which another broker has made durable, and what takes its result.

        No other write of this stage may be under way.
        """
        writing = self._write_of(pieces, append_ms)
        self._taken += sum([piece.count for piece in pieces])
        return writing, partial(self._written, writing)

    def _written(self, writing: StageWrite, result: int | FailedBatch | BaseException) -> None:
        answered, self._writing = self._writing, []
        error = None
        if isinstance(result, int):
            self._take_in(writing.pieces, result)
            if self._waiting:
                self._write()
        else:
            error = self._take_back(result)
            answered += self._give_up_waiting()
        self._answer(answered, error, writing.append_ms)
        self._changed.set()

    def _take_in(self, pieces: Sequence[StagePiece], size: int) -> None:
        position = self._size
        for frame, where, count in pieces:
            self._newest.append((self._messages, position))
            position += len(frame) + SEAL_HEAD.size
            self._counts[where] = self._counts.get(where, 0) + count
            self._messages += count
        self._size = size

    def _take_back(self, failure: FailedBatch | BaseException) -> BrokerError:
        self._shared.measures.failed_commits += 1
        if not isinstance(failure, FailedBatch):
            logger.error("a stage failed by a fault of ours", exc_info=failure)
            failure = FailedBatch(LogPoisoned(f"the stage is ended, since it failed: {failure!r}"), poisoned=True)
        if failure.poisoned:
            self.failure = self.failure or failure.error
        logger.error("stage %s: %s", self.stage_id, failure.error)
        return failure.error

    def _give_up_waiting(self) -> list[_Waiting]:
        given_up = list(self._waiting)
        self._waiting.clear()
        self._waiting_bytes = 0
        self._taken = self._messages
        return given_up

    # Reading

    async def read(self, position: int, max_bytes: int) -> tuple[Sequence[StagedMessages], int]:
        try:
            return await trio.to_thread.run_sync(self.file.read, position, max_bytes, self._size)
        except BadBatch as bad:
            raise LogDamaged(self.file.path, bad.position, bad.what) from bad
        except FileNotFoundError as missing:
            raise LogDamaged(self.file.path, 0, "the file is missing") from missing
        except OSError as error:
            raise Internal(f"{self.file.path} cannot be read now: {error}") from error

    # Ending

    def abandon(self, error: BrokerError) -> None:
        """Take nothing more, and answer for everything that is on its way."""
        self.failure = error
        answered = self._writing + self._give_up_waiting()
        self._writing = []
        self._answer(answered, error, 0)

    async def end(self, error: BrokerError) -> None:
        """Take nothing more; returns when nothing is being written."""
        self.failure = error
        self._answer(self._give_up_waiting(), error, 0)
        while self._writing:
            await self._changed.wait()


def proof_key(path: Path) -> str:
    """Return how the proof of a clean stop names a stage."""
    return f"{path.parent.name}/{path.name}"


def missing_stages(directory: Path, ends: Mapping[str, LogEnd]) -> list[Path]:
    """Return the stages that the last clean stop left and that are not there."""
    left = [directory.parent / key for key in ends if key.startswith(f"{directory.name}/")]
    return [path for path in left if not path.exists()]


def in_words(error: OSError) -> str:
    """Return what is wrong with a stage whose file cannot be read."""
    return "the file is missing" if isinstance(error, FileNotFoundError) else str(error.strerror)


class NotedStage(msgspec.Struct, frozen=True):
    """What the metadata notes of a stage from its beginning to its end: whose it is."""

    transaction: str
    number: int | None


NOTED = "stage/"  # where the metadata keeps it, by stage


def noted_stages(entries: Mapping[str, Any]) -> dict[str, NotedStage]:
    """Return the stages that were begun and not ended, of the entries under NOTED."""
    return {key.removeprefix(NOTED): msgspec.convert(value, NotedStage) for key, value in entries.items()}


def end_text(stopped: LogEnd) -> str:
    """Return what is wrong with a stage that does not end where the last clean stop left it."""
    return f"its records end here, but the last clean stop left {stopped.last} messages in {stopped.size} bytes"


def new_stage_id() -> str:
    """Return an id that was never used."""
    return f"{secrets.randbits(64):016x}"


class LocalStages:
    """The `staged` directory."""

    def __init__(self, directory: Path, shared: LogContext) -> None:
        self._directory = directory
        self._shared = shared
        self.known: dict[str, LocalStage] = {}

    def recover(self, noted: Mapping[str, NotedStage], ends: Mapping[str, LogEnd]) -> list[str]:
        """Find every stage; returns notes for the operator. Blocks. Raises OSError.

        `noted` are those that were begun and not ended: one whose file is missing is kept as a stage that has failed.
        `ends` is where the last clean stop left each: a stage that ends elsewhere is damaged.
        """
        make_directory(self._directory)
        found = {path.stem for path in self._directory.glob("*.log")}
        notes = [
            self._recover(path, noted.get(path.stem), ends.get(proof_key(path)))
            for path in (self._path(stage_id) for stage_id in sorted(found | noted.keys()))
        ]
        notes += [f"{path} is missing" for path in missing_stages(self._directory, ends) if path.stem not in noted]
        return [note for note in notes if note]

    def _path(self, stage_id: str) -> Path:
        return self._directory / f"{stage_id}.log"

    def ends(self) -> dict[str, LogEnd]:
        """Return where each stage ends, for the proof of a clean stop; of one that failed it is not known."""
        return {
            proof_key(Path(stage.file.path)): LogEnd(stage.size, stage.messages)
            for stage in self.known.values()
            if stage.failure is None or isinstance(stage.failure, ShuttingDown)
        }

    def _recover(self, path: Path, noted: NotedStage | None, stopped: LogEnd | None) -> str | None:
        file, what = StageFile(self._shared.files, path), "the head of the stage is missing"
        try:
            found = file.find()
        except OSError as error:
            found, what = None, in_words(error)
            if noted is None:
                return f"stage {path.stem} is left alone, since it cannot be read: {error}"
        if found is None and noted is None:
            file.delete()
            return f"dropped stage {path.stem}: its beginning was never finished"
        if found is None:
            assert noted is not None
            lost = RecoveredStage(noted.transaction, noted.number, {}, 0, None)
            return self._fail(LocalStage(path.stem, self._shared, file, lost), what)
        stage = self.known[path.stem] = LocalStage(path.stem, self._shared, file, found)
        if stopped is not None and stopped != LogEnd(stage.size, stage.messages):
            return self._fail(stage, end_text(stopped))
        return found.note

    def _fail(self, stage: LocalStage, what: str) -> str:
        """Keep a stage that cannot be committed; returns the note for the operator."""
        self.known[stage.stage_id] = stage
        stage.failure = LogDamaged(stage.file.path, stage.size, what)
        return f"stage {stage.stage_id} of transaction {stage.transaction!r} cannot be committed: {stage.failure}"

    def create(self, transaction: str, number: int | None, stage_id: str = "") -> LocalStage:
        """Make a stage durably; it is not yet among the known ones. Blocks. Raises OSError."""
        stage_id = stage_id or new_stage_id()
        file = StageFile(self._shared.files, self._path(stage_id))
        try:
            size = file.create(transaction, number, self._shared.clock())
        except OSError:
            file.delete()
            raise
        return LocalStage(stage_id, self._shared, file, RecoveredStage(transaction, number, {}, size, None))

    async def end(self, stage_ids: Iterable[str]) -> list[LocalStage]:
        """Take stages out of the known ones; returns those that were, when nothing writes to them any more."""
        ended = [stage for stage_id in stage_ids if (stage := self.known.pop(stage_id, None))]
        for stage in ended:
            await stage.end(UnknownStage(f"stage {stage.stage_id!r} has been ended"))
        return ended

    def remove(self, stages: Iterable[LocalStage]) -> None:
        """Delete ended stages durably. Blocks. Raises OSError; the next start finds what is left then."""
        for stage in stages:
            stage.file.delete()
        sync_directory(self._directory)

    def abandon(self, error: BrokerError) -> None:
        """Answer for whatever is on its way: its result will not be waited for."""
        for stage in self.known.values():
            stage.abandon(error)
