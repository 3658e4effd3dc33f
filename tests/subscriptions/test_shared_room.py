"""What all subscriptions share: how many messages may be open, and the notes for explain()."""

from __future__ import annotations

import gc
from random import Random

import pytest

from qb.core.subscriptions.messages.settlements import MOST_OF_ONE, SettlementNotes
from qb.core.subscriptions.shared_room import LEAST, SharedRoom
from qb.core.subscriptions.subscription import Subscription
from qb.core.subscriptions.subscription_options import SubscriptionOptions, parse_options
from qb.core.wire.columns import np
from qb.core.wire.frames import MessageType as T
from tests.support.push_peers import a_topic

COUNT = 5_000


def one_of(shared: SharedRoom, name: str, mode: str = "shared", partitions: int = 1) -> Subscription:
    options = parse_options({"mode": mode, "max_in_flight": 20_000})
    made = Subscription(name, options, dict.fromkeys(range(partitions), 0), Random(1), shared)
    made.join("a")
    return made


def push(subscription: Subscription, count: int = COUNT, now: float = 1.0) -> int:
    """Offer what is wanted, as far as there are so many messages; return how many are in flight then."""
    wanted = subscription.wanted(0)
    count = min(count - wanted.start, len(wanted))
    if count > 0 and subscription.options.mode == "key_shared":
        subscription.offer_keys(0, wanted.start, [f"k{offset}" for offset in range(wanted.start, wanted.start + count)])
    elif count > 0:
        subscription.offer(0, wanted.start, count)
    subscription.decide(now)
    return subscription.totals(count).in_flight


@pytest.mark.parametrize("mode", ["shared", "key_shared"])
def test_all_subscriptions_together_have_no_more_messages_open_than_the_limit_and_each_has_a_few(mode):
    shared = SharedRoom(2_000)
    subscriptions = [one_of(shared, f"s{number}", mode) for number in range(30)]
    in_flight = [push(each) for each in subscriptions]
    assert in_flight[0] == 2_000
    assert set(in_flight[1:]) == {LEAST}
    assert shared.open == sum(in_flight)


@pytest.mark.parametrize("mode", ["shared", "key_shared"])
def test_those_that_settle_go_on_until_all_have_all_and_the_shares_become_equal(mode):
    shared = SharedRoom(2_000)
    subscriptions = {f"s{number}": one_of(shared, f"s{number}", mode) for number in range(4)}
    shared.has_room = lambda name: woken.append(name)
    woken = list(subscriptions)
    shares = []
    while woken:
        name = woken.pop(0)
        push(subscriptions[name])
        subscriptions[name].wait_for_room()
        shares.append([each.totals(0).in_flight for each in subscriptions.values()])
        if not woken:
            for name, each in subscriptions.items():
                if each.ack("a", 0, [range(each.floor(0), each.floor(0) + 50)], 1.0):
                    each.saved(each.changes().number)
                    woken.append(name)
    assert max(map(sum, shares)) <= 2_000 + 4 * LEAST
    assert [500] * 4 in shares
    assert {each.floor(0) for each in subscriptions.values()} == {COUNT}, "nothing was left behind"
    assert (shared.open, shared.sharing) == (0, 0)


@pytest.mark.parametrize("mode", ["shared", "key_shared"])
def test_messages_of_a_subscriber_that_left_count_until_they_are_settled_or_the_subscription_is_removed(mode):
    shared = SharedRoom(1_000)
    left, removed, other = (one_of(shared, name, mode) for name in ("left", "removed", "other"))
    assert push(left, 600) == 600
    assert push(removed, 400) == 400
    left.leave("a")
    while left.next_wakeup(2.0) == 2.0:
        left.decide(2.0)
    assert (push(other), shared.open) == (LEAST, 1_000 + LEAST)
    assert "QB_MAX_OPEN_MESSAGES" in other.explain(0, 4_000, COUNT, 2.0)
    removed.close()
    removed.leave("a")
    assert shared.open == 600 + LEAST
    left.seek(0, 0)
    assert (shared.open, shared.sharing) == (LEAST, 1)


def test_leases_and_messages_that_came_back_are_not_walked_by_the_garbage_collector():
    shared = SharedRoom()
    made = [one_of(shared, f"s{number}", partitions=100) for number in range(10)]
    for each in made:
        each.decide(1.0)
    gc.collect()
    before = len(gc.get_objects())
    for each in made:
        for partition in range(100):
            for first in (0, 5):
                each.offer(partition, first, 5)
                each.decide(1.0)
    gc.collect()
    assert len(gc.get_objects()) - before < 200, "for 2,000 leases"
    for each in made:
        each.leave("a")
        while each.next_wakeup(1.0) == 1.0:
            each.decide(1.0)
    gc.collect()
    assert shared.open == 10_000
    assert len(gc.get_objects()) - before < 1_500, "for 10,000 messages that wait in 1,000 partitions"


def test_keys_with_a_message_that_came_back_are_few_objects_for_the_garbage_collector():
    subscription = one_of(SharedRoom(), "s", "key_shared")
    push(subscription)
    subscription.leave("a")
    gc.collect()
    before = len(gc.get_objects())
    while subscription.next_wakeup(1.0) == 1.0:
        subscription.decide(1.0)
    gc.collect()
    assert len(gc.get_objects()) - before < 2 * COUNT


def test_the_oldest_settlements_of_all_partitions_are_forgotten_first():
    shared = SharedRoom(settlements=SettlementNotes(10))
    quiet, busy = (one_of(shared, name) for name in ("quiet", "busy"))
    for each in (quiet, busy):
        push(each)
    quiet.ack("a", 0, [range(5)], 1.0)
    assert "acked by a, 1.0 s ago" in quiet.explain(0, 4, COUNT, 2.0)
    for offset in range(0, 20, 2):
        busy.ack("a", 0, [range(offset, offset + 1)], 3.0)
    assert "settled more than 3.0 s ago; by whom is no longer remembered" in quiet.explain(0, 4, COUNT, 4.0)
    assert "acked by a" in busy.explain(0, 18, COUNT, 4.0)
    assert len(shared.settlements) == shared.settlements.cost == 10
    busy.close()
    assert len(shared.settlements) == shared.settlements.cost == 0


def test_many_offsets_in_one_note_count_as_many_notes_and_one_partition_has_its_own_limit():
    notes = SettlementNotes()
    cursor = one_of(SharedRoom(settlements=notes), "s")._state.cursors[0]
    notes.note(cursor, np.arange(0, 10_000, 2), 1.0, "acked")
    assert notes.cost == 101
    assert notes.find(cursor, 4) is not None
    assert notes.find(cursor, 5) is None
    for number in range(MOST_OF_ONE):
        notes.note(cursor, range(number, number + 1), 1.0, "acked")
    assert notes.cost == len(notes) == MOST_OF_ONE
    notes.forget(cursor)
    assert (notes.cost, notes.since(cursor)) == (0, None)


KEPT = {"Subscription", "SubscriptionState", "ActiveSubscription", "JoinedSubscriber", "Cursor", "SaveSchedule"}


async def test_subscriptions_and_subscribers_that_come_and_go_leave_nothing_for_the_garbage_collector(a_broker):
    async with a_broker() as connect:
        peer = await a_topic(connect, partitions="4")
        shared = connect.broker.subscriptions._shared
        await peer.publish("a")
        joined = await connect()
        await joined.ask(T.HELLO, 1, protocol="1")
        gc.collect()
        before = sum(type(each).__name__ in KEPT for each in gc.get_objects())
        gc.disable()
        try:
            for number in range(100):
                await peer.call("create_subscription", subscription_id=f"s{number}", topic="a")
                await joined.send(T.SUBSCRIBE, 1, subscription_id=f"s{number}")
                while (await peer.call("describe_subscription", subscription_id=f"s{number}"))["in_flight"] != 1:
                    pass
                await peer.call("delete_subscription", subscription_id=f"s{number}")
            after = sum(type(each).__name__ in KEPT for each in gc.get_objects())
        finally:
            gc.enable()
        assert after - before < 9 * 30, "nine for each of few that were to be looked at again"
        assert (shared.open, shared.sharing, len(shared.settlements)) == (0, 0, 0)


def test_a_subscription_that_is_removed_is_freed_with_its_leases():
    shared = SharedRoom()
    subscription = Subscription("s", SubscriptionOptions(), {0: 0}, Random(1), shared)
    subscription.join("a")
    push(subscription)
    gc.collect()
    gc.disable()
    try:
        held = [each for each in gc.get_objects() if type(each).__name__ == "JoinedSubscriber"]
        before = len(held)
        del held
        subscription.close()
        del subscription
        assert sum(type(each).__name__ == "JoinedSubscriber" for each in gc.get_objects()) == before - 1
    finally:
        gc.enable()
