"""An acked message keeps its place in the window until the ack is durable; then it never comes again."""

from __future__ import annotations

import pytest

from qb.core.subscriptions.save_urgency import BUSY, SaveUrgency
from tests.support.subscription_tools import Bench


def slow_disk(*given: object, **options: object) -> Bench:
    """Nothing becomes durable by itself."""
    bench = Bench(*given, **options)  # type: ignore[arg-type]
    bench.save()
    bench.saves = False
    return bench


def test_with_a_window_of_one_every_ack_is_durable_before_the_next_push() -> None:
    bench = slow_disk(3, "a", max_in_flight=1)
    for offset in range(3):
        assert bench.deliver() == {"a": [offset]}
        bench.ack("a", offset)
        assert bench.deliver() == {}
        assert bench.save()
    assert not bench.save(), "there is nothing to give back"


def test_the_bound_is_the_window_whatever_is_acked_in_whatever_order() -> None:
    bench = slow_disk(100, "a", max_in_flight=8)
    bench.deliver()
    bench.ack("a", 7, 0, 3)
    assert bench.deliver() == {}
    bench.save()
    assert bench.deliver() == {"a": [8, 9, 10]}


def test_a_snapshot_gives_back_the_slots_of_the_acks_that_it_has_and_no_others() -> None:
    bench = slow_disk(100, "a", max_in_flight=4)
    bench.deliver()
    bench.ack("a", 0)
    bench.subscription.snapshot()
    earlier = bench.subscription.snapshots
    bench.ack("a", 1, 2)
    assert bench.subscription.saved(earlier)
    assert bench.deliver() == {"a": [4]}
    bench.save()
    assert bench.deliver() == {"a": [5, 6]}


def test_a_later_snapshot_makes_up_for_one_that_was_lost() -> None:
    bench = slow_disk(100, "a", max_in_flight=4)
    bench.deliver()
    bench.ack("a", 0)
    bench.subscription.snapshot()  # the disk refuses it
    bench.ack("a", 1)
    assert bench.save()
    assert bench.deliver() == {"a": [4, 5]}
    assert not bench.subscription.saved(2), "it is notified late"


def test_a_subscriber_that_leaves_or_dies_takes_its_slots_along() -> None:
    bench = slow_disk(100, "a", "b", max_in_flight=4)
    bench.deliver()
    bench.ack("a", 0, 2)
    bench.ack("b", 1)
    bench.subscription.leave("a")
    bench.die("b")
    bench.subscription.join("a", announces=True)
    assert bench.subscription.save_urgency is SaveUrgency.NONE
    assert bench.deliver() == {"a": [3, 4, 5, 6]}, "a whole window"
    assert not bench.save(), "these acks were another subscriber's"


def test_the_slots_of_one_subscriber_do_not_concern_another() -> None:
    bench = slow_disk(100, "a", "b", max_in_flight=2)
    bench.deliver()
    bench.ack("a", 0, 2)
    bench.subscription.leave("b")
    assert bench.deliver() == {}
    bench.subscription.join("c")
    assert bench.deliver() == {"c": [1, 3]}


def test_a_late_ack_takes_a_place_too() -> None:
    bench = slow_disk(3, "a", max_in_flight=1, ack_deadline=10)
    bench.deliver()
    bench.wait(10)
    assert bench.deliver() == {"a": [1]}
    assert bench.ack("a", 0) == 1
    bench.ack("a", 1)
    bench.subscription.snapshot()
    assert bench.deliver() == {}
    assert bench.subscription.describe(bench.ends).subscribers[0].unsaved_acks == 2
    bench.subscription.saved(bench.subscription.snapshots)
    assert bench.deliver() == {"a": [2]}


def test_a_seek_or_retention_gives_no_slots_back() -> None:
    bench = slow_disk(100, "a", max_in_flight=2)
    bench.deliver()
    bench.ack("a", 0, 1)
    bench.subscription.seek(0, 50)
    bench.subscription.advance(0, 60)
    assert bench.deliver() == {}
    bench.save()
    assert bench.deliver() == {"a": [60, 61]}


def test_an_isolated_message_waits_for_a_slot_as_any_other() -> None:
    bench = slow_disk(1, "a", max_in_flight=1)
    bench.deliver()
    bench.die("a")
    bench.subscription.join("b")
    bench.publish(1)
    assert bench.deliver() == {"b": [1]}
    bench.ack("b", 1)
    assert bench.wait(1) == {}, "b has nothing in flight, but its only place is taken"
    bench.save()
    assert bench.deliver() == {"b": [0]}


def test_a_key_waits_for_a_place_of_its_owner() -> None:
    bench = slow_disk(mode="key_shared", keys="aab", max_in_flight=2)
    bench.subscription.join("w")
    assert bench.deliver() == {"w": [0, 1]}
    bench.ack("w", 0, 1)
    assert bench.deliver() == {}
    bench.save()
    assert bench.deliver() == {"w": [2]}


def test_a_paused_subscription_gives_slots_back_and_pushes_nothing() -> None:
    bench = slow_disk(3, "a", max_in_flight=1)
    bench.deliver()
    bench.ack("a", 0)
    bench.subscription.pause()
    assert bench.save()
    assert bench.deliver() == {}
    bench.subscription.resume()
    assert bench.deliver() == {"a": [1]}


def test_what_was_acked_durably_does_not_come_again_and_the_rest_does() -> None:
    bench = slow_disk(100, "a", max_in_flight=4)
    bench.deliver()
    bench.ack("a", 0, 1)
    bench.save()
    bench.restart("b")
    assert bench.deliver() == {"b": [2, 3, 4, 5]}


@pytest.mark.parametrize(
    ("window", "acked", "save_urgency"),
    [
        (1, 1, SaveUrgency.ALL),
        (2, 1, SaveUrgency.MUCH),
        (2, 2, SaveUrgency.ALL),
        (3, 1, SaveUrgency.SOME),
        (10, 4, SaveUrgency.SOME),
        (10, 5, SaveUrgency.MUCH),
        (10, 10, SaveUrgency.ALL),
        (10_000, 10_000 - BUSY - 1, SaveUrgency.SOME),
        (10_000, 10_000 - BUSY, SaveUrgency.MUCH),
    ],
)
def test_the_more_of_a_window_waits_for_a_save_the_sooner_it_should_be(
    window: int, acked: int, save_urgency: SaveUrgency
) -> None:
    bench = slow_disk(20_000, "a", max_in_flight=window)
    bench.deliver()
    assert bench.subscription.save_urgency is SaveUrgency.NONE
    bench.ack("a", *range(acked))
    assert bench.subscription.save_urgency is save_urgency
    bench.subscription.snapshot()
    assert bench.subscription.save_urgency is SaveUrgency.NONE, "these are on their way"


def test_with_room_left_a_save_may_wait_for_company() -> None:
    bench = slow_disk(3, "a", max_in_flight=10)
    bench.deliver()
    bench.ack("a", 0)
    assert bench.subscription.save_urgency is SaveUrgency.NONE
    assert bench.subscription.dirty


def test_the_numbers_and_the_words_distinguish_unacked_from_unsaved() -> None:
    bench = slow_disk(5, "a", max_in_flight=2)
    bench.deliver()
    bench.ack("a", 0)
    numbers = bench.subscription.describe(bench.ends)
    assert (numbers.in_flight, numbers.lag) == (1, 4)
    assert (numbers.subscribers[0].in_flight, numbers.subscribers[0].unsaved_acks) == (1, 1)
    assert bench.explain(0).startswith("acked by a")
    assert bench.explain(2) == (
        "fresh, never delivered; waiting for the window of a (1 of 2 in flight, 1 acks are being saved)"
    )
