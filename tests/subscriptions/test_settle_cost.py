"""A SETTLE costs as much as the messages that it moves, not as those that are held. Work is counted, never timed."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qb.core.pacing import AT_ONCE
from qb.core.subscriptions.dispatch import REDELIVERED_AT_ONCE
from qb.core.subscriptions.push_decisions import PushDecision
from qb.core.subscriptions.queues.key_queue import MOST_IN_FLIGHT
from qb.core.wire.errors import BadRequest
from qb.doors.binary.settle_requests import (
    MAX_BRACKETS,
    MAX_BYTES,
    MAX_ENTRIES,
    SettleBody,
    advance,
    carry_out,
    decode_settle,
)
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
    assert looked_at(bench, settle_of(acks=missing))[0] <= 2_000 + 2  # one more look for each portion of a thousand
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


def held(keys: int, **options: Any) -> Bench:
    """Return a bench whose subscriber holds the whole log; of so many keys, or shared if that is 0."""
    names = [f"key {number % keys}" for number in range(WINDOW)] if keys else None
    bench = Bench(WINDOW, "a", max_in_flight=WINDOW, mode="key_shared" if keys else "shared", **options)
    bench.keys = names
    bench.deliver()
    assert in_flight(bench) == WINDOW
    return bench


def in_flight(bench: Bench) -> int:
    return bench.subscription.describe(bench.ends).in_flight


def portions_of(bench: Bench) -> list[int]:
    """Call decide() as often as it asks for at once; return how many messages came back in each step."""
    came_back, wakeup = [], bench.wakeup()
    while wakeup is not None and wakeup <= bench.now:
        before = bench.subscription.describe(bench.ends)
        decisions = bench.subscription.decide(bench.now)
        after = bench.subscription.describe(bench.ends)
        came_back.append(before.in_flight - after.in_flight)
        assert after.lag == WINDOW
        wakeup = bench.wakeup()
        assert not decisions or wakeup is None or wakeup > bench.now, "nothing goes out before all has come back"
    return came_back


@pytest.mark.parametrize("keys", [0, 20, WINDOW])
def test_what_a_deadline_ends_comes_back_in_portions(keys: int) -> None:
    bench = held(keys, ack_deadline=10)
    bench.now = 10
    came_back = portions_of(bench)
    assert sum(came_back) == WINDOW
    assert max(came_back) <= AT_ONCE + (WINDOW // keys if keys else 0)
    charged = sum("last failure" in bench.explain(offset) for offset in range(0, WINDOW, 100))
    assert charged == {0: WINDOW // 100, 20: 1, WINDOW: WINDOW // 100}[keys], "only the first of a key is to blame"


@pytest.mark.parametrize("died", [False, True])
@pytest.mark.parametrize("keys", [0, 1_000])
def test_what_a_subscriber_held_that_is_gone_comes_back_in_portions(keys: int, died: bool) -> None:
    bench = held(keys)
    subscription = bench.subscription
    subscription.died("a", bench.now) if died else subscription.leave("a")
    assert "being taken back from a" in bench.explain(WINDOW - 1)
    assert len(waiting(bench)) <= AT_ONCE
    assert len(portions_of(bench)) + 1 >= WINDOW // AT_ONCE
    subscription.join("b")
    got = bench.deliver()["b"]
    assert sorted(got) == list(range(WINDOW))
    assert set(bench.attempts.values()) == {2}
    assert (len(bench.suspects) == WINDOW) == died


def waiting(bench: Bench) -> list[int]:
    return list(bench.subscription._state.cursors[0].waiting)


def test_what_backed_off_and_what_goes_out_again_is_decided_in_portions() -> None:
    bench = held(0, ack_deadline=10)
    bench.now = 10
    portions_of(bench)
    bench.now = 100
    sizes = []
    while in_flight(bench) < WINDOW:
        sizes.append(sum(d.size for d in bench.subscription.decide(bench.now) if isinstance(d, PushDecision)))
    assert max(sizes) <= REDELIVERED_AT_ONCE
    assert len(sizes) >= WINDOW // AT_ONCE


def test_dead_letters_are_decided_in_portions() -> None:
    bench = held(0, ack_deadline=10, max_deliveries=1)
    bench.now = 10
    sizes, decisions = [], bench.subscription.decide(bench.now)
    while decisions or in_flight(bench):
        sizes.append(len(decisions))
        decisions = bench.subscription.decide(bench.now)
    assert sum(sizes) == WINDOW
    assert max(sizes) <= AT_ONCE


@pytest.mark.parametrize("again", [False, True])
def test_an_ack_of_many_messages_by_key_or_with_a_past_is_carried_out_in_portions(again: bool) -> None:
    bench = held(20)
    if again:
        bench.subscription.leave("a")
        bench.subscription.join("a")
        bench.deliver()
    cost, portions = looked_at(bench, settle_of(acks=[[0, 0, WINDOW, 1]]))
    assert portions > 1
    assert cost >= (WINDOW if again else WINDOW // 10)
    assert in_flight(bench) == 0


def test_so_many_messages_of_a_key_are_in_flight_that_all_can_be_taken_back_in_one_step() -> None:
    bench = Bench(WINDOW, "a", max_in_flight=WINDOW, mode="key_shared")
    bench.keys = ["one"] * WINDOW
    bench.deliver()
    assert in_flight(bench) == MOST_IN_FLIGHT
    assert f"{MOST_IN_FLIGHT} messages of key 'one' are in flight, and no more may be" in bench.explain(MOST_IN_FLIGHT)
    bench.ack("a", *range(10))
    assert bench.deliver() == {"a": list(range(MOST_IN_FLIGHT, MOST_IN_FLIGHT + 10))}
    bench.nack("a", 10, delay=0)
    assert in_flight(bench) == 0
    assert bench.deliver()["a"] == list(range(10, MOST_IN_FLIGHT + 10))


def test_an_ack_of_a_subscriber_that_left_and_joined_again_settles_what_is_being_taken_back() -> None:
    bench = held(0)
    bench.subscription.leave("a")
    bench.subscription.join("a")
    assert bench.subscription.ack("a", 0, [range(WINDOW)], bench.now) == WINDOW
    assert bench.deliver() == {}


@pytest.mark.parametrize("keys", [0, 1_000])
def test_a_snapshot_and_a_seek_between_two_portions_have_what_is_being_taken_back(keys: int) -> None:
    bench = held(keys)
    bench.subscription.leave("a")
    partition = bench.subscription.copy().partitions[0]
    assert sum(run.count for run in partition.runs()) == WINDOW
    assert bench.subscription.floor(0) == 0
    bench.subscription.advance(0, WINDOW - 5)
    bench.subscription.join("b")
    assert bench.deliver() == {"b": list(range(WINDOW - 5, WINDOW))}
    bench.subscription.seek(0, WINDOW - 2)
    assert bench.deliver() == {"b": [WINDOW - 2, WINDOW - 1]}
    assert bench.attempts[0, WINDOW - 1] == 1


@pytest.mark.parametrize("part", ["acks", "nacks", "started"])
def test_a_settle_that_names_too_many_runs_is_refused_with_the_limit(part: str) -> None:
    decode_settle(json.dumps({part: [[0, 0]] * MAX_ENTRIES}).encode())
    with pytest.raises(BadRequest, match=f"names {MAX_ENTRIES + 1} runs and messages, and at most {MAX_ENTRIES}"):
        decode_settle(json.dumps({part: [[0, 0]] * (MAX_ENTRIES + 1)}).encode())


def test_a_settle_that_is_too_large_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(BadRequest, match=f"at most {MAX_BYTES} are taken; send several"):
        decode_settle(b"[" * (MAX_BYTES + 1))


@pytest.mark.parametrize("part", ["acks", "nacks", "extend", "started"])
def test_the_lists_in_a_settle_are_counted_before_it_is_decoded(part: str) -> None:
    endless = f'{{"{part}":['.encode() + b"[0,0]," * (MAX_BRACKETS + 1)
    with pytest.raises(BadRequest, match=f"brackets, and at most {MAX_BRACKETS} are taken; send several"):
        decode_settle(endless)


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
