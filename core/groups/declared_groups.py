"""Groups that were declared before a member joined or an offset was committed.

The metadata has an entry for each (group, topic), under `group/<group>/<topic>`: when it was declared.
"""

from __future__ import annotations

from collections.abc import Collection, KeysView

from qb.core.wire.names import check_name
from qb.storage.engine import Metadata

_PREFIX = "group/"


class DeclaredGroups:
    """The entries. All methods belong to the event loop's thread; reads do not block."""

    def __init__(self, metadata: Metadata) -> None:
        """Find what was declared before."""
        self._metadata = metadata
        self._topics: dict[str, set[str]] = {}
        for key in metadata.under(_PREFIX):
            _, group, topic = key.split("/")
            self._topics.setdefault(group, set()).add(topic)

    def groups(self) -> KeysView[str]:
        """Return every declared group."""
        return self._topics.keys()

    def topics(self, group: str) -> list[str]:
        """Return the topics for which a group was declared, sorted."""
        return sorted(self._topics.get(group, ()))

    async def declare(self, group: str, topic: str, now_ms: int) -> int:
        """Store durably that there is such a group; returns when it was declared. Raises BadName."""
        known = self._metadata.get(_key(check_name("group", group), topic))
        if known is not None:
            return int(known.value)
        self._topics.setdefault(group, set()).add(topic)
        await self._metadata.put(_key(group, topic), now_ms)
        return now_ms

    async def delete_group(self, group: str) -> None:
        """Forget a group; durable on return."""
        await self._delete([(group, topic) for topic in self._topics.get(group, ())])

    async def delete_topic(self, topic: str) -> None:
        """Forget a topic of all groups; durable on return."""
        await self._delete([(group, topic) for group, topics in self._topics.items() if topic in topics])

    async def keep_only(self, topics: Collection[str]) -> None:
        """Forget topics that are not there any more; for the start of the broker."""
        for topic in set().union(*self._topics.values()) - set(topics):
            await self.delete_topic(topic)

    async def _delete(self, gone: Collection[tuple[str, str]]) -> None:
        if not gone:
            return
        await self._metadata.delete(*(_key(group, topic) for group, topic in gone))
        for group, topic in gone:
            topics = self._topics.get(group, set())
            topics.discard(topic)
            if not topics:
                self._topics.pop(group, None)


def _key(group: str, topic: str) -> str:
    return f"{_PREFIX}{group}/{topic}"
