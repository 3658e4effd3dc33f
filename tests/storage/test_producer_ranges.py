"""What a partition remembers of its producers, and that it stays bounded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from qb.storage.engine import TRANSACTIONS, ProducerRange
from qb.storage.log.producer_ranges import MAX_PRODUCERS, MAX_RANGES, TRANSACTION_RANGES, WINDOW, ProducerRanges


def test_ranges_that_go_on_in_numbers_and_offsets_are_one() -> None:
    known = ProducerRanges(
        [ProducerRange(1, 1, 0, 5), ProducerRange(1, 6, 5, 2), ProducerRange(1, 8, 9, 1), ProducerRange(1, 10, 10, 1)]
    )
    assert list(known) == [ProducerRange(1, 1, 0, 7), ProducerRange(1, 8, 9, 1), ProducerRange(1, 10, 10, 1)]


def test_the_last_numbers_of_a_producer_are_remembered_and_hardly_more() -> None:
    known = ProducerRanges(ProducerRange(1, number, 2 * number, 1) for number in range(1, WINDOW + 100))
    numbers = [one.first_number for one in known]
    assert numbers[-1] == WINDOW + 99
    assert len(numbers) <= WINDOW
    long = ProducerRanges([ProducerRange(1, 1, 0, 10), ProducerRange(1, 11, 20, WINDOW)])
    assert list(long) == [ProducerRange(1, 11, 20, WINDOW)]


def test_that_ranges_were_dropped_for_want_of_room_is_remembered_and_restored() -> None:
    known = ProducerRanges(ProducerRange(1, number, 2 * number, 1) for number in range(1, MAX_RANGES + 11))
    assert next(iter(known)) == ProducerRange(1, 10, 0, 0)
    again = ProducerRanges(list(known))
    assert list(again) == list(known)
    again.add([ProducerRange(1, WINDOW + 11, 10**9, 1)])
    assert next(iter(again)).count == 1, "older than all that is remembered anyway"


def test_of_many_producers_each_remembers_up_to_where_it_was_cut() -> None:
    known = ProducerRanges()
    for number in range(1, 17_000):
        known.add(ProducerRange(producer, number, 4 * number + producer, 1) for producer in range(1, 5))
    for producer in range(1, 5):
        (cut, *kept) = [one for one in known if one.producer_id == producer]
        assert cut.count == 0
        assert [one.first_number for one in kept] == list(range(cut.first_number + 1, 17_000))


def test_the_least_recently_active_producers_are_forgotten() -> None:
    known = ProducerRanges(ProducerRange(producer, 1, producer, 1) for producer in range(1, MAX_PRODUCERS + 1))
    known.add([ProducerRange(1, 2, 20_000, 1), ProducerRange(99_999, 1, 20_001, 1)])
    producers = {one.producer_id for one in known}
    assert len(producers) == MAX_PRODUCERS
    assert {1, 99_999} <= producers
    assert 2 not in producers


def test_transactions_are_never_forgotten_and_take_little_room() -> None:
    known = ProducerRanges([ProducerRange(TRANSACTIONS, 7, 0, 3)])
    known.add(ProducerRange(producer, 1, producer, 1) for producer in range(1, MAX_PRODUCERS + 100))
    assert ProducerRange(TRANSACTIONS, 7, 0, 3) in list(known)
    known.add(ProducerRange(TRANSACTIONS, number, 2 * number, 1) for number in range(100, 1000))
    kept = [one for one in known if one.producer_id == TRANSACTIONS]
    assert kept[-1] == ProducerRange(TRANSACTIONS, 999, 1998, 1)
    assert len(kept) == TRANSACTION_RANGES


def test_transactions_keep_their_ranges_when_the_others_have_too_many() -> None:
    known = ProducerRanges(ProducerRange(TRANSACTIONS, 2 * n, 3 * n, 1) for n in range(1, TRANSACTION_RANGES + 1))
    for number in range(1, 8):
        known.add(ProducerRange(producer, 2 * number, 10**6, 1) for producer in range(1, MAX_PRODUCERS))
    assert sum(each.producer_id != TRANSACTIONS for each in known) < 7 * MAX_PRODUCERS
    assert sum(each.producer_id == TRANSACTIONS for each in known) == TRANSACTION_RANGES


def test_many_producers_with_scattered_numbers_share_what_may_be_remembered() -> None:
    known = ProducerRanges(ProducerRange(at % 100 + 1, at, at * 2, 1) for at in range(MAX_RANGES * 2))
    kept = list(known)
    assert len(kept) <= MAX_RANGES
    assert {one.producer_id for one in kept} == set(range(1, 101))
    newest = {one.producer_id: one.first_number for one in kept}
    assert min(newest.values()) >= MAX_RANGES * 2 - 100


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 9)), max_size=60))
def test_what_was_written_to_a_seal_restores_the_same(steps: list[tuple[int, int]]) -> None:
    known, numbers, offset = ProducerRanges(), {1: 1, 2: 1, 3: 1}, 0
    for producer, count in steps:
        known.add([ProducerRange(producer, numbers[producer], offset, count)])
        numbers[producer] += count
        offset += count
    assert list(ProducerRanges(list(known))) == list(known)
    found = {one.producer_id: one.first_number + one.count for one in known}
    assert found == {producer: number for producer, number in numbers.items() if number > 1}
