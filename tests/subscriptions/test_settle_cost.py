"""A SETTLE costs as much as the messages that it moves, not as those that are held. Work is counted, never timed."""

from __future__ import annotations

import json
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qb.core.pacing import AT_ONCE
from qb.core.wire.errors import BadRequest
from qb.doors.binary.settle_requests import MAX_BYTES, MAX_ENTRIES, SettleBody, advance, carry_out, decode_settle
from tests.support.subscription_tools import Bench

WINDOW = 20_000


def looked_at(bench: Bench, settle: SettleBody) -> tuple[int, int]:
    """Carry out a SETTLE of `a`; return how many leases and waiting messages were compared, and in how many steps."""
    before, subscription = bench.subscription.looked_at("a"), bench.subscription
    steps = carry_out(subscription, "a", settle, bench.now)
    portions = 1
    while not advance(steps, subscription, "a"):
        portions += 1
    return subscription.looked_at("a") - before, portions


def settle_of(**parts: object) -> SettleBody:
    return msgspec.convert(parts, SettleBody)


def test_acks_in_any_order_leave_few_leases_to_look_at() -> None:
    bench = Bench(WINDOW, "a", max_in_flight=WINDOW)
    bench.deliver()
    scattered = Random(1).sample(range(WINDOW), WINDOW // 2)
    bench.ack("a", *scattered)
    missing = [[0, offset, 1, 1] for offset in scattered[:2_000]]
    assert looked_at(bench, settle_of(acks=missing))[0] <= 2_000
    left = [[0, offset, 1, 1] for offset in sorted(set(range(WINDOW)) - set(scattered))]
    assert looked_at(bench, settle_of(acks=left))[0] <= len(left)
    assert bench.subscription.describe(bench.ends).in_flight == 0


def test_an_ack_among_many_small_leases_looks_at_few_of_them() -> None:
    bench = Bench(0, "a", max_in_flight=WINDOW)
    bench.publish(5_000)
    bench.deliver()
    for _ in range(3_000):  # one lease each
        bench.publish(1)
        bench.deliver()
    assert looked_at(bench, settle_of(acks=[[0, 4_000, 1, 1], [0, 6_000, 1, 1], [0, 2**40, 1, 1]]))[0] <= 6


def test_a_run_over_many_leases_is_carried_out_in_portions() -> None:
    bench = Bench(0, "a", max_in_flight=WINDOW)
    for _ in range(3 * AT_ONCE):
        bench.publish(1)
        bench.deliver()
    assert looked_at(bench, settle_of(acks=[[0, 0, 3 * AT_ONCE, 1]]))[1] >= 3
    assert bench.subscription.describe(bench.ends).in_flight == 0


def test_extending_everything_is_carried_out_in_portions() -> None:
    bench = Bench(0, "a", max_in_flight=WINDOW, ack_deadline=10)
    for _ in range(2 * AT_ONCE):
        bench.publish(1)
        bench.deliver()
    assert looked_at(bench, settle_of(extend_all=60.0))[1] >= 2
    assert bench.wakeup() == 60


def test_many_leases_that_end_at_once_end_in_portions() -> None:
    bench = Bench(0, "a", max_in_flight=WINDOW, ack_deadline=10)
    for _ in range(2 * AT_ONCE + 1):
        bench.publish(1)
        bench.deliver()
    bench.now = 10
    for left in (AT_ONCE + 1, 1, 0):
        bench.subscription.decide(bench.now)
        assert bench.subscription.describe(bench.ends).in_flight == left
        wakeup = bench.wakeup()
        assert wakeup is not None
        assert (wakeup <= bench.now) == (left > 0), "it asks to be called again at once"


@pytest.mark.parametrize("part", ["acks", "nacks", "started"])
def test_a_settle_that_names_too_many_runs_is_refused_with_the_limit(part: str) -> None:
    decode_settle(json.dumps({part: [[0, 0]] * MAX_ENTRIES}).encode())
    with pytest.raises(BadRequest, match=f"names {MAX_ENTRIES + 1} runs and messages, and at most {MAX_ENTRIES}"):
        decode_settle(json.dumps({part: [[0, 0]] * (MAX_ENTRIES + 1)}).encode())


def test_a_settle_that_is_too_large_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(BadRequest, match=f"at most {MAX_BYTES} are taken; send several"):
        decode_settle(b"[" * (MAX_BYTES + 1))


@given(st.lists(st.tuples(st.integers(0, 70), st.integers(1, 40), st.integers(1, 9)), max_size=12), st.integers(1, 4))
def test_acks_and_extensions_in_any_runs_settle_exactly_what_they_name(
    runs: list[tuple[int, int, int]], k: int
) -> None:
    bench = Bench(60, *"abcd"[:k], max_in_flight=100)
    held = set(bench.deliver()["a"])
    for number, (first, count, step) in enumerate(runs):
        run = range(first, first + count * step, step)
        if number % 3 == 2:
            assert bench.subscription.extend("a", 0, [run], number, bench.now) == len(held & set(run))
        else:
            assert bench.subscription.ack("a", 0, [run], bench.now) == len(held & set(run))
            held -= set(run)
        snapshot = bench.subscription.snapshot().partitions[0]
        others = bench.subscription.describe(bench.ends).in_flight - len(held)
        assert sum(open_run.count for open_run in snapshot.open) == len(held) + others
    bench.subscription.leave("a")
    assert sorted(record for record in held if "waiting for its turn" in bench.explain(record)) == sorted(held)
