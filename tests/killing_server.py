"""`python killing_server.py STEP ...`: the real server, which kills itself with -9 at a named step of a commit."""

from __future__ import annotations

import functools
import inspect
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import core.copying
import server
from core.committing import Committing
from core.copying import Copying
from storage.metadata import LocalMetadata
from storage.partition_log import LocalLog
from storage.stage_file import StageFile
from storage.staging import LocalStage

core.copying.RUN_BYTES = 2_000  # so that a partition's share is several runs

When = Callable[..., Any]


def always(*_: Any, **__: Any) -> bool:
    return True


def is_decision(_: Any, key: str, *__: Any, **___: Any) -> bool:
    return key.startswith("transaction/")


def some_are_decided(committing: Committing) -> bool:
    return bool(committing._decisions)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def before(owner: type, name: str, when: When = always) -> Callable[[], None]:
    """Die when a method is called."""
    return lambda: _patch(owner, name, when, 1, first=True)


def after(owner: type, name: str, when: When = always, count: int = 1) -> Callable[[], None]:
    """Die when a method has returned for the count-th time."""
    return lambda: _patch(owner, name, when, count, first=False)


def _patch(owner: type, name: str, when: When, count: int, *, first: bool) -> None:
    real = getattr(owner, name)
    left = [count]

    def is_due(*arguments: Any, **keywords: Any) -> bool:
        left[0] -= bool(when(*arguments, **keywords))
        return left[0] == 0 and bool(when(*arguments, **keywords))

    @functools.wraps(real)
    def call(*arguments: Any, **keywords: Any) -> Any:
        due = is_due(*arguments, **keywords)
        if due and first:
            die()
        answer = real(*arguments, **keywords)
        if due:
            die()
        return answer

    @functools.wraps(real)
    async def call_async(*arguments: Any, **keywords: Any) -> Any:
        due = is_due(*arguments, **keywords)
        if due and first:
            die()
        answer = await real(*arguments, **keywords)
        if due:
            die()
        return answer

    setattr(owner, name, call_async if inspect.iscoroutinefunction(real) else call)


# Steps before the decision is durable, and steps after it, in the order of a commit.
UNDECIDED = {
    "a frame is staged and not answered": before(LocalStage, "_take_in"),
    "the commit has been asked for": before(Committing, "_carry_out"),
    "all is checked": before(Committing, "_write_down"),
    "the logs are held": after(Copying, "hold"),
}
DECIDED = {
    "the line is durable": after(LocalMetadata, "put", is_decision),
    "the copy begins": before(Copying, "copy"),
    "a run is given to a log": after(Copying, "_append"),
    "all runs are on their way": after(Copying, "_append", count=16),
    "a run is durable": after(Copying, "_appended"),
    "half of it is durable": after(Copying, "_appended", count=8),
    "all but one run are durable": after(Copying, "_appended", count=15),
    "all of it is durable": after(Copying, "copy"),
    "the receipt is durable": after(LocalMetadata, "put", is_decision, count=2),
    "one log shows it": after(LocalLog, "release"),
    "all logs show it": after(Copying, "release"),
    "it is answered": before(Committing, "_clear", some_are_decided),
    "a stage is deleted": after(StageFile, "delete"),
    "the stages are deleted": after(Committing, "_clear", some_are_decided),
}

if __name__ == "__main__":
    (UNDECIDED | DECIDED)[sys.argv[1]]()
    sys.exit(server.main([]))
