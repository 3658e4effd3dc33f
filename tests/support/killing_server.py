"""`python killing_server.py STEP ...`: the real server, which kills itself with -9 at a named step of a commit."""

from __future__ import annotations

import functools
import inspect
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import qb.core.transactions.free_space
import qb.core.transactions.stage_copy
from qb import server
from qb.core.transactions.remembered_transactions import RememberedTransactions
from qb.core.transactions.stage_copy import StageCopy
from qb.core.transactions.transaction_commits import TransactionCommits
from qb.storage.commit.batch_commit import BatchCommit
from qb.storage.engine import TRANSACTIONS
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


def is_line(_: Any, body: bytes, *__: Any) -> bool:
    return b"content" in body


def is_of_transaction(commit: BatchCommit) -> bool:
    return any(each.producer_id == TRANSACTIONS for each in commit.ranges)


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
    "the commit has been asked for": before(TransactionCommits, "_begin_round"),
    "all is checked": before(TransactionCommits, "_write_down"),
    "the logs are held": after(StageCopy, "hold"),
}
DECIDED = {
    "the line is durable": before(TransactionCommits, "_written_down"),
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
# The same of a transaction that lies in its line: four partitions, and nothing else goes to them.
WHOLE_UNDECIDED = {
    "whole: it has come": before(TransactionCommits, "commit_then"),
    "whole: all is checked": before(TransactionCommits, "_write_down"),
    "whole: the logs are held": after(StageCopy, "hold"),
    "whole: the line is about to be written": before(MetadataLog, "commit", is_line),
}
WHOLE_DECIDED = {
    "whole: the line is durable": after(MetadataLog, "commit", is_line),
    "whole: the decision is carried out": before(TransactionCommits, "_show_at_once"),
    "whole: a run is given to a log": after(StageCopy, "_append"),
    "whole: all runs are on their way": after(StageCopy, "_append", count=4),
    "whole: one log shows it": after(LocalLog, "release"),
    "whole: all logs show it": after(StageCopy, "release"),
    "whole: it is answered": after(TransactionCommits, "_end"),
    "whole: a log is about to be written": before(BatchCommit, "carry_out", is_of_transaction),
    "whole: a log is written": after(BatchCommit, "carry_out", is_of_transaction),
    "whole: all logs are written": after(BatchCommit, "carry_out", is_of_transaction, count=4),
    "whole: the line may go": before(TransactionCommits, "_stored"),
    "whole: the receipt is on its way": after(TransactionCommits, "_stored"),
    "whole: the receipt is durable": after(MetadataLog, "commit", is_receipt),
}

if __name__ == "__main__":
    # So that a disk that is nearly full, or slow, takes the same steps.
    qb.core.transactions.free_space.PLENTY = 0
    qb.core.transactions.free_space.AGAIN = 3_600
    (UNDECIDED | DECIDED | WHOLE_UNDECIDED | WHOLE_DECIDED)[sys.argv[1]]()
    sys.exit(server.main([]))
