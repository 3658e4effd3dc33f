"""A subscription says where every message is and why, and its numbers add up."""

from __future__ import annotations

from tests.support.subscription_tools import Bench


def test_the_numbers_of_a_subscription() -> None:
    bench = Bench(10, "a", "b", max_in_flight=3)
    bench.deliver()
    bench.ack("a", 0)
    bench.nack("b", 1)
    numbers = bench.subscription.describe(bench.ends)
    assert (numbers.lag, numbers.in_flight, numbers.waiting, numbers.redelivered) == (9, 4, 1, 0)
    assert {each.subscriber: each.in_flight for each in numbers.subscribers} == {"a": 2, "b": 2}
    (partition,) = numbers.partitions
    assert (partition.floor, partition.next, partition.end, partition.lag) == (1, 6, 10, 9)
    bench.wait(1)
    assert bench.subscription.describe(bench.ends).redelivered == 1


def test_who_stands_by_is_shown_so() -> None:
    bench = Bench(0, "a", "b", mode="failover")
    assert [each.active for each in bench.subscription.describe(bench.ends).subscribers] == [True, False]


def test_a_message_that_is_not_there_yet() -> None:
    assert Bench(3).explain(3) == "not published yet: partition 0 ends at 3"


def test_a_message_in_flight() -> None:
    bench = Bench(1, "a")
    bench.deliver()
    bench.now = 10
    assert bench.explain(0) == "in flight to a: attempt 1, pushed 10.0 s ago, to be acked within 20.0 s"
    bench.subscription.started("a", 0, 0)
    assert "to a, which is handling it:" in bench.explain(0)


def test_a_message_that_was_acked() -> None:
    bench = Bench(2, "a")
    bench.deliver()
    bench.ack("a", 0)
    bench.now = 5
    assert bench.explain(0) == "acked by a, 5.0 s ago"


def test_a_message_acked_too_long_ago_to_say_by_whom() -> None:
    bench = Bench(2001, "a", max_in_flight=1)
    for offset in range(2001):
        bench.deliver()
        bench.ack("a", offset)
        bench.now += 0.01
    assert bench.explain(0) == "settled more than 10.0 s ago; by whom is no longer remembered"
    bench.restart()
    assert bench.explain(0) == "settled before the broker started"


def test_a_message_in_backoff() -> None:
    bench = Bench(1, "a")
    bench.deliver()
    bench.nack("a", 0, "no such customer")
    bench.now = 0.25
    assert bench.explain(0) == "in backoff for another 0.8 s; delivered 1 times, last failure: no such customer"


def test_a_message_that_was_dead_lettered() -> None:
    bench = Bench(1, "a", max_deliveries=1)
    bench.deliver()
    bench.nack("a", 0, "no such customer")
    bench.deliver()
    assert "being dead-lettered to jobs.dead-letters after 1 failures" in bench.explain(0)
    bench.store_dead_letters()
    assert bench.explain(0) == "dead-lettered to jobs.dead-letters (no such customer), 0.0 s ago"


def test_a_message_that_waits_for_a_window() -> None:
    bench = Bench(5, "a", "b", max_in_flight=1)
    bench.deliver()
    assert bench.explain(2) == (
        "fresh, never delivered; waiting for the window of a (1 of 1 in flight), b (1 of 1 in flight)"
    )
    assert bench.explain(4).startswith("fresh, never delivered (2 fresh before it); waiting for the window of a")
    bench.subscription.block("b", True)
    assert "b (does not read)" in bench.explain(2)


def test_a_message_for_which_no_subscriber_is_there() -> None:
    bench = Bench(1)
    assert bench.explain(0) == "fresh, never delivered; the subscription has no subscribers"
    bench.subscription.pause()
    assert bench.explain(0) == "fresh, never delivered; the subscription is paused"


def test_a_message_that_has_to_be_alone() -> None:
    bench = Bench(1, "a")
    bench.deliver()
    bench.die("a")
    bench.subscription.join("b")
    bench.publish(1)
    bench.deliver()
    bench.wait(1)
    assert bench.explain(0).startswith("waiting to be offered alone")
    bench.publish(1)
    assert "kept for a message that has to be alone" in bench.explain(2)
    bench.ack("b", 1)
    bench.deliver()
    assert bench.explain(0).startswith("in flight to b, alone:")


def test_a_message_during_an_outage() -> None:
    bench = Bench(100, "a", max_in_flight=1)
    for offset in range(20):
        bench.deliver()
        bench.nack("a", offset)
    assert "only probes go out: the next in 1.0 s" in bench.explain(50 - 30)
