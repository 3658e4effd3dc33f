"""Looks every two seconds how the NATS nodes keep the journal, and logs what has changed."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence

import trio

from qb.cluster.health.nats_monitor import NatsMonitor
from qb.cluster.health.node_health import (
    PATIENCE,
    HealthLog,
    LeaderSays,
    MonitorReport,
    MonitorSilent,
    Observed,
    judge,
    leader_says,
)
from qb.core.broker.cell_report import JournalNode, JournalState
from qb.replication.jetstream.jetstream_api import JetStreamRefused, call
from qb.replication.nats.nats_client import NatsClient
from qb.replication.nats.nats_protocol import NatsError

log = logging.getLogger("qb.cluster")

LOOK_EVERY = 2.0  # seconds
ANSWER_WITHIN = 1.0  # seconds for the leader


class JournalWatch:
    """Belongs to the event loop's thread; `run()` keeps `state` new."""

    def __init__(self, client: NatsClient, stream: str, monitors: Sequence[NatsMonitor] = ()) -> None:
        self.identity = ""  # of the stream, once it is open
        self.damaged: Mapping[str, int] = {}  # by node, as the newest pass over its copy has found
        self._client, self._stream, self._monitors = client, stream, monitors
        self._said: list[MonitorReport | MonitorSilent] = []
        self._known: Sequence[JournalNode] = ()
        self._ends: deque[tuple[float, int]] = deque()  # of the leader, of the last few seconds
        self._log = HealthLog()
        self.state = JournalState(stream=stream, error="NATS was not asked yet")

    async def run(self) -> None:
        """Look, for ever."""
        while True:
            if self.identity:
                await self._ask_monitors()
                for is_trouble, line in self._log.take(await self.look()):
                    log.log(logging.WARNING if is_trouble else logging.INFO, "%s", line)
            await trio.sleep(LOOK_EVERY)

    async def look(self) -> JournalState:
        """Ask the leader now; the monitors were asked at the last look."""
        leader = await self._ask_leader()
        if isinstance(leader, LeaderSays):
            self._known = leader.nodes
        observed = Observed(leader, self._said)
        self.state = judge(self._stream, observed, known=self._known, due=self._due(leader), damaged=self.damaged)
        return self.state

    def _due(self, leader: LeaderSays | str) -> int:
        """Return what was the end of the journal a while ago."""
        now = trio.current_time()
        if isinstance(leader, LeaderSays):
            self._ends.append((now, leader.last))
        due = 0
        while self._ends and self._ends[0][0] <= now - PATIENCE:
            due = self._ends.popleft()[1]
        if due:
            self._ends.appendleft((now - PATIENCE, due))
        return due

    async def _ask_leader(self) -> LeaderSays | str:
        try:
            return leader_says(await call(self._client, f"STREAM.INFO.{self._stream}", timeout=ANSWER_WITHIN))
        except (NatsError, JetStreamRefused, trio.TooSlowError) as error:
            return str(error) or "NATS does not answer"

    async def _ask_monitors(self) -> None:
        said: dict[int, MonitorReport | MonitorSilent] = {}

        async def ask(number: int, monitor: NatsMonitor) -> None:
            said[number] = await monitor.look(self._stream, self.identity)

        async with trio.open_nursery() as nursery:
            for number, monitor in enumerate(self._monitors):
                nursery.start_soon(ask, number, monitor)
        self._said = [said[number] for number in sorted(said)]
