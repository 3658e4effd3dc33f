"""Acks keep their places until they are durable; how soon to make them so."""

from __future__ import annotations

from enum import IntEnum

from qb.core.subscriptions.leases import JoinedSubscriber
from qb.core.subscriptions.subscription_state import SubscriptionState

BUSY = 2_500  # messages, or half a window, keep a subscriber busy while a save takes place


class SaveUrgency(IntEnum):
    """How much depends on a save."""

    NONE = 0  # there is room in every window: it may wait for company
    SOME = 1  # somebody is given nothing more until it is done
    ALL = 2  # so much of somebody's window is acked that it should begin while the rest is being handled


def haste(state: SubscriptionState) -> SaveUrgency:
    """Return how soon a snapshot should be made durable. It costs as much as there are subscribers."""
    upcoming = state.snapshots + 1
    return max((_haste_of(subscriber, upcoming) for subscriber in state.subscribers.values()), default=SaveUrgency.NONE)


def _haste_of(subscriber: JoinedSubscriber, upcoming: int) -> SaveUrgency:
    acked = subscriber.places_kept_for(upcoming)  # those that a snapshot has seen are on their way
    if acked >= max(subscriber.window / 2, subscriber.window - BUSY):
        return SaveUrgency.ALL
    return SaveUrgency.SOME if acked and subscriber.free <= 0 else SaveUrgency.NONE


def saved(state: SubscriptionState, number: int) -> bool:
    """Free the places of all acks that this snapshot, or an earlier one, has; returns whether there were any."""
    freed = [subscriber.free_places(number) for subscriber in state.subscribers.values()]
    return any(freed)
