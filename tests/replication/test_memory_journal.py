"""The memory store keeps the contract, with a perfect network and with a faulty one."""

from __future__ import annotations

import random
from contextlib import aclosing

import pytest
import trio

from qb.replication.journal.journal import Journal
from qb.replication.journal.journal_store import JournalGap
from qb.replication.journal.memory_store import NO_FAULTS, MemoryStore, MemoryStream, NetworkFaults
from qb.replication.journal.trio_timers import TrioTimers
from tests.support.journal_contract import JournalContract, MakeJournal, MakeStore, Outcomes, StoreContract, collected
from tests.support.journal_world import EagerWorld

FAULTY = NetworkFaults(lost_request=0.05, lost_answer=0.05, late=0.05, doubled=0.1, stale_read=0.1, stale_refusal=0.05)


@pytest.fixture
async def timers(nursery: trio.Nursery) -> EagerWorld:
    timers = EagerWorld()
    nursery.start_soon(timers.pass_time)
    return timers


@pytest.fixture
def new_store(timers: EagerWorld) -> MakeStore:
    stream = MemoryStream()
    return lambda: MemoryStore(stream, timers)


class TestMemoryStore(StoreContract):
    pass


@pytest.fixture(params=[NO_FAULTS, FAULTY], ids=["perfect", "faulty"])
def new_journal(timers: EagerWorld, request: pytest.FixtureRequest) -> MakeJournal:
    stream, draw = MemoryStream(), random.Random(0)

    def new(owner: str, **options: int) -> Journal:
        return Journal(MemoryStore(stream, timers, faults=request.param, draw=draw), timers, owner, **options)

    return new


class TestMemoryJournal(JournalContract):
    pass


async def test_an_owner_that_is_cut_off_answers_nothing_and_goes_on_afterwards(
    nursery: trio.Nursery, autojump_clock
) -> None:
    nursery.start_soon((timers := TrioTimers()).run)
    store = MemoryStore(MemoryStream(), timers)
    journal = Journal(store, timers, "a")
    await journal.take_over()
    store.is_cut_off = True
    outcomes = Outcomes(journal)
    outcomes.append(b"a", b"b")
    await trio.sleep(60)
    assert outcomes.all == []
    store.reconnect()
    await outcomes.wait(2)
    assert [entry.payload for entry in await collected(journal, 2) if entry.payload] == [b"a", b"b"]


async def test_a_stopped_owner_answers_open_appends_and_sends_nothing_more(
    nursery: trio.Nursery, autojump_clock
) -> None:
    nursery.start_soon((timers := TrioTimers()).run)
    stream = MemoryStream()
    journal = Journal(MemoryStore(stream, timers), timers, "a")
    await journal.take_over()
    outcomes = Outcomes(journal)
    outcomes.append(b"a")
    await outcomes.wait(1)
    failure = RuntimeError("the lease has run out")
    journal.stop(failure)  # type: ignore[arg-type]
    outcomes.append(b"b")
    await outcomes.wait(2)
    assert outcomes.all[1:] == [(b"b", failure)]
    await trio.sleep(10)
    assert stream.last == outcomes.all[0][1]


async def test_a_takeover_that_was_cancelled_writes_no_fence_later(nursery: trio.Nursery, autojump_clock) -> None:
    nursery.start_soon((timers := TrioTimers()).run)
    stream = MemoryStream()
    store = MemoryStore(stream, timers)
    journal = Journal(store, timers, "a")
    store.is_cut_off = True
    with trio.move_on_after(10):
        await journal.take_over()
    store.reconnect()
    await trio.sleep(60)
    assert stream.last == 0


@pytest.mark.parametrize("window", [0, 256])
def test_a_window_that_a_fence_cannot_cover_is_refused(window: int) -> None:
    with pytest.raises(ValueError, match="the window must be from 1 to 255"):
        Journal(MemoryStore(MemoryStream(), TrioTimers()), TrioTimers(), "a", window=window)


async def test_following_ends_when_the_reader_closes_it(timers: EagerWorld) -> None:
    journal = Journal(MemoryStore(MemoryStream(), timers), timers, "a")
    await journal.take_over()
    async with aclosing(journal.follow()) as following:
        assert [entry.epoch for entry in await anext(following)] == [1]


async def test_a_takeover_from_before_a_trim_needs_a_snapshot(timers: EagerWorld) -> None:
    stream = MemoryStream()
    journal = Journal(MemoryStore(stream, timers), timers, "a")
    await journal.take_over()
    outcomes = Outcomes(journal)
    outcomes.append(b"a", b"b")
    await outcomes.wait(2)
    await journal.trim(2)
    with pytest.raises(JournalGap, match="start from a snapshot"):
        await Journal(MemoryStore(stream, timers), timers, "b").take_over()


async def test_a_callback_that_fails_harms_no_other_append(
    timers: EagerWorld, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(MemoryStore(MemoryStream(), timers), timers, "a")
    await journal.take_over()

    def fail(outcome: object) -> None:
        raise RuntimeError("a fault")

    outcomes = Outcomes(journal)
    journal.append(b"a", fail)
    outcomes.append(b"b")
    await outcomes.wait(1)
    assert "a callback of the journal failed" in caplog.text


async def test_payloads_that_are_appended_by_a_callback_come_in_order(timers: EagerWorld) -> None:
    journal = Journal(MemoryStore(MemoryStream(), timers), timers, "a", window=3)
    await journal.take_over()
    outcomes = Outcomes(journal)
    for number in range(10):
        journal.append(b"first %d" % number, lambda outcome, it=number: outcomes.append(b"second %d" % it))
    await outcomes.wait(10)
    assert [payload for payload, _ in outcomes.all] == [b"second %d" % number for number in range(10)]
    assert [position for _, position in outcomes.all] == sorted(position for _, position in outcomes.all)
