"""key_shared: all messages of one key to one subscriber, in order, and no key waits for another."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qb.core.subscriptions import dispatch
from qb.core.subscriptions.push_decisions import PushDecision
from qb.core.subscriptions.queues import key_queue, round_robin
from qb.core.subscriptions.queues.sorted_positions import SortedPositions
from qb.core.wire.errors import BadRequest
from tests.support.subscription_tools import Bench


def keyed(keys: str, *joining: str, **options: object) -> Bench:
    return Bench(0, *joining, keys=keys, mode="key_shared", **options)


def test_one_key_goes_to_one_subscriber_in_order() -> None:
    bench = keyed("abcabcabc", "x", "y")
    got = bench.deliver()
    assert sorted(got["x"] + got["y"]) == list(range(9))
    for key in range(3):
        owners = {name for name, offset in bench.order if offset % 3 == key}
        offsets = [offset for _, offset in bench.order if offset % 3 == key]
        assert len(owners) == 1
        assert offsets == sorted(offsets)


def test_the_only_subscriber_gets_what_lies_together_in_one_run_whatever_the_keys_are() -> None:
    bench = keyed("abcab.", "x")
    bench.subscription.offer_keys(0, 0, bench.keys or [])
    (push,) = bench.subscription.decide(bench.now)
    assert isinstance(push, PushDecision)
    assert push.runs == (range(6),)
    assert bench.ack("x", 0, 3, 5) == 3
    runs = [(run.first, run.attempts, run.key) for run in bench.subscription.snapshot().partitions[0].runs()]
    assert runs == [(1, 1, "b"), (2, 1, "c"), (4, 1, "b")]


def test_one_key_fills_the_window_of_the_only_subscriber_and_a_failure_takes_all_of_it_back_in_order() -> None:
    count = 6_000
    bench = keyed("a" * (count + 10), "x", max_in_flight=count)
    assert bench.deliver() == {"x": list(range(count))}
    assert bench.nack("x", 0)
    assert bench.subscription.describe(bench.ends).in_flight == 0
    assert bench.deliver() == {}
    assert bench.wait(1)["x"] == list(range(key_queue.MOST_IN_FLIGHT))


def test_messages_without_a_key_go_in_turn() -> None:
    bench = keyed("....", "x", "y")
    assert bench.deliver() == {"x": [0, 2], "y": [1, 3]}


def test_a_full_window_stalls_its_own_keys_only() -> None:
    bench = keyed("aaaabb", max_in_flight=2)
    bench.subscription.join("x")
    bench.deliver()
    bench.subscription.join("y")
    assert bench.deliver() == {"y": [4, 5]}
    assert bench.deliver() == {}
    assert "key 'a' belongs to x" in bench.explain(2)


def a_full_subscriber_and_another(keys: str) -> Bench:
    """Return a subscription of which x holds two messages of the key a, all that it takes, and y three of six."""
    bench = keyed("aabbb" + keys, max_in_flight=6)
    bench.subscription.join("x", 2)
    bench.deliver(at_most=2)
    bench.subscription.join("y")
    assert bench.deliver(at_most=3) == {"y": [2, 3, 4]}
    return bench


def test_nothing_is_passed_over_while_all_others_have_enough_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_robin, "BUSY", 0)
    bench = a_full_subscriber_and_another("acb")
    assert bench.deliver() == {}
    assert bench.subscription.describe(bench.ends).waiting == 0
    assert not bench.subscription.wanted(0), "nothing is read in vain"
    assert "waiting for the window of x" in bench.explain(6)
    bench.ack("y", 2)
    assert bench.deliver() == {"y": [6, 7]}, "less than half of its window is taken"
    bench.ack("x", 0)
    assert bench.deliver() == {"x": [5]}


@pytest.mark.parametrize("dies", [True, False])
def test_what_waits_for_a_subscriber_goes_on_when_that_is_gone(monkeypatch: pytest.MonkeyPatch, dies: bool) -> None:
    monkeypatch.setattr(round_robin, "BUSY", 0)
    bench = a_full_subscriber_and_another("c")
    bench.keys[5] = "a"  # type: ignore[index]
    bench.publish(1)
    bench.keys.append("c")  # type: ignore[union-attr]
    assert bench.deliver() == {}
    if dies:
        bench.die("x")
    else:
        bench.subscription.leave("x")
    assert bench.wait(5) == {"y": [0, 1, 5]}


def test_a_subscriber_of_few_messages_that_take_long_gets_those_of_other_keys() -> None:
    bench = a_full_subscriber_and_another("acb")
    assert bench.deliver() == {"y": [6, 7]}


def test_a_new_subscriber_does_not_take_a_key_that_is_in_flight() -> None:
    bench = keyed("ab" + "aabb", "x")
    assert bench.deliver(at_most=2) == {"x": [0, 1]}
    bench.subscription.join("y")
    assert bench.deliver() == {"x": [2, 3, 4, 5]}


def test_a_key_that_is_settled_is_free_to_go_elsewhere() -> None:
    bench = keyed("aa", "x", "y")
    assert bench.deliver(at_most=1) == {"x": [0]}
    bench.ack("x", 0)
    assert bench.deliver() == {"y": [1]}


def test_messages_that_were_only_looked_at_do_not_keep_a_key_with_its_subscriber() -> None:
    bench = keyed("abab", "x", max_in_flight=2)
    assert bench.deliver() == {"x": [0, 1]}
    bench.subscription.join("y")
    assert bench.deliver() == {}, "both keys belong to x, which has no room"
    bench.ack("x", 0, 1)
    got = bench.deliver()
    assert sorted(got) == ["x", "y"], "each has one of the keys now"
    assert sorted(offset for offsets in got.values() for offset in offsets) == [2, 3]


def test_a_failed_message_holds_back_its_key_and_no_other() -> None:
    bench = keyed("aabab", "x")
    assert bench.deliver(at_most=3) == {"x": [0, 1, 2]}
    bench.nack("x", 0)
    assert bench.deliver() == {"x": [4]}
    assert "behind offset 0" in bench.explain(1)
    assert bench.wait(1) == {"x": [0, 1, 3]}


def test_later_messages_of_a_failed_one_are_taken_back_and_come_again_behind_it() -> None:
    bench = keyed("aaa", "x")
    bench.deliver()
    bench.nack("x", 1)
    assert bench.subscription.describe(bench.ends).in_flight == 1
    assert not bench.nack("x", 2), "no longer held"
    bench.ack("x", 0)
    assert bench.wait(1) == {"x": [1, 2]}


def test_a_deadline_that_passes_is_held_against_the_first_of_its_key_only() -> None:
    bench = keyed("aabb", "x", max_deliveries=2)
    assert bench.deliver() == {"x": [0, 1, 2, 3]}
    bench.wait(600)  # the deadline and a backoff
    bench.wait(10)
    bench.ack("x", 0, 2)
    for offset in (1, 3):
        assert bench.nack("x", offset), "it is there, and not dead after one deadline and"
        assert "backoff" in bench.explain(offset), "one failure of its own"


def test_of_several_leases_that_end_together_the_first_message_of_a_key_is_to_blame_whichever_was_due_first() -> None:
    bench = keyed("aa", "x", max_deliveries=1)
    assert bench.deliver(at_most=1) == {"x": [0]}
    assert bench.wait(1) == {"x": [1]}
    bench.subscription.extend("x", 0, [range(1)], 100, bench.now)
    bench.wait(600)
    bench.store_dead_letters()
    assert bench.deliver() == {"x": [1]}, "not dead, and behind no other message any more"


def test_a_key_that_is_held_back_takes_no_room_from_another() -> None:
    bench = keyed("abab", "x", max_in_flight=2)
    assert bench.deliver() == {"x": [0, 1]}
    bench.subscription.join("y")
    assert bench.deliver() == {}, "both keys belong to x, which has no room"
    bench.nack("x", 0, delay=100)
    assert bench.deliver() == {"x": [3]}
    assert "behind offset 0" in bench.explain(2)


def test_a_dead_letter_frees_its_key_when_it_is_durable() -> None:
    bench = keyed("aa", "x", max_deliveries=1)
    bench.deliver()
    bench.nack("x", 0)
    assert bench.deliver() == {}
    bench.store_dead_letters()
    assert bench.deliver() == {"x": [1]}


@pytest.mark.parametrize("dies", [True, False])
def test_the_keys_of_who_goes_move_on_in_order(dies: bool) -> None:
    bench = keyed("abab", "x", "y")
    bench.deliver()
    bench.order.clear()
    if dies:
        bench.die("x")
    else:
        bench.subscription.leave("x")
    assert bench.deliver() == {"y": [0, 2]}


def test_an_isolated_message_holds_back_its_key_until_it_is_settled() -> None:
    bench = keyed("aab", "x")
    bench.deliver()
    bench.subscription.started("x", 0, 0)
    bench.die("x")
    bench.subscription.join("y")
    bench.subscription.join("z")
    assert bench.deliver() == {"y": [2]}
    assert bench.wait(1) == {"z": [0]}
    bench.ack("z", 0)
    assert bench.deliver() == {"z": [1]}


def test_keys_and_counts_survive_a_restart() -> None:
    bench = keyed("aab", "x")
    bench.deliver()
    bench.nack("x", 0)
    bench.restart("y")
    assert bench.deliver() == {"y": [2]}
    assert bench.wait(1) == {"y": [0, 1]}
    assert bench.attempts[0, 0] == 2


def test_a_fork_keeps_the_keys() -> None:
    bench = keyed("aa", "x")
    bench.deliver()
    forked = bench.subscription.snapshot().forked()
    assert [(run.first, run.attempts, run.key) for run in forked.partitions[0].runs()] == [(0, 0, "a"), (1, 0, "a")]


def test_it_is_offered_keys_and_nothing_else() -> None:
    bench = keyed("a", "x")
    with pytest.raises(BadRequest, match="keys"):
        bench.subscription.offer(0, 0, 1)


class CountedItems(dict):  # type: ignore[type-arg]
    """Counts the messages that are looked at one after the other."""

    looked_at = 0

    def items(self) -> Any:
        self.looked_at += len(self)
        return super().items()


def test_a_failure_among_many_messages_of_one_key_does_not_look_at_all_of_them() -> None:
    count = 500
    bench = keyed("a" * count, "x", max_in_flight=count)
    bench.deliver()
    assert bench.nack("x", count - 1, delay=60)
    queue = bench.subscription._state.keyed.queue_of("a").recorded  # type: ignore[union-attr]
    queue.open = CountedItems(queue.open)
    for offset in reversed(range(count - 1)):
        assert bench.nack("x", offset, delay=60)
    bench.deliver()
    assert queue.open.looked_at == 0
    assert len(queue.open) == count


@given(st.lists(st.tuples(st.sampled_from(["add", "discard"]), st.integers(0, 2), st.integers(0, 9)), max_size=60))
def test_sorted_positions_are_a_set_in_order(steps: list[tuple[str, int, int]]) -> None:
    positions, model = SortedPositions(), set()
    for action, partition, offset in steps:
        place = partition, offset
        getattr(positions, action)(place)
        getattr(model, action)(place)
        same = sorted(each for each in model if each[0] == partition)
        assert list(positions.behind(place)) == [each for each in same if each > place]
        assert positions.first_before(place) == (same[0] if same and same[0] < place else None)


def test_what_was_offered_and_not_looked_at_is_wanted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "REDELIVERED_AT_ONCE", 1)  # so that what was passed over leaves no turn to the fresh
    bench = Bench(0, "a", "b", keys="kkkkj", mode="key_shared", max_in_flight=2)
    assert bench.deliver() == {"a": [0, 1], "b": [4]}
    bench.ack("a", 0, 1)
    bench.save()
    bench.subscription.offer_keys(0, 5, ["j", "j"])
    decisions = bench.subscription.decide(bench.now)
    assert {run.start for each in decisions if isinstance(each, PushDecision) for run in each.runs} <= {2, 3}
    assert bench.subscription.wanted(0).start == 5, "a partition that was read to its end is read again"


def test_a_full_key_goes_on_in_one_partition_when_it_backs_off_in_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_queue, "MOST_IN_FLIGHT", 4)
    bench = Bench(0, "x", "y", partitions=2, keys="aaaa", mode="key_shared")
    bench.ends[1] = 1
    assert sorted(bench.deliver()["x"]) == [0, 0, 1, 2]
    assert bench.subscription.nack("x", 1, 0, bench.now)
    assert bench.deliver() == {"x": [3]}
