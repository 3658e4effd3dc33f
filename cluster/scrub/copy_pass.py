"""One pass over the files of this broker's own copy: every seal is proved, while the copy goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import msgspec
import trio

from qb.cluster.scrub.copy_comparison import MOST_FINDINGS
from qb.cluster.scrub.scrub_pace import ScrubPace
from qb.storage.log.sealed_batches import BadBatch
from qb.storage.log.segment import Segment

PORTION = 1 << 18  # bytes between two pauses
TURN = 0.001  # seconds between two pauses: meanwhile the event loop may have to wait for this thread


class CopyProof(msgspec.Struct):
    """What a pass has found."""

    files: int = 0
    bytes: int = 0
    findings: list[str] = []
    damaged: int = 0  # files


async def prove_copy(segments: Sequence[tuple[Segment, int]], pace: ScrubPace) -> CopyProof:
    """Prove these segments up to these sizes, one after another in a thread."""
    proof, stopped = CopyProof(), threading.Event()
    try:
        for segment, size in segments:
            await trio.to_thread.run_sync(_prove, proof, segment, size, pace, stopped, abandon_on_cancel=True)
    finally:
        stopped.set()
    return proof


class _Stopped(Exception):
    """Nobody waits for the proof any more."""


def _prove(proof: CopyProof, segment: Segment, size: int, pace: ScrubPace, stopped: threading.Event) -> None:
    """Blocks."""
    portion, began = 0, time.monotonic()

    def proved(size: int) -> None:
        nonlocal portion, began
        portion += size
        proof.bytes += size
        if portion >= PORTION or time.monotonic() - began >= TURN:
            if stopped.wait(pace.pause(portion, time.monotonic() - began)):
                raise _Stopped
            portion, began = 0, time.monotonic()

    try:
        segment.prove(size, proved)
        stopped.wait(pace.pause(portion, time.monotonic() - began))
    except (FileNotFoundError, _Stopped):
        return  # it was dropped meanwhile
    except BadBatch as bad:
        _note(proof, f"{segment.log_path}: byte {bad.position}: {bad.what}")
    except OSError as error:
        _note(proof, f"{segment.log_path}: {error.strerror or error}")
    proof.files += 1


def _note(proof: CopyProof, finding: str) -> None:
    proof.damaged += 1
    if len(proof.findings) < MOST_FINDINGS:
        proof.findings.append(finding)
