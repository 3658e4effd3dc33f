"""How many bytes the topics of each user hold: measured now and then, and counted in between."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count

import trio

from qb.core.pacing import portions
from qb.core.rights.known_users import KnownUsers
from qb.storage.engine import Engine, PartitionLog, Topic

INTERVAL = 1.0  # seconds between two measurements
SHARE = 0.02  # of the processor's time that measuring takes at most


class StorageUse:
    """The bytes that users have stored, for those that have a quota of them."""

    def __init__(self, engine: Engine, users: KnownUsers) -> None:
        self._engine = engine
        self._users = users
        self._measured: dict[str, int] = {}  # by the user that has made the topics
        self._since: dict[str, int] = {}  # stored since the last measurement began

    @property
    def is_limited(self) -> bool:
        """Is there a user with such a quota? Else nothing need be counted."""
        return self._users.limits_storage

    def check(self, topic: Topic) -> None:
        """Raises QuotaExceeded if the topics of the user that has made this one hold as much as they may."""
        if maker := topic.maker:
            used = self._measured.get(maker, 0) + self._since.get(maker, 0)
            self._users.of_user(maker).check_storage(used)

    def stored(self, topic: str, size: int) -> None:
        """So many bytes more are on their way into a topic."""
        known = self._engine.topics().get(topic)
        if known is not None and (maker := known.maker):
            self._since[maker] = self._since.get(maker, 0) + size

    async def run(self) -> None:
        """Measure, for ever."""
        while True:
            took = 0.0
            if self.is_limited:
                began = time.process_time()
                await self.measure()
                took = time.process_time() - began
            await trio.sleep(max(INTERVAL, took / SHARE))

    async def measure(self) -> None:
        """Look how much is in the logs. What is being written at this moment is not counted until the next time."""
        counted, measured = dict(self._since), dict[str, int]()
        async for logs in portions(self._logs()):
            for user, log in logs:
                measured[user] = measured.get(user, 0) + log.state().bytes
        self._measured = measured
        self._since = {user: size - counted.get(user, 0) for user, size in self._since.items()}

    def _logs(self) -> Iterator[tuple[str, PartitionLog]]:
        for name in list(self._engine.topics()):
            for number in count():
                topic = self._engine.topics().get(name)
                if topic is None or not topic.maker or number >= topic.partitions:
                    break
                yield topic.maker, self._engine.log(name, number)
