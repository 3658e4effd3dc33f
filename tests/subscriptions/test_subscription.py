"""Who gets what, how a delivery ends, and what survives: docs/SUBSCRIPTIONS.md, sentence by sentence."""

from __future__ import annotations

import itertools
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qb.core.subscriptions.messages.joined_subscriber import IN_FLIGHT_TOGETHER, LEAST_SHARE
from qb.core.subscriptions.push_decisions import DeadLetterDecision, PushDecision
from qb.core.subscriptions.snapshot import SubscriptionSnapshot
from qb.core.subscriptions.subscription_options import RetryBackoff, SubscriptionMode, parse_options
from qb.core.wire.errors import BadRequest, NotJoined, SubscriptionBusy
from tests.support.subscription_tools import NO_JITTER, Bench, reopened

# In turn


def test_messages_go_to_the_subscribers_in_turn() -> None:
    bench = Bench(7, "a", "b", "c")
    assert bench.deliver() == {"a": [0, 3, 6], "b": [1, 4], "c": [2, 5]}
    bench.publish(2)
    assert bench.deliver() == {"b": [7], "c": [8]}


@given(st.lists(st.integers(0, 12), max_size=12), st.integers(1, 5))
def test_round_robin_is_exact_however_the_messages_arrive(arrivals: list[int], k: int) -> None:
    names = [f"w{i}" for i in range(k)]
    bench = Bench(0, *names)
    for count in arrivals:
        bench.publish(count)
        bench.deliver()
    got = dict(map(reversed, bench.order))
    assert [got[offset] for offset in range(sum(arrivals))] == [names[i % k] for i in range(sum(arrivals))]


def test_a_backlog_is_dealt_out_in_equal_shares_each_in_one_piece() -> None:
    bench = Bench(4000, "a", "b", "c", "d")
    bench.subscription.offer(0, 0, 4000)
    assert bench.subscription.decide(0) == [
        PushDecision(name, 0, (range(i * 1000, i * 1000 + 1000),), 1) for i, name in enumerate(["a", "b", "c", "d"])
    ]


def test_a_full_window_is_skipped() -> None:
    bench = Bench(6)
    bench.subscription.join("small", window=1)
    bench.subscription.join("large")
    assert bench.deliver() == {"small": [0], "large": [1, 2, 3, 4, 5]}


def test_a_window_is_never_larger_than_the_subscription_allows() -> None:
    bench = Bench(10, max_in_flight=3)
    bench.subscription.join("a", window=9)
    assert bench.deliver() == {"a": [0, 1, 2]}
    assert bench.deliver() == {}
    bench.ack("a", 1)
    assert bench.deliver() == {"a": [3]}


def test_a_blocked_subscriber_costs_the_others_nothing() -> None:
    bench = Bench(4, "a", "b")
    bench.subscription.block("a", True)
    assert bench.deliver() == {"b": [0, 1, 2, 3]}
    bench.publish(2)
    bench.subscription.block("a", False)
    assert bench.deliver() == {"a": [4], "b": [5]}


def test_who_joins_takes_the_last_place_in_the_turn() -> None:
    bench = Bench(1, "a", "b")
    assert bench.deliver() == {"a": [0]}
    bench.subscription.join("c")
    bench.publish(3)
    assert bench.deliver() == {"b": [1], "a": [2], "c": [3]}


def test_a_subscriber_that_leaves_takes_no_turn_away() -> None:
    bench = Bench(1, "a", "b", "c")
    assert bench.deliver() == {"a": [0]}
    bench.subscription.leave("b")
    bench.publish(1)
    assert bench.deliver() == {"c": [1]}


def test_partitions_share_the_windows_and_take_turns_at_being_first() -> None:
    bench = Bench(100, "a", partitions=3, max_in_flight=6)
    bench.deliver()
    assert sorted(bench.attempts) == [(p, o) for p in range(3) for o in range(2)]
    firsts = []
    for _ in range(3):
        for partition, offset in list(bench.attempts):
            bench.ack("a", offset, partition=partition)
        bench.attempts.clear()
        bench.deliver()
        firsts.append(next(iter(bench.attempts))[0])
    assert sorted(firsts) == [0, 1, 2]


def test_what_came_back_goes_out_before_what_is_fresh_and_in_offset_order() -> None:
    bench = Bench(6, "a", "b", max_in_flight=3)
    assert bench.deliver() == {"a": [0, 2, 4], "b": [1, 3, 5]}
    bench.publish(2)
    bench.subscription.leave("a")
    bench.ack("b", 1, 3, 5)
    assert bench.deliver() == {"b": [0, 2, 4]}
    bench.ack("b", 0)
    assert bench.deliver() == {"b": [6]}


def test_ten_thousand_waiting_messages_stop_the_fresh_ones() -> None:
    bench = Bench(20_000, "a", max_in_flight=100_000, ack_deadline=1000)
    bench.deliver()
    bench.publish(10)
    for offset in range(0, 20_000, 2):
        bench.nack("a", offset, delay=100)
        bench.ack("a", offset + 1)
    assert not bench.subscription.wanted(0)
    assert "10000 others wait" in bench.explain(20_000)
    assert bench.wait(100) == {"a": [*range(0, 20_000, 2), *range(20_000, 20_010)]}


def test_what_is_in_flight_together_is_bounded_and_shared_by_those_that_joined() -> None:
    bench = Bench(200_000, "a", max_in_flight=100_000, ack_deadline=1000)
    assert len(bench.deliver()["a"]) == IN_FLIGHT_TOGETHER
    for number in range(3):
        bench.subscription.join(f"more-{number}")
    assert {len(offsets) for offsets in bench.deliver().values()} == {IN_FLIGHT_TOGETHER // 4}
    bench.ack("a", *range(IN_FLIGHT_TOGETHER))
    assert len(bench.deliver()["a"]) == IN_FLIGHT_TOGETHER // 4
    bench.subscription.leave("a")
    assert {len(offsets) for offsets in bench.deliver().values()} == {IN_FLIGHT_TOGETHER // 3 - IN_FLIGHT_TOGETHER // 4}


def test_a_subscriber_that_handles_nothing_takes_nothing_from_the_share_of_others() -> None:
    bench = Bench(200_000, "stuck", "busy", max_in_flight=100_000, ack_deadline=1000)
    for _ in range(5):
        got = bench.deliver()
        assert len(got["busy"]) == IN_FLIGHT_TOGETHER // 2
        bench.ack("busy", *got["busy"])


def test_many_subscribers_have_a_least_share_each() -> None:
    names = [f"s{number}" for number in range(300)]
    bench = Bench(100_000, *names, max_in_flight=1_000, ack_deadline=1000)
    assert {len(offsets) for offsets in bench.deliver().values()} == {LEAST_SHARE}


# Modes


def test_exclusive_refuses_a_second_subscriber() -> None:
    bench = Bench(2, "a", mode="exclusive")
    with pytest.raises(SubscriptionBusy, match="'a' has joined"):
        bench.subscription.join("b")
    bench.subscription.leave("a")
    bench.subscription.join("b")
    assert bench.deliver() == {"b": [0, 1]}


def test_failover_goes_to_the_next_when_the_active_one_goes() -> None:
    bench = Bench(3, "a", "b", "c", mode="failover", max_in_flight=2)
    assert bench.deliver() == {"a": [0, 1]}
    bench.subscription.leave("b")
    bench.subscription.leave("a")
    assert bench.deliver() == {"c": [0, 1]}


# How a delivery ends


def test_a_nacked_message_rests_longer_each_time() -> None:
    bench = Bench(1, "a", backoff={**NO_JITTER, "cap": 3})
    rests = []
    for _ in range(4):
        assert bench.deliver() == {"a": [0]}
        bench.nack("a", 0)
        assert bench.deliver() == {}
        wakeup = bench.wakeup()
        assert wakeup is not None
        rests.append(wakeup - bench.now)
        bench.now = wakeup
    assert rests == [1, 2, 3, 3]
    assert bench.deliver() == {"a": [0]}
    assert bench.attempts[0, 0] == 5


def test_jitter_takes_off_a_part_of_the_rest_at_most() -> None:
    backoff = RetryBackoff(initial=10, jitter=0.2)
    delays = [backoff.delay(1, Random(seed)) for seed in range(200)]
    assert 8 <= min(delays) < 8.5
    assert 9.5 < max(delays) <= 10


def test_a_rest_of_any_number_of_failures_is_the_cap() -> None:
    assert RetryBackoff(jitter=0).delay(10**6, Random(1)) == 300


def test_a_nack_may_ask_for_its_own_delay() -> None:
    bench = Bench(1, "a")
    bench.deliver()
    bench.nack("a", 0, delay=7)
    assert bench.wait(6.9) == {}
    assert bench.wait(0.2) == {"a": [0]}


def test_a_message_not_acked_in_time_goes_out_again_after_a_backoff() -> None:
    bench = Bench(1, "a", ack_deadline=30)
    bench.deliver()
    assert bench.wakeup() == 30
    assert bench.wait(29.9) == {}
    assert bench.wait(0.1) == {}
    assert bench.wakeup() == 31
    assert bench.wait(1) == {"a": [0]}


def test_extending_keeps_a_long_job_from_being_redelivered() -> None:
    bench = Bench(3, "a", ack_deadline=30)
    bench.deliver()
    bench.now = 20
    assert bench.subscription.extend("a", 0, [range(1, 2)], 30, bench.now) == 1
    bench.wait(10)
    assert bench.wait(1) == {"a": [0, 2]}
    assert bench.ack("a", 1) == 1


def test_extending_everything_and_never_bringing_a_deadline_nearer() -> None:
    bench = Bench(3, "a", ack_deadline=30)
    bench.deliver()
    assert sum(bench.subscription.extend_all("a", 5, bench.now)) == 3
    assert bench.wakeup() == 30
    assert sum(bench.subscription.extend_all("a", 50, bench.now)) == 3
    assert bench.wakeup() == 50


def test_what_a_leaver_held_goes_to_the_others_at_once_and_is_no_failure() -> None:
    bench = Bench(4, "a", "b", max_deliveries=1)
    bench.deliver()
    bench.subscription.leave("a")
    assert bench.deliver() == {"b": [0, 2]}
    assert bench.attempts[0, 0] == 2
    assert not bench.letters


def test_an_ack_that_comes_late_still_counts_while_no_other_subscriber_has_the_message() -> None:
    bench = Bench(1, "a")
    bench.deliver()
    assert bench.wait(30) == {}
    assert bench.ack("a", 0) == 1
    assert bench.wait(100) == {}
    assert bench.subscription.floor(0) == 1


def test_an_ack_that_comes_too_late_is_ignored() -> None:
    bench = Bench(1, "a", "b")
    bench.deliver()
    bench.wait(30)
    assert bench.wait(1) == {"b": [0]}
    assert bench.ack("a", 0) == 0
    assert not bench.nack("a", 0)
    assert bench.ack("b", 0) == 1


def test_acks_of_messages_that_others_hold_are_ignored() -> None:
    bench = Bench(4, "a", "b")
    bench.deliver()
    assert bench.subscription.ack("a", 0, [range(2**64)], bench.now) == 2
    assert bench.subscription.floor(0) == 1


def test_a_stranger_can_do_nothing() -> None:
    bench = Bench(1, "a")
    for act in (
        lambda: bench.ack("x", 0),
        lambda: bench.nack("x", 0),
        lambda: bench.die("x"),
        lambda: sum(bench.subscription.extend_all("x", 1, 0)),
        lambda: bench.subscription.started("x", 0, 0),
    ):
        with pytest.raises(NotJoined):
            act()


# Dead letters


def test_a_message_that_keeps_failing_is_dead_lettered_with_the_last_reason() -> None:
    bench = Bench(2, "a", max_deliveries=3)
    for failure in range(3):
        bench.deliver()
        bench.nack("a", 0, f"failure {failure}")
        bench.now += 10
    assert bench.deliver() == {}
    assert bench.letters == [DeadLetterDecision(0, 0, 3, "failure 2")]
    assert bench.subscription.floor(0) == 0, "settled only when the dead letter is durable"
    bench.store_dead_letters()
    bench.ack("a", 1)
    assert bench.subscription.floor(0) == 2
    assert bench.subscription.describe(bench.ends).dead_lettered == 1


def test_zero_max_deliveries_never_gives_up() -> None:
    bench = Bench(1, "a", max_deliveries=0)
    for _ in range(100):
        assert bench.deliver() == {"a": [0]}
        bench.nack("a", 0)
        bench.now += 300
    assert not bench.letters


def test_a_dead_letter_that_could_not_be_stored_is_tried_again() -> None:
    bench = Bench(1, "a", max_deliveries=1)
    bench.deliver()
    bench.nack("a", 0)
    bench.deliver()
    bench.subscription.dead_letter_failed(0, 0, bench.now)
    assert bench.wait(0.5) == {}
    assert len(bench.letters) == 1
    bench.wait(0.5)
    assert len(bench.letters) == 2


def test_a_dead_letter_under_way_is_taken_up_again_after_a_restart() -> None:
    bench = Bench(1, "a", max_deliveries=1)
    bench.deliver()
    bench.nack("a", 0, "sick")
    bench.deliver()
    bench.restart("b")
    assert bench.deliver() == {}
    assert bench.letters == [DeadLetterDecision(0, 0, 1, "sick")] * 2


# What survives


def test_acks_and_counts_survive_a_restart() -> None:
    bench = Bench(6, "a")
    bench.deliver()
    bench.ack("a", 0, 2, 5)
    bench.nack("a", 3)
    bench.deliver()
    bench.restart("b")
    assert bench.deliver() == {"b": [1, 4]}
    assert bench.wait(1) == {"b": [3]}
    assert {bench.attempts[0, offset] for offset in (1, 3, 4)} == {2}
    bench.nack("b", 3)
    assert bench.wait(1) == {}
    assert bench.wait(1) == {"b": [3]}, "the second failure rests longer: the first was not forgotten"


def test_a_broker_killed_again_and_again_charges_no_message() -> None:
    bench = Bench(3, "a", max_deliveries=2)
    for restart in range(5):
        assert bench.deliver() == {"a": [0, 1, 2]}
        assert bench.attempts[0, 0] == restart + 1
        bench.restart("a")
    assert not bench.letters


def test_a_snapshot_is_as_small_as_what_is_open() -> None:
    bench = Bench(4000, "a", "b", "c", "d")
    bench.deliver()
    saved = msgspec.json.encode(bench.subscription.snapshot())
    assert len(msgspec.json.decode(saved, type=SubscriptionSnapshot).partitions[0].open) == 4
    assert len(saved) < 600


def test_dirty_says_whether_the_snapshot_is_out_of_date() -> None:
    bench = Bench(2, "a")
    bench.subscription.snapshot()
    assert not bench.subscription.dirty
    bench.deliver()
    assert bench.subscription.dirty
    bench.subscription.snapshot()
    bench.deliver()
    assert not bench.subscription.dirty
    bench.ack("a", 0)
    assert bench.subscription.dirty


# Operators


def test_a_paused_subscription_delivers_nothing_and_can_be_settled() -> None:
    bench = Bench(2, "a", max_in_flight=1)
    bench.deliver()
    bench.subscription.pause()
    assert bench.ack("a", 0) == 1
    assert bench.deliver() == {}
    bench.restart("a")
    assert bench.deliver() == {}
    bench.subscription.resume()
    assert bench.deliver() == {"a": [1]}


def test_seeking_back_delivers_everything_again_as_if_for_the_first_time() -> None:
    bench = Bench(4, "a")
    bench.deliver()
    bench.ack("a", 0, 1)
    bench.nack("a", 2)
    bench.subscription.seek(0, 1)
    assert bench.deliver() == {"a": [1, 2, 3]}
    assert set(bench.attempts.values()) == {1}


def test_seeking_forward_skips() -> None:
    bench = Bench(4, "a")
    bench.subscription.seek(0, 3)
    assert bench.deliver() == {"a": [3]}
    assert "begins at offset 3" in bench.explain(1)


def test_an_offer_from_before_a_seek_is_ignored() -> None:
    bench = Bench(10, "a")
    wanted = bench.subscription.wanted(0)
    bench.subscription.offer(0, wanted.start, 8)
    bench.subscription.decide(0)
    stale = bench.subscription.wanted(0)
    bench.subscription.seek(0, 2)
    bench.subscription.offer(0, stale.start, 2)
    assert bench.deliver() == {"a": [2, 3, 4, 5, 6, 7, 8, 9]}


def test_retention_skips_what_is_gone() -> None:
    bench = Bench(6, "a", max_in_flight=3)
    bench.deliver()
    bench.nack("a", 1)
    bench.subscription.advance(0, 5)
    assert bench.subscription.floor(0) == 5
    assert bench.wait(10) == {"a": [5]}
    assert bench.ack("a", 0, 2) == 0


def test_a_fork_stands_where_the_other_stands_without_its_past() -> None:
    bench = Bench(5, "a", max_in_flight=4)
    bench.deliver()
    bench.ack("a", 0, 2)
    bench.nack("a", 1)
    fork = Bench(5)
    fork.subscription = reopened("fork", bench.subscription.snapshot().forked(), 0, Random(1))
    fork.subscription.join("b")
    assert fork.deliver() == {"b": [1, 3, 4]}
    assert set(fork.attempts.values()) == {1}


def test_a_fork_cannot_learn_keys_that_are_not_known() -> None:
    saved = Bench(1).subscription.snapshot()
    with pytest.raises(BadRequest, match="key_shared"):
        saved.forked(parse_options({"mode": "key_shared"}))


def test_a_settled_message_can_be_retried_as_if_it_were_new() -> None:
    bench = Bench(3, "a", max_deliveries=1)
    bench.deliver()
    bench.nack("a", 1)
    bench.deliver()
    bench.store_dead_letters()
    assert not bench.subscription.retry(0, 0), "it is in flight"
    assert bench.subscription.retry(0, 1)
    assert bench.subscription.floor(0) == 0
    bench.ack("a", 0, 2)
    assert bench.subscription.floor(0) == 1
    assert bench.deliver() == {"a": [1]}
    assert bench.attempts[0, 1] == 1


def test_a_partition_added_later_is_served_too() -> None:
    bench = Bench(1, "a")
    bench.deliver()
    bench.subscription.add_partition(1, 0)
    bench.ends[1] = 2
    assert bench.deliver() == {"a": [0, 1]}
    bench.restart("b")
    assert bench.deliver() == {"b": [0, 0, 1]}


# The breaker


def fail_everything(bench: Bench, count: int) -> None:
    for _ in range(count):
        for name, offsets in bench.deliver().items():
            for offset in offsets[:1]:
                bench.nack(name, offset, "database down")


def test_an_outage_slows_down_to_probes_and_condemns_nothing() -> None:
    bench = Bench(1000, "a", max_in_flight=1, max_deliveries=2)
    fail_everything(bench, 20)
    assert bench.subscription.describe(bench.ends).outage
    probes = []
    while bench.now < 3600:
        wakeup = bench.wakeup()
        assert wakeup is not None
        bench.now = wakeup
        for name, offsets in bench.deliver().items():
            assert len(offsets) == 1
            probes.append(bench.now)
            bench.nack(name, offsets[0])
    gaps = [b - a for a, b in itertools.pairwise(probes)]
    assert gaps[:5] == [2, 4, 8, 16, 30]
    assert max(gaps) == 30
    assert not bench.letters


def test_the_breaker_closes_by_itself_when_probes_succeed() -> None:
    bench = Bench(1000, "a", max_in_flight=1)
    fail_everything(bench, 20)
    bench.now = 60
    for _ in range(3):
        (offset,) = bench.deliver()["a"]
        assert bench.deliver() == {}
        bench.ack("a", offset)
    assert not bench.subscription.describe(bench.ends).outage


def test_a_failing_probe_starts_the_count_of_successes_anew() -> None:
    bench = Bench(1000, "a", max_in_flight=1)
    fail_everything(bench, 20)
    bench.now = 60
    for good in (True, True, False, True, True):
        (offset,) = bench.deliver()["a"]
        if good:
            bench.ack("a", offset)
        else:
            bench.nack("a", offset)
            bench.now += 60
    assert bench.subscription.describe(bench.ends).outage


def test_a_probe_that_is_due_while_the_window_is_full_does_not_wake_the_broker_again_and_again() -> None:
    bench = Bench(1000, "a", max_in_flight=1, ack_deadline=500)
    fail_everything(bench, 20)
    bench.now = 60
    assert len(bench.deliver()["a"]) == 1
    bench.now = 100
    assert bench.deliver() == {}
    assert bench.wakeup() == 560, "the deadline of the probe in flight"


def test_a_few_bad_messages_are_no_outage() -> None:
    bench = Bench(5, "a", max_deliveries=16)
    while not bench.letters:
        for offset in bench.deliver().get("a", ()):
            bench.nack("a", offset)
        bench.deliver()
        bench.now = bench.wakeup() or bench.now
    assert not bench.subscription.describe(bench.ends).outage


def test_one_failure_in_two_is_no_outage() -> None:
    bench = Bench(200, "a", max_in_flight=1)
    for index in range(200):
        (offset,) = bench.deliver()["a"]
        if index % 2:
            bench.ack("a", offset)
        else:
            bench.nack("a", offset)
    assert not bench.subscription.describe(bench.ends).outage


# Options


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ack_deadline": 0}, "ack_deadline must be between"),
        ({"ack_deadline": float("nan")}, "ack_deadline must be between"),
        ({"ack_deadline": "soon"}, "ack_deadline"),
        ({"max_in_flight": 0}, "max_in_flight must be between"),
        ({"max_deliveries": -1}, "max_deliveries must be between"),
        ({"mode": "sharded"}, "mode"),
        ({"backoff": {"factor": 0.5}}, "backoff.factor must be between"),
        ({"backoff": {"cap": 0.5}}, "backoff.cap must be between"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, object], words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        parse_options(options)


def test_options_have_sound_defaults() -> None:
    options = parse_options({})
    assert (options.mode, options.ack_deadline, options.max_in_flight) == (SubscriptionMode.SHARED, 30, None)
    assert options.dead_letters_of("jobs") == "jobs.dead-letters"
    assert parse_options({"dead_letter_topic": "graves"}).dead_letters_of("jobs") == "graves"


def test_calls_that_make_no_sense_are_refused() -> None:
    bench = Bench(1, "a")
    with pytest.raises(BadRequest, match="joined"):
        bench.subscription.join("a")
    with pytest.raises(BadRequest, match="window"):
        bench.subscription.join("b", window=0)
    with pytest.raises(BadRequest, match="no partition 7"):
        bench.ack("a", 0, partition=7)
    with pytest.raises(BadRequest, match="key_shared"):
        bench.subscription.offer_keys(0, 0, ["k"])
