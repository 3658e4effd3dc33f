"""Runs, the turn, alarms and the floor: the arithmetic under a subscription."""

from __future__ import annotations

import gc

from hypothesis import given
from hypothesis import strategies as st

from qb.core.subscriptions.messages.cursor import Cursor
from qb.core.subscriptions.messages.deadlines import NEVER, Deadlines
from qb.core.subscriptions.messages.joined_subscriber import JoinedSubscriber
from qb.core.subscriptions.messages.leases import Lease
from qb.core.subscriptions.queues.round_robin import distribute
from qb.core.wire.offset_runs import intersect, runs_of
from tests.support.subscription_tools import Bench

runs = st.builds(
    lambda first, count, step: range(first, first + count * step, step),
    st.integers(0, 40),
    st.integers(0, 12),
    st.integers(1, 7),
)


@given(runs, runs)
def test_an_intersection_is_what_both_runs_hold(a: range, b: range) -> None:
    assert set(intersect(a, b)) == set(a) & set(b)


@given(st.lists(st.integers(0, 30)))
def test_cutting_into_runs_keeps_every_offset_and_the_order(offsets: list[int]) -> None:
    assert [offset for run in runs_of(offsets) for offset in run] == offsets


def test_what_a_peer_may_send_as_a_run_costs_nothing() -> None:
    assert intersect(range(5, 2**64, 3), range(12)) == range(5, 12, 3)
    big = 2**31
    met = intersect(range(big - 2, big * big, big - 1), range(0, big * big, big))
    assert met == range((big - 2) * big, big * big, (big - 1) * big)


def deal_one_by_one(rooms: list[int], first: int, count: int) -> list[list[int]]:
    hands: list[list[int]] = [[] for _ in rooms]
    turn = 0
    while count and any(len(hand) < room for hand, room in zip(hands, rooms, strict=True)):
        if len(hands[turn]) < rooms[turn]:
            hands[turn].append(first)
            first, count = first + 1, count - 1
        turn = (turn + 1) % len(rooms)
    return hands


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(0, 50))
def test_dealing_in_runs_is_dealing_one_by_one(rooms: list[int], count: int) -> None:
    dealt, upcoming = distribute(rooms, 100, count)
    hands: list[list[int]] = [[] for _ in rooms]
    for hand, run in dealt:
        hands[hand] += run
    assert hands == deal_one_by_one(rooms, 100, count)
    if sum(rooms) > count:
        total = deal_one_by_one(rooms, 100, count + 1)
        heir = next(hand for hand, before in enumerate(hands) if total[hand] != before)
        left = [room - len(hand) for room, hand in zip(rooms, hands, strict=True)]
        in_turn = [*range(upcoming, len(rooms)), *range(upcoming)]
        assert next(hand for hand in in_turn if left[hand]) == heir


@given(st.lists(st.integers(0, 500), min_size=1, max_size=5), st.integers(0, 2500))
def test_a_backlog_is_dealt_in_the_same_numbers_as_one_by_one(rooms: list[int], count: int) -> None:
    dealt, _ = distribute(rooms, 100, count)
    hands: list[list[int]] = [[] for _ in rooms]
    for hand, run in dealt:
        hands[hand] += run
    assert list(map(len, hands)) == list(map(len, deal_one_by_one(rooms, 100, count)))
    everything = sorted(offset for hand in hands for offset in hand)
    assert everything == list(range(100, 100 + min(count, sum(rooms))))


@given(st.lists(st.tuples(runs, runs), max_size=8))
def test_a_subscriber_holds_what_was_added_and_not_released(steps: list[tuple[range, range]]) -> None:
    subscriber = JoinedSubscriber("w", 1000, announces=False)
    held: set[int] = set()
    for taken, released in steps:
        if taken and not held & set(taken):
            subscriber.add(Lease(subscriber, 0, taken, 1, False, 0.0))
            held |= set(taken)
        for lease, part in subscriber.find(0, released):
            subscriber.release(lease, part)
        held -= set(released)
        leases = list(subscriber.leases())
        assert sorted(offset for lease in leases for run in lease.held() for offset in run) == sorted(held)
        assert [lease.offsets.start for lease in leases] == sorted(lease.offsets.start for lease in leases)
        assert all(lease.offsets[0] in held and lease.offsets[-1] in held for lease in leases)
        assert subscriber.in_flight == sum(lease.count for lease in leases) == len(held)


class Item:
    due = NEVER


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 50)), max_size=300))
def test_alarms_ring_once_at_the_time_that_was_set_last(changes: list[tuple[int, int]]) -> None:
    alarms: Deadlines[Item] = Deadlines()
    items = [Item() for _ in range(201)]
    for index, due in changes:
        if due:
            alarms.set(items[index], due)
        else:
            items[index].due = NEVER
    last = dict(changes)
    expected = sorted(due for due in last.values() if due)
    assert alarms.first() == (expected[0] if expected else NEVER)
    early = list(alarms.pop_due(25))
    assert len(early) == sum(due <= 25 for due in expected)
    assert len(list(alarms.pop_due(100))) == len(expected) - len(early)
    assert alarms.first() == NEVER


def test_an_alarm_for_never_is_none_and_takes_no_room() -> None:
    alarms: Deadlines[Item] = Deadlines()
    for _ in range(1_000):
        alarms.set(Item(), NEVER)
    assert not alarms._heap


def test_the_floor_waits_for_the_oldest_unacked_message() -> None:
    bench = Bench(10, "a")
    bench.deliver()
    bench.ack("a", *range(1, 10))
    assert bench.subscription.floor(0) == 0
    bench.nack("a", 0)
    assert bench.subscription.floor(0) == 0
    assert bench.wait(1) == {"a": [0]}
    bench.ack("a", 0)
    assert bench.subscription.floor(0) == 10


def test_a_million_acks_ahead_of_a_stuck_message_take_no_room() -> None:
    bench = Bench(1_000_001, "stuck", max_in_flight=1)
    bench.deliver()
    bench.subscription.join("fast")
    assert bench.deliver() == {"fast": [1]}
    bench.ack("fast", 1)
    for _ in range(2000):
        (offset,) = bench.deliver()["fast"]
        bench.ack("fast", offset)
    (partition,) = bench.subscription.snapshot().partitions
    assert partition.next == 2002
    assert [run.offsets for run in partition.open] == [range(1)]


def test_an_idle_cursor_holds_nothing_that_the_garbage_collector_walks() -> None:
    held = gc.get_referents(Cursor(0, 0))
    assert [each for each in held if gc.is_tracked(each) and not isinstance(each, type)] == []
