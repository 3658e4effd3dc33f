"""What every store of a journal must do: the same suite runs on memory and on a real JetStream cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing

import pytest
import trio

from qb.replication.journal.journal import START, Journal, JournalEntry
from qb.replication.journal.journal_records import MOST_RECORD_BYTES
from qb.replication.journal.journal_store import (
    Answer,
    Fenced,
    JournalError,
    JournalGap,
    JournalStore,
    StoredRecord,
)
from qb.replication.journal.record_chain import ChainPoint

LIMIT = 600.0  # seconds of a fake clock until a wait fails; on the real clock the limit of the test comes first


async def write(store: JournalStore, after: int, *records: bytes) -> Answer:
    """Write, and return whether the records were stored or refused. An unknown outcome is resolved."""
    was_unknown = False
    with trio.fail_after(LIMIT):
        while (answer := await write_once(store, after, *records)) is not Answer.STORED:
            if was_unknown and [each.data for each in await look(store, after + 1)] == [*records]:
                return Answer.STORED
            if answer is Answer.REFUSED:
                return answer
            was_unknown = True
    return answer


async def write_once(store: JournalStore, after: int, *records: bytes) -> Answer:
    """Write, and return the answer."""
    answers: list[Answer] = []
    done = trio.Event()

    def answered(answer: Answer) -> None:
        answers.append(answer)
        done.set()

    store.write(after, records, answered)
    assert answers == [], "never inside write()"
    await done.wait()
    return answers[0]


async def look(store: JournalStore, first: int, most: int = 300, *, end: int = 0) -> list[StoredRecord]:
    """Read until something comes that reaches to the position before `end`: one read may fail, or be outdated."""
    with trio.fail_after(LIMIT):
        while True:
            found = await look_once(store, first, most)
            if found is not None and (not end or (found and found[-1].position >= end - 1)):
                return found


async def look_once(store: JournalStore, first: int, most: int) -> list[StoredRecord] | None:
    """Read, and return what was found."""
    results: list[list[StoredRecord] | None] = []
    done = trio.Event()

    def found(records: Sequence[StoredRecord] | None) -> None:
        results.append(None if records is None else [*records])
        done.set()

    store.look(first, most, found)
    assert results == [], "never inside look()"
    await done.wait()
    return results[0]


class Outcomes:
    """What became of appends, in the order in which they were answered."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.all: list[tuple[bytes, int | JournalError]] = []
        self._changed = trio.Event()

    def append(self, *payloads: bytes) -> None:
        for payload in payloads:
            self._journal.append(payload, lambda outcome, it=payload: self._note(it, outcome))

    def _note(self, payload: bytes, outcome: int | JournalError) -> None:
        self.all.append((payload, outcome))
        self._changed.set()
        self._changed = trio.Event()

    async def wait(self, count: int) -> None:
        with trio.fail_after(LIMIT):
            while len(self.all) < count:
                await self._changed.wait()


async def collected(journal: Journal, count: int, point: ChainPoint = START) -> list[JournalEntry]:
    """Follow the journal until so many payloads have come."""
    entries: list[JournalEntry] = []
    with trio.fail_after(LIMIT):
        async with aclosing(journal.follow(point)) as following:
            async for some in following:
                entries += some
                if sum(entry.payload is not None for entry in entries) >= count:
                    return entries
    raise AssertionError("the journal ended")


async def read_something(journal: Journal, point: ChainPoint = START, most: int = 100) -> list[JournalEntry]:
    """Read until there is something: one read may fail, or be outdated."""
    with trio.fail_after(LIMIT):
        while not (entries := await journal.read(point, most)):
            pass
    return entries


MakeStore = Callable[[], JournalStore]
MakeJournal = Callable[..., Journal]


class StoreContract:
    """A store takes a write at its end, and no other."""

    async def test_a_write_is_stored_behind_the_expected_position_and_no_other(self, new_store: MakeStore) -> None:
        store = new_store()
        assert await write(store, 0, b"one") is Answer.STORED
        assert await write(store, 0, b"two") is Answer.REFUSED
        assert await write(store, 5, b"two") is Answer.REFUSED
        assert await write(store, 1, b"two") is Answer.STORED
        assert await look(store, 1, end=3) == [StoredRecord(1, b"one"), StoredRecord(2, b"two")]

    async def test_several_records_are_stored_as_a_whole_or_not_at_all(self, new_store: MakeStore) -> None:
        store = new_store()
        batch = [b"record %d" % number for number in range(256)]
        assert await write(store, 1, *batch) is Answer.REFUSED
        assert await look(store, 1, 1) == []
        assert await write(store, 0, *batch) is Answer.STORED
        assert await look(store, 1, end=257) == [StoredRecord(number + 1, data) for number, data in enumerate(batch)]
        assert await look(store, 100, 2, end=102) == [StoredRecord(100, batch[99]), StoredRecord(101, batch[100])]

    async def test_pipelined_writes_are_stored_in_order(self, new_store: MakeStore) -> None:
        store = new_store()
        answers: list[Answer] = []
        done = trio.Event()

        def answered(answer: Answer) -> None:
            answers.append(answer)
            if len(answers) == 50:
                done.set()

        for number in range(50):
            store.write(number, (b"record %d" % number,), answered)
        with trio.fail_after(LIMIT):
            await done.wait()
        if Answer.UNKNOWN not in answers:  # else an election came between
            assert set(answers) == {Answer.STORED}
            assert [each.data for each in await look(store, 1, end=51)] == [b"record %d" % each for each in range(50)]

    async def test_the_largest_record_is_stored_byte_for_byte(self, new_store: MakeStore) -> None:
        store = new_store()
        largest = bytes(range(256)) * (min(store.most_bytes, MOST_RECORD_BYTES) // 256)
        assert await write(store, 0, largest) is Answer.STORED
        assert await look(store, 1, end=2) == [StoredRecord(1, largest)]

    async def test_positions_below_a_trim_are_gone_and_never_used_again(self, new_store: MakeStore) -> None:
        store = new_store()
        await write(store, 0, *(b"record %d" % number for number in range(5)))
        await store.trim(4)
        with trio.fail_after(LIMIT):
            while [each.position for each in await look(store, 1, end=6)] != [4, 5]:  # a replica may be behind
                pass
        assert await write(store, 5, b"next") is Answer.STORED
        assert await look(store, 6, end=7) == [StoredRecord(6, b"next")]


class JournalContract:
    """A journal is the same whatever keeps its records."""

    async def test_payloads_are_committed_in_order_and_read_back(self, new_journal: MakeJournal) -> None:
        journal = new_journal("a")
        taken = await journal.take_over()
        assert taken.tenure.epoch == 1
        outcomes = Outcomes(journal)
        payloads = [b"payload %d" % number for number in range(200)]  # more than the window
        outcomes.append(*payloads)
        await outcomes.wait(200)
        first = taken.tenure.position + 1
        assert outcomes.all == [(payload, first + number) for number, payload in enumerate(payloads)]
        entries = await collected(journal, 200)
        assert [(entry.payload, entry.position) for entry in entries if entry.payload] == outcomes.all
        assert (await read_something(journal, entries[10].point, 3))[0] == entries[11]

    async def test_a_payload_larger_than_a_record_comes_back_whole(self, new_journal: MakeJournal) -> None:
        journal = new_journal("a")
        await journal.take_over()
        outcomes = Outcomes(journal)
        large = bytes(range(251)) * 7000  # 1.7 MB
        outcomes.append(b"before", large, b"behind")
        await outcomes.wait(3)
        entries = await collected(journal, 3)
        assert [entry.payload for entry in entries if entry.payload] == [b"before", large, b"behind"]

    async def test_an_owner_is_fenced_by_the_next_one(self, new_journal: MakeJournal) -> None:
        first, second = new_journal("first"), new_journal("second")
        await first.take_over()
        outcomes = Outcomes(first)
        outcomes.append(b"kept")
        await outcomes.wait(1)
        assert (await second.take_over()).tenure.epoch == 2
        outcomes.append(b"refused", b"refused too")
        await outcomes.wait(3)
        assert [type(outcome) for _, outcome in outcomes.all] == [int, Fenced, Fenced]
        assert isinstance(first.failure, Fenced)
        later = Outcomes(second)
        later.append(b"second's")
        await later.wait(1)
        entries = await collected(second, 2)
        assert [entry.payload for entry in entries] == [None, b"kept", None, None, b"second's"], (
            "begin and end of a fence"
        )
        assert [entry.epoch for entry in entries] == [1, 1, 2, 2, 2]

    async def test_a_takeover_from_a_point_reads_only_what_is_behind_it(self, new_journal: MakeJournal) -> None:
        first, second = new_journal("first"), new_journal("second")
        await first.take_over()
        outcomes = Outcomes(first)
        outcomes.append(b"a", b"b", b"c")
        await outcomes.wait(3)
        entries = await collected(first, 3)
        assert (await second.take_over(entries[2].point)).tenure.epoch == 2

    async def test_a_follower_goes_on_from_its_point_and_sees_what_comes(self, new_journal: MakeJournal) -> None:
        journal = new_journal("a")
        await journal.take_over()
        outcomes = Outcomes(journal)
        outcomes.append(b"a", b"b")
        await outcomes.wait(2)
        point = (await collected(journal, 1))[1].point
        found: list[JournalEntry] = []

        async def follow() -> None:
            found.extend(await collected(journal, 2, point))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(follow)
            outcomes.append(b"c")
        assert [entry.payload for entry in found] == [b"b", b"c"]

    async def test_a_reader_that_gathers_is_not_given_each_record_by_itself(self, new_journal: MakeJournal) -> None:
        journal, count = new_journal("a"), 12
        await journal.take_over()
        outcomes = Outcomes(journal)
        found: list[list[bytes | None]] = []

        async def follow(point: ChainPoint) -> None:
            async with aclosing(journal.follow(point, 0.5)) as following:
                async for entries in following:
                    found.append([entry.payload for entry in entries])
                    if sum(map(len, found)) == count:
                        return

        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(follow, journal.point)  # the point of now: it moves with the first append
                for number in range(count):
                    outcomes.append(b"%d" % number)
                    await outcomes.wait(number + 1)
        assert [payload for each in found for payload in each] == [b"%d" % number for number in range(count)]
        assert len(found) < count

    async def test_a_reader_from_before_a_trim_is_sent_to_a_snapshot(self, new_journal: MakeJournal) -> None:
        journal = new_journal("a")
        await journal.take_over()
        outcomes = Outcomes(journal)
        outcomes.append(*(b"%d" % number for number in range(10)))
        await outcomes.wait(10)
        entries = await collected(journal, 10)
        await journal.trim(entries[5].position)
        with pytest.raises(JournalGap), trio.fail_after(LIMIT):
            while True:
                await journal.read()  # a replica may be behind
        assert (await read_something(journal, entries[5].point))[0].payload == b"5"
        assert (await new_journal("c").take_over(entries[5].point)).tenure.epoch == 2
