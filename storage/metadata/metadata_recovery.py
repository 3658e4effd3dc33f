"""What a start does with the metadata: prove it, compare it with the last clean stop, cut a torn tail."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from qb.core.wire.errors import LogDamaged
from qb.storage.clean_stop import NAME, BadProof, LogEnd, read_proof, remove_proof
from qb.storage.files import CannotOpen, OpenFiles
from qb.storage.metadata.metadata_files import DIRECTORY, MetadataContents, read_newest
from qb.storage.metadata.metadata_log import MetadataLog
from qb.storage.metadata.metadata_records import Entries
from qb.storage.metadata.noted_record import BadNote, missing_text, read_noted

READ_FROM_COPY = "nothing is lost: what should stand there was read from the copy of the log"


class RecoveredMetadata(NamedTuple):
    """The metadata, ready for use."""

    log: MetadataLog
    entries: Entries
    notes: list[str]  # for the operator
    ends: Mapping[str, LogEnd]  # where the logs ended, if the last stop was a clean one


def recover_metadata(files: OpenFiles, data_dir: Path, ends: Mapping[str, LogEnd] | None = None) -> RecoveredMetadata:
    """Open the metadata of a directory that has some. Blocks. Raises CannotOpen if it is damaged, OSError.

    `ends`: it is a copy that was cut back to these ends, and its changes need no sync.
    """
    notes: list[str] = []
    try:
        proof = read_proof(data_dir) if ends is None else ends
    except BadProof as bad:
        proof = None
        notes.append(str(bad))
    try:
        contents = read_newest(data_dir / DIRECTORY)
        if proof is not None:
            contents = checked(contents, proof)
        else:
            notes += notes_on_end(data_dir, contents)
        remove_proof(data_dir)
        log = MetadataLog(files, contents, syncs=ends is None)
    except LogDamaged as damage:
        what = f"restore {damage.file} from a backup, or see what it costs to go on without: qb repair {data_dir}"
        raise CannotOpen(f"{damage}. Nothing was changed; {what}") from damage
    except OSError as error:
        raise CannotOpen(f"{data_dir / DIRECTORY} cannot be opened: {error.strerror}") from error
    return RecoveredMetadata(log, contents.entries, [*notes, *_notes_on(contents)], proof or {})


def notes_on_end(data_dir: Path, contents: MetadataContents) -> list[str]:
    """Compare the metadata of a killed broker with the record that it noted last; returns notes for the operator.

    Raises LogDamaged if more than the last record is missing, OSError.
    """
    try:
        missing = missing_text(contents, read_noted(data_dir))
    except BadNote as bad:
        return [str(bad)]
    return [missing] if missing and not contents.torn_bytes else []


def _notes_on(contents: MetadataContents) -> list[str]:
    """Return a sentence for each thing that an operator should know of the metadata."""
    notes = [f"{damage}; {READ_FROM_COPY}" for damage in contents.damages]
    if contents.damages:
        return notes
    if contents.torn_bytes:
        notes.append(torn_text(contents))
    if contents.copy_note:
        notes.append(contents.copy_note)
    return notes


def checked(contents: MetadataContents, proof: Mapping[str, LogEnd]) -> MetadataContents:
    """Compare the metadata with where the last clean stop left it: then nothing behind its end is a tear.

    Raises LogDamaged if it does not end there.
    """
    path = contents.path
    proved = proof.get(proof_key(path))
    if proved is None:
        left = ", ".join(key for key in proof if key.startswith(f"{DIRECTORY}/")) or "none"
        raise LogDamaged(str(path), 0, f"it is not the file that the last clean stop left ({left}), as {NAME} proves")
    if contents.log_end != proved:
        what = f"the records end here, but not as at the last clean stop, at byte {proved.size}, as {NAME} proves"
        raise LogDamaged(str(path), contents.size, what)
    if contents.damages or not contents.torn_bytes:
        return contents._replace(torn_bytes=0, was_stopped=True)
    behind = LogDamaged(str(path), contents.size, f"{contents.torn_bytes} bytes stand behind the last record")
    return contents._replace(damages=[behind], torn_bytes=0, was_stopped=True)


def proof_key(path: Path) -> str:
    """Return how the proof of a clean stop names a file of the metadata."""
    return f"{DIRECTORY}/{path.name}"


def torn_text(contents: MetadataContents) -> str:
    """Return the note for the operator about a torn tail."""
    size = "1 byte" if contents.torn_bytes == 1 else f"{contents.torn_bytes} bytes"
    return (
        f"cut {size} off the end of {contents.path}: the last change was half written, or damaged later; "
        "if it was acked, it is lost"
    )
