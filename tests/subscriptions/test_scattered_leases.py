"""Leases of scattered messages: a span of offsets with a mark for each that is held."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from qb.core.offset_columns import NEAR, marked, near_each_other, runs_of_column
from qb.core.subscriptions.messages.joined_subscriber import JoinedSubscriber
from qb.core.subscriptions.messages.leases import Lease
from qb.core.wire.columns import np
from tests.support.subscription_tools import Bench

offsets = st.sets(st.integers(0, 60), min_size=1).map(sorted)
runs = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 9), st.integers(1, 4)).map(
        lambda run: range(run[0], run[0] + run[1] * run[2], run[2])
    )
)


def lease_of(held: list[int]) -> Lease:
    span, marks = marked(np.array(held))
    return Lease(JoinedSubscriber("x", 100, False), 0, span, 1, False, 0.0, marks)


def held_by(lease: Lease) -> list[int]:
    return [offset for run in lease.held() for offset in run]


@given(offsets)
def test_a_lease_of_scattered_messages_holds_exactly_these(held: list[int]) -> None:
    lease = lease_of(held)
    assert (held_by(lease), lease.count) == (held, len(held))


@given(offsets, st.sets(st.integers(0, 60)))
def test_the_named_offsets_are_released_and_no_others(held: list[int], named: set[int]) -> None:
    lease = lease_of(held)
    gone = sorted(named & set(lease.offsets))
    expected = [offset for offset in held if offset in gone], [offset for offset in gone if offset not in held]
    assert tuple(each.tolist() for each in lease.release_scattered(np.array(gone, np.int64))) == expected
    left = [offset for offset in held if offset not in gone]
    assert (held_by(lease), lease.count) == (left, len(left))
    if left:
        assert (lease.offsets[0], lease.offsets[-1]) == (left[0], left[-1])


@given(st.sets(st.integers(0, 10_000), min_size=1).map(sorted))
def test_a_span_has_no_gap_that_is_long(scattered: list[int]) -> None:
    column = np.array(scattered)
    groups = [column[group] for group in near_each_other(column)]
    assert [offset for group in groups for offset in group.tolist()] == scattered
    for group in groups:
        span, _ = marked(group)
        assert len(span) <= len(group) * NEAR


@given(st.text("ab", min_size=3, max_size=9))
def test_an_ack_of_what_was_never_delivered_settles_nothing(keys: str) -> None:
    bench = Bench(0, "x", keys=keys, mode="key_shared")
    bench.deliver()
    beyond = [range(2**63 - 1, 2**63 + 2**33, 2**32), range(2**62, 2**62 + 1)]
    assert bench.subscription.ack("x", 0, [*beyond, range(1, 2), range(1, 2)], bench.now) == 1
    assert bench.subscription.floor(0) == 0


@given(st.sets(st.integers(0, 30), min_size=1).map(sorted))
def test_runs_of_a_column_are_its_offsets_in_order(scattered: list[int]) -> None:
    assert [offset for run in runs_of_column(np.array(scattered)) for offset in run] == scattered


@given(st.text("abcd.", min_size=1, max_size=40), st.integers(1, 3), runs)
def test_many_runs_are_acked_together_as_one_by_one(keys: str, subscribers: int, named: list[range]) -> None:
    together, one_by_one = (
        Bench(0, *"xyz"[:subscribers], keys=keys, mode="key_shared", max_in_flight=7) for _ in range(2)
    )
    for bench in (together, one_by_one):
        bench.deliver()
    for name in "xyz"[:subscribers]:
        acked = together.subscription.ack(name, 0, named, together.now)
        assert acked == sum(one_by_one.subscription.ack(name, 0, [run], one_by_one.now) for run in named)
    assert together.deliver() == one_by_one.deliver()
    assert together.subscription.copy() == one_by_one.subscription.copy()


@given(st.text("ab.", min_size=1, max_size=30), st.lists(st.tuples(st.integers(0, 29), st.booleans()), max_size=30))
def test_each_key_is_handled_in_order_whatever_fails(keys: str, outcomes: list[tuple[int, bool]]) -> None:
    """A message of a key goes out for the first time only after all before it, and never while one of them waits."""
    bench = Bench(0, "x", "y", keys=keys, mode="key_shared", max_in_flight=5)
    bench.deliver()
    for offset, done in outcomes:
        for name in "xy":
            if done:
                bench.subscription.ack(name, 0, [range(offset, offset + 1)], bench.now)
            else:
                bench.subscription.nack(name, 0, offset, bench.now, delay=0)
        bench.wait(1)
    for key in set(keys) - {"."}:
        first_seen: list[int] = []
        for _, offset in bench.order:
            if keys[offset] == key and offset not in first_seen:
                first_seen.append(offset)
        assert first_seen == sorted(first_seen)
