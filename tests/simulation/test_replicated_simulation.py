"""Cells of several brokers keep every promise of one, and the simulation notices when a rule of the cell is broken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest

from qb.replication.engine import replicated_cell
from qb.replication.engine.replicated_committer import ReplicatedCommitter
from qb.replication.journal import takeover
from qb.replication.journal.journal_store import JournalError
from qb.storage.commit.committer import Work
from tests.simulation.run import explained, simulate

SEEDS = 100  # python -m tests.simulation --replicated runs more
AT_ONCE = 5

pytestmark = pytest.mark.simulation


@pytest.mark.parametrize("first", range(0, SEEDS, AT_ONCE))
def test_every_promise_is_kept(first: int) -> None:
    for seed in range(first, first + AT_ONCE):
        outcome = simulate(seed, replicated=True)
        if outcome.error:
            pytest.fail(explained(outcome, "--replicated "), pytrace=False)
        assert outcome.operations >= 100


@contextmanager
def a_fence_has_one_record() -> Iterator[None]:
    with patch.object(takeover, "fence_size", lambda point: 1):
        yield


@contextmanager
def acks_come_before_the_journal_has_committed() -> Iterator[None]:
    def submit(self: ReplicatedCommitter, work: Work, finished: Callable[[Any], None], behind: object = None) -> Any:
        def committed(outcome: int | JournalError) -> None:
            if isinstance(outcome, JournalError):
                self.lose(outcome)

        assert self._journal is not None
        self.open += 1
        self._journal.append(self._payload(work), committed)
        self._copy.apply(work, partial(self._done, finished))
        return self._slot

    with patch.object(ReplicatedCommitter, "submit", submit):
        yield


@contextmanager
def files_are_believed_behind_the_checkpoint() -> Iterator[None]:
    with patch.object(replicated_cell, "cut_back", lambda data_dir, ends: None):
        yield


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("fault", "first"),  # the seed to begin with
    [
        (a_fence_has_one_record, 20),
        (acks_come_before_the_journal_has_committed, 0),
        (files_are_believed_behind_the_checkpoint, 0),
    ],
)
def test_a_fault_that_is_put_back_is_found(fault: Callable[[], AbstractContextManager[None]], first: int) -> None:
    with fault():
        assert any(simulate(seed, replicated=True).error for seed in range(first, first + 60))
