"""A thousand seeds of takeovers over the memory journal, and proofs that the simulation finds a broken rule."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from qb.replication.journal import record_chain, takeover
from qb.replication.journal.append_window import Action, AppendWindow, Commit, PendingState
from qb.replication.journal.journal_records import JournalRecord, decode
from qb.replication.journal.journal_store import Answer
from qb.replication.journal.memory_store import NetworkFaults
from tests.support.journal_world import JournalStory

pytestmark = pytest.mark.simulation
TORN = NetworkFaults(torn_batch=0.5, late=0.1, lost_answer=0.05)


@pytest.mark.parametrize("start", range(0, 700, 100))
def test_nothing_acked_is_lost_doubled_or_out_of_order_and_no_old_record_lies_behind_a_fence(start: int) -> None:
    takeovers = acked = 0
    for seed in range(start, start + 100):
        story = JournalStory(seed).run()
        takeovers += story.takeovers
        acked += sum(len(owner.acked) for owner in story.owners)
    assert takeovers > 300  # else nothing was tried
    assert acked > 5000


@pytest.mark.parametrize("start", range(0, 300, 100))
def test_records_of_foreign_programs_in_the_stream_harm_nothing_that_was_acked(start: int) -> None:
    for seed in range(start, start + 100):
        JournalStory(seed, foreign=True).run()


def test_a_fence_that_the_store_tore_harms_nothing_that_was_acked() -> None:
    for seed in range(100):
        JournalStory(seed, faults=TORN).run()


def test_a_seed_gives_the_same_story_again() -> None:
    assert JournalStory(7).run().stream.records == JournalStory(7).run().stream.records


def first_failure(seeds: int = 100, **story: object) -> str:
    """Return what the first seed that fails says, or an empty text."""
    for seed in range(seeds):
        try:
            JournalStory(seed, **story).run()  # type: ignore[arg-type]
        except AssertionError as failure:
            return str(failure)
    return ""


@pytest.mark.parametrize("size", [lambda point: 1, lambda point: max(1, point.window - 1)], ids=["one", "window-1"])
def test_a_fence_that_is_too_short_is_found(monkeypatch: pytest.MonkeyPatch, size: Callable[..., int]) -> None:
    monkeypatch.setattr(takeover, "fence_size", size)
    assert "behind the fence" in first_failure()


def test_an_owner_that_takes_an_empty_position_for_stored_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AppendWindow, "found", believing(lambda data: data is None))
    assert "acknowledged and not there" in first_failure()


def test_an_owner_that_takes_a_foreign_record_for_its_own_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AppendWindow, "found", believing(lambda data: data is not None and decode(data) is None))
    assert "acknowledged and not there" in first_failure(foreign=True)


def believing(mistaken: Callable[[bytes | None], bool]) -> Callable[..., list[Action]]:
    """Return a `found` that takes a record for stored if what was found is mistaken for it."""
    real = AppendWindow.found

    def found(self: AppendWindow, position: int, data: bytes | None) -> list[Action]:
        pending = self._at(position)
        if pending is not None and pending.state is PendingState.LOOKING and mistaken(data):
            return real(self, position, pending.data)
        return real(self, position, data)

    return found


def test_an_owner_that_acks_more_than_a_prefix_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = AppendWindow.answered

    def answered(self: AppendWindow, position: int, answer: Answer) -> list[Action]:
        pending, early = self._at(position), []
        if answer is Answer.STORED and pending is not None and pending.payload is not None:
            early = [Commit(pending.payload.committed, position)]
            pending.payload.committed = lambda outcome: None
        return early + real(self, position, answer)

    monkeypatch.setattr(AppendWindow, "answered", answered)
    assert first_failure(foreign=True) != ""


def test_readers_that_ignore_the_predecessor_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def advance(point, stored):
        def decode_with_any_predecessor(data: bytes) -> JournalRecord | None:
            record = decode(data)
            return record and record._replace(previous=point.valid)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(record_chain, "decode", decode_with_any_predecessor)
            return real(point, stored)

    real = record_chain.advance
    monkeypatch.setattr(record_chain, "advance", advance)
    assert "stored twice" in first_failure(foreign=True)
