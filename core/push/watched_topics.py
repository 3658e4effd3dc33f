"""Which subscriptions want to know when a log of their topic has moved.

Each log has one watcher, however many subscriptions have subscribers: a topic may have a thousand partitions, and one
more subscription must not cost a call and an object for each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from qb.core.push.active_subscription import ActiveSubscription
from qb.storage.engine import PartitionLog

Moved = Callable[[ActiveSubscription, int], None]  # the subscription, and the partition that has moved


class WatchedTopics:
    """The topics that have subscriptions with subscribers."""

    def __init__(self, moved: Moved) -> None:
        """`moved` is called for each subscription, and raises nothing."""
        self._moved = moved
        self._topics: dict[str, _WatchedTopic] = {}

    def __contains__(self, active: ActiveSubscription) -> bool:
        topic = self._topics.get(active.topic)
        return topic is not None and active in topic.subscriptions

    def add(self, active: ActiveSubscription) -> None:
        """From now on this subscription is notified when a log of its topic moves."""
        topic = self._topics.get(active.topic)
        if topic is None:
            topic = self._topics[active.topic] = _WatchedTopic(self._moved)
        topic.subscriptions[active] = None
        topic.watch(active.logs)

    def discard(self, active: ActiveSubscription) -> None:
        """It is not notified any more."""
        topic = self._topics.get(active.topic)
        if topic is None:
            return
        topic.subscriptions.pop(active, None)
        if not topic.subscriptions:
            topic.stop()
            del self._topics[active.topic]

    def partitions_added(self, active: ActiveSubscription) -> None:
        """Its topic has more partitions: watch them too, if it is notified of the others."""
        if active in self:
            self._topics[active.topic].watch(active.logs)


class _WatchedTopic:
    """The subscriptions of one topic, and what ends the watching of its logs."""

    def __init__(self, moved: Moved) -> None:
        self.subscriptions: dict[ActiveSubscription, None] = {}
        self._moved = moved
        self._stops: dict[int, Callable[[], None]] = {}  # by partition

    def watch(self, logs: Mapping[int, PartitionLog]) -> None:
        """Watch those that are not watched yet."""
        for partition in logs.keys() - self._stops.keys():
            self._stops[partition] = logs[partition].watch(partial(self._notify, partition))

    def stop(self) -> None:
        """Watch none any more."""
        for stop in self._stops.values():
            stop()

    def _notify(self, partition: int) -> None:
        for active in list(self.subscriptions):
            self._moved(active, partition)
