"""How soon a snapshot should be saved: an ack keeps its slot of the window until it is durable."""

from __future__ import annotations

from enum import IntEnum

from qb.core.subscriptions.messages.joined_subscriber import JoinedSubscriber
from qb.core.subscriptions.subscription_state import SubscriptionState

BUSY = 2_500  # messages, or half a window, keep a subscriber busy while a save takes place


class SaveUrgency(IntEnum):
    """How much depends on a save."""

    NONE = 0  # there is room in every window: it may wait for other saves
    SOME = 1  # a subscriber is given nothing more until it is done
    MUCH = 2  # so much of a subscriber's window is acked that it should begin while the rest is being handled
    ALL = 3  # a subscriber has acked everything that it was given


def save_urgency(state: SubscriptionState) -> SaveUrgency:
    """Return how soon a snapshot should be made durable. It costs as much as there are subscribers."""
    upcoming = state.snapshots + 1
    return max(
        (_urgency_of(subscriber, upcoming) for subscriber in state.subscribers.values()), default=SaveUrgency.NONE
    )


def _urgency_of(subscriber: JoinedSubscriber, upcoming: int) -> SaveUrgency:
    acked = subscriber.unsaved_in(upcoming)  # those that a snapshot has seen are on their way
    if acked >= max(subscriber.window / 2, subscriber.window - BUSY):
        is_all = not subscriber.in_flight and acked == subscriber.unsaved  # and no save is under way, which brings more
        return SaveUrgency.ALL if is_all else SaveUrgency.MUCH
    return SaveUrgency.SOME if acked and subscriber.free <= 0 else SaveUrgency.NONE


def saved(state: SubscriptionState, number: int) -> bool:
    """Free the slots of all acks that this snapshot, or an earlier one, has; returns whether there were any."""
    freed = [subscriber.note_saved(number) for subscriber in state.subscribers.values()]
    return any(freed)
