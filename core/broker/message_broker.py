"""The broker as a whole: what its doors call, wired together."""

from __future__ import annotations

from contextlib import closing, nullcontext
from typing import Any

import trio

from qb.core.broker.append_service import AppendService
from qb.core.broker.broker_metrics import BrokerMetrics
from qb.core.broker.fetching import FetchLimits, Turn, fetch
from qb.core.broker.ownership import Ownership
from qb.core.broker.producer_secrets import ProducerSecrets
from qb.core.broker.producers import Producers
from qb.core.broker.storage_use import StorageUse
from qb.core.broker.topic_registry import TopicRegistry
from qb.core.broker.user_registry import UserRegistry, watch_users
from qb.core.groups.group_manager import GroupManager
from qb.core.push.subscription_manager import SubscriptionManager
from qb.core.rights.access import Access
from qb.core.rights.audit import Audit
from qb.core.rights.known_users import KnownUsers
from qb.core.rights.log_ins import LogIns
from qb.core.rights.owners import Owners
from qb.core.settings import SecuritySettings, Settings
from qb.core.transactions.transaction_manager import TransactionManager
from qb.core.wire.errors import BadRequest, ShuttingDown
from qb.core.wire.version import __version__
from qb.storage.engine import Engine, StoredChunk
from qb.storage.faults import keep_running

OWNERS = "owner/"  # where the owners of transactions are kept in the metadata


class MessageBroker:
    """The parts of one broker. Doors use `topics`, `appends`, `subscriptions`, `groups`, `transactions`, fetch()."""

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        ownership: Ownership | None = None,
        log_ins: LogIns | None = None,
    ) -> None:
        """`ownership` and `log_ins`: of a broker of a cluster, which has users also while it follows."""
        self.engine = engine
        self.ownership = ownership
        self.settings = settings
        self.log_ins = log_ins or log_ins_of(settings.security)
        users = self.log_ins.users
        if log_ins is None and not users.are_from_file:
            watch_users(engine.metadata, users)
        self.users = UserRegistry(engine.metadata, users)
        self.storage_use = StorageUse(engine, users)
        self.appends = AppendService(engine, settings.server, self._ensure_topic, self.storage_use)
        # First: it holds what readers may not see yet.
        self.transactions = TransactionManager(engine, settings.server, self.appends.append)
        self.producers = Producers()
        self.producer_secrets = ProducerSecrets(engine.metadata)
        self.subscriptions = SubscriptionManager(
            engine, settings.server, self._ensure_topic, self.appends.store_dead_letter, users
        )
        self.groups = GroupManager(engine, settings.server)
        self.topics = TopicRegistry(
            engine, settings.server, self.subscriptions, self.groups, self.appends.topic_deleted, users
        )
        self.access = Access(self.log_ins, self._owners(), self._topic_of)
        self.metrics = BrokerMetrics()
        self.connections = 0
        self.draining = False
        self._started = trio.current_time()
        self.producers.restore(
            engine.log(topic.topic, partition)
            for topic in engine.topics().values()
            for partition in range(topic.partitions)
        )

    def _owners(self) -> Owners:
        """Return the owners that are known; those of transactions outlive the broker."""
        metadata = self.engine.metadata
        known = {key.removeprefix(OWNERS): str(entry.value) for key, entry in metadata.under(OWNERS).items()}

        def keep(owned: str, owner: str) -> None:
            if owned.startswith("transaction/"):
                metadata.put_soon(OWNERS + owned, owner)

        def forget(owned: str) -> None:
            if owned.startswith("transaction/"):
                metadata.put_soon(OWNERS + owned, None)

        return Owners(known, keep, forget)

    def _topic_of(self, subscription_id: str) -> str | None:
        active = self.subscriptions.deliveries.get(subscription_id)
        return None if active is None else active.topic

    async def run(self) -> None:
        """Serve subscriptions, groups and transactions until cancelled; the engine must outlive this."""
        with closing(self.access.audit):
            await self._run()

    async def _run(self) -> None:
        async with trio.open_nursery() as keepers:
            keepers.start_soon(self.subscriptions.deliveries.run)
            keepers.start_soon(keep_running, "consumer groups", self.groups.run)
            keepers.start_soon(self.transactions.run)
            keepers.start_soon(keep_running, "measuring of storage", self.storage_use.run)

    def drain(self) -> None:
        """Begin to stop: what was received is finished, and nothing new begins."""
        self.draining = True
        self.subscriptions.deliveries.drain()

    async def _ensure_topic(self, topic: str, made_by: str) -> None:
        await self.topics.ensure(topic, made_by)

    async def server_info(self) -> dict[str, Any]:
        """Return the version, the uptime and the size of this broker."""
        return {
            "version": __version__,
            "uptime": round(trio.current_time() - self._started, 3),
            "connections": self.connections,
            "topics": len(self.engine.topics()),
            "data_dir": self.settings.storage.data_dir,
            "durability": self.engine.durability,
        }

    async def cluster(self) -> dict[str, Any]:
        """Return what is known of the cell that this broker owns, and of its other brokers."""
        return {"engine": "local"} if self.ownership is None else await self.ownership.describe()

    async def move_cell(self, to: str | None = None) -> None:
        """Begin to give the cell to another broker. Raises BadRequest."""
        if self.ownership is None:
            raise BadRequest("this broker is alone: there is no other one to move to")
        await self.ownership.move(to)

    async def verify_cell(self, start: bool = False, nodes: bool = False) -> dict[str, Any]:
        """Begin to prove this copy, with `nodes` NATS nodes too, or return how far that is. Raises BadRequest."""
        if self.ownership is None:
            raise BadRequest("this broker is alone; prove its data directory with: qb verify DATA_DIR")
        return self.ownership.verify(start=start, nodes=nodes)

    # Reading

    async def fetch(
        self, topic: str, partition: int, offset: int, limits: FetchLimits, turn: Turn = nullcontext
    ) -> StoredChunk:
        """Return stored messages from `offset` on, read in a `turn()`.

        Raises UnknownTopic, UnknownPartition, OffsetOutOfRange, LogDamaged.
        """
        if limits.consistent:
            await self.engine.confirm_current()
        return await fetch(self.topics.log(topic, partition), offset, limits, turn)

    async def offsets(
        self, topic: str, partition: int = 0, time_ms: int | None = None, consistent: bool = False
    ) -> dict[str, Any]:
        """Return the first and the next offset of a partition and, if a time is given, the first one from then on."""
        if consistent:
            await self.engine.confirm_current()
        log = self.topics.log(topic, partition)
        found = {"first": log.first_offset, "next": log.end_offset}
        if time_ms is not None:
            found["offset_for_time"] = await log.offset_for_time(time_ms)
        return found

    def check_open(self) -> None:
        """Raises ShuttingDown once the broker drains."""
        if self.draining:
            raise ShuttingDown("the broker is shutting down")


def log_ins_of(security: SecuritySettings) -> LogIns:
    """Return who may log in, as far as the settings say. Raises UsersFileError, OSError."""
    users = KnownUsers(security.users_file, is_closed=bool(security.first_users_file))
    return LogIns(users, Audit(security.audit_file))
