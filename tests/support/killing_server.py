"""`python killing_server.py STEP ...`: the real server, which kills itself with -9 at a named step of a commit."""

from __future__ import annotations

import functools
import inspect
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import qb.core.transactions.stage_copy
from qb import server
from qb.core.transactions.remembered_transactions import RememberedTransactions
from qb.core.transactions.stage_copy import StageCopy
from qb.core.transactions.transaction_commits import TransactionCommits
from qb.storage.log.partition_log import LocalLog
from qb.storage.metadata.metadata_log import MetadataLog
from qb.storage.stages.stage_file import StageFile
from qb.storage.stages.stage_store import LocalStage

qb.core.transactions.stage_copy.RUN_BYTES = 2_000  # so that a partition's share is several runs

When = Callable[..., Any]


def always(*_: Any, **__: Any) -> bool:
    return True


def is_receipt(_: Any, body: bytes, *__: Any) -> bool:
    return b"receipt" in body


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
    "the commit has been asked for": before(TransactionCommits, "_carry_out_round"),
    "all is checked": before(TransactionCommits, "_write_down"),
    "the logs are held": after(StageCopy, "hold"),
}
DECIDED = {
    "the line is durable": after(RememberedTransactions, "write"),
    "the copy begins": before(StageCopy, "begin"),
    "a run is given to a log": after(StageCopy, "_append"),
    "all runs are on their way": after(StageCopy, "_append", count=16),
    "a run is durable": after(StageCopy, "_appended"),
    "half of it is durable": after(StageCopy, "_appended", count=8),
    "all but one run are durable": after(StageCopy, "_appended", count=15),
    "all of it is durable": after(StageCopy, "copy_stages"),
    "the receipt is made": after(RememberedTransactions, "end"),
    "one log shows it": after(LocalLog, "release"),
    "all logs show it": after(StageCopy, "release"),
    "it is answered": before(TransactionCommits, "_clear"),
    "a stage is deleted": after(StageFile, "delete"),
    "the stages are deleted": after(StageFile, "delete", count=2),
    "the receipt is durable": after(MetadataLog, "commit", is_receipt),
}

if __name__ == "__main__":
    (UNDECIDED | DECIDED)[sys.argv[1]]()
    sys.exit(server.main([]))
