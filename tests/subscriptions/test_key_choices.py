"""Choosing the subscribers of a slice by columns is choosing them message by message."""

from __future__ import annotations

from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from qb.core.subscriptions.messages.cursor import Cursor
from qb.core.subscriptions.messages.joined_subscriber import JoinedSubscriber
from qb.core.subscriptions.queues import key_order, key_queue, round_robin
from qb.core.subscriptions.queues.key_order import KeyOrderedQueue
from qb.core.subscriptions.queues.round_robin import RoundRobin

keys = st.lists(st.sampled_from([None, *"abcdefgh"]), min_size=1, max_size=60)
slices = st.lists(st.tuples(st.integers(0, 1), keys, st.integers(1, 60)), min_size=1, max_size=6)
Outcome = tuple[dict[str, list[tuple[int, int]]], list[dict[int, str]]]


def outcome(few: int, windows: list[int], offered: list[tuple[int, list[str | None], int]], busy: int) -> Outcome:
    """Return who got which messages, and which were passed over, after these slices were offered one after the other.

    Each slice is looked at until its limit is reached, it is held up, or all of it was looked at.
    """
    members = [JoinedSubscriber(f"s{number}", window, False) for number, window in enumerate(windows)]
    in_turn, queue, cursors = RoundRobin(), KeyOrderedQueue(), [Cursor(0, 0), Cursor(1, 0)]
    given: dict[str, list[tuple[int, int]]] = {member.name: [] for member in members}
    for member in members:
        in_turn.join(member)
    with (
        mock.patch.object(key_order, "FEW", few),
        mock.patch.object(key_queue, "MOST_IN_FLIGHT", 7),
        mock.patch.object(round_robin, "BUSY", busy),
    ):
        for partition, names, limit in offered:
            cursor = cursors[partition]
            cursor.offer_keys(names)
            while cursor.keys_at_hand and limit and in_turn.room():
                choice, _ = queue.distribute(cursor, in_turn, limit)
                for member, indexes in choice.given:
                    given[member.name] += [(partition, cursor.next + place) for place in indexes.tolist()]
                    member.assigned += len(indexes)
                    limit -= len(indexes)
                cursor.take_keys(choice.looked_at)
                cursor.next += choice.looked_at
                if choice.held_up_by:
                    break
            cursor.next += len(cursor.keys_at_hand)
            cursor.keys_at_hand = ()
    return given, [cursor.passed for cursor in cursors]


@settings(max_examples=300)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=4), slices, st.sampled_from([2, 500]))
def test_columns_choose_as_one_by_one(
    windows: list[int], offered: list[tuple[int, list[str | None], int]], busy: int
) -> None:
    assert outcome(0, windows, offered, busy) == outcome(1_000, windows, offered, busy)


def test_a_number_is_given_to_another_key_only_when_the_first_has_nothing_unsettled() -> None:
    table, member = KeyOrderedQueue().table, JoinedSubscriber("x", 10, False)
    kept = table.number_all(["kept"])
    table.take(kept, member)
    for first in range(0, 1_000, 100):
        numbers = table.number_all([f"key {number}" for number in range(first, first + 100)])
        assert len(set(numbers.tolist()) - {int(kept[0])}) == 100
        table.take(numbers, member)
        table.settle(numbers)
    assert len(table.in_flight) < 1_000, "numbers are used again"
    assert table.names(kept.tolist()) == ["kept"]
    assert table.owner_of(int(kept[0])) is member
