"""The one way for messages to be stored. Every door, batches, dead letters and transactions append through here.

| rule | where |
|---|---|
| which topics exist, and which of them a peer may write | `topic`, `open_topic` |
| a missing topic is made, if the settings say so | `open_topic` |
| the partition: as wanted, by key, or by turn | `route` |
| names of properties, sizes | `_encode`, `admit_staged`, and for PUBLISH frames `doors/binary/server_connection.py` |
| a log that takes nothing: damaged, poisoned, deleted, shutting down | `append` |
| how much the topics of a user may hold | `topic`, by `core/broker/storage_use.py` |
| publish numbers of idempotent producers | `core/broker/numbered_publishes.py` |

A decision is made once for a run of messages that follow each other, never for each of them. A door has checked the
rights of its peer before.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from zlib import crc32

import trio

from qb.core.broker.outgoing_messages import BadBatchMessage, OutgoingMessage, PartitionBatch, StoredReceipt
from qb.core.broker.storage_use import StorageUse
from qb.core.pacing import MOST_AT_ONCE, must_give_way, portions, spend
from qb.core.settings import ServerSettings
from qb.core.wire.clock import now_ms
from qb.core.wire.errors import BadRequest, BrokerError, UnknownPartition, UnknownTopic
from qb.core.wire.frames import MessageType, encode_frame, encode_properties, too_large
from qb.core.wire.message_rules import check_own_properties, check_timestamp
from qb.core.wire.names import DEAD_LETTERS, check_name
from qb.core.wire.runs.staged_frames import check_messages
from qb.storage.engine import AppendRun, Done, Engine, PartitionLog, Topic

CHECKED_AT_ONCE = 1 << 17  # bytes of staged messages that are checked before we look at the time: 3,000 at most


# The log that a message goes to; how many in a row go there at most, this one counted (None: as long as topic and
# partition stay the same); and whether only as long as the key stays the same too. A plain tuple: each run makes one.
AppendTarget = tuple[PartitionLog, int | None, bool]
NO_MESSAGES = "a STAGE frame needs at least one message in its body"


class AppendService:
    """Stores messages. All methods belong to the event loop's thread."""

    def __init__(
        self,
        engine: Engine,
        settings: ServerSettings,
        create_topic: Callable[[str, str], Awaitable[None]],
        storage_use: StorageUse,
    ) -> None:
        """`create_topic` makes a topic of a user unless it exists; raises BrokerError."""
        self._storage_use = storage_use
        self.durability = engine.durability  # what a receipt promises
        self._engine = engine
        self._settings = settings
        self._create_topic = create_topic
        self._turns: dict[str, int] = {}  # the next partition of each topic for messages without key

    # Where a message may go

    def topic(self, name: str, *, by_broker: bool = False) -> Topic:
        """Return a topic for messages of a peer, or of the broker itself, to be appended to.

        Raises UnknownTopic, BadName if it cannot be a name, BadRequest for one that only the broker writes,
        QuotaExceeded if it may hold no more.
        """
        if name.endswith(DEAD_LETTERS) and not by_broker:
            raise BadRequest(f"only the broker writes to {name[:80]!r}, for dead letters; publish to another topic")
        known = self._engine.topics().get(name)
        if known is None:
            raise UnknownTopic(check_name("topic", name))
        if self._storage_use.is_limited:
            self._storage_use.check(known)
        return known

    def may_create(self, name: str) -> bool:
        """Say whether a topic is missing and is made by the first message for it."""
        return self._settings.auto_create_topics and name not in self._engine.topics()

    async def open_topic(self, name: str, *, made_by: str = "", by_broker: bool = False) -> Topic:
        """Return a topic as topic() does, made for a user if it is missing and may be. Raises BrokerError."""
        try:
            return self.topic(name, by_broker=by_broker)
        except UnknownTopic:
            if not self.may_create(name):
                raise
        await self._create_topic(name, made_by)
        return self.topic(name, by_broker=by_broker)

    def route(self, name: str, partition: int | None, key: str | None) -> AppendTarget:
        """Return where a message of a peer goes. Raises UnknownPartition, and as topic()."""
        return self._route(self.topic(name), partition, key)

    def _route(self, topic: Topic, partition: int | None, key: str | None) -> AppendTarget:
        name = topic.topic
        if partition is not None:
            if not 0 <= partition < topic.partitions:
                raise UnknownPartition(name, partition, topic.partitions)
            return self._engine.log(name, partition), None, False
        if topic.partitions == 1:
            return self._engine.log(name, 0), None, False
        if key is not None:
            return self._engine.log(name, crc32(key.encode()) % topic.partitions), None, True
        turn = self._turns.get(name, 0)
        self._turns[name] = turn + 1
        return self._engine.log(name, turn % topic.partitions), 1, False

    def topic_deleted(self, name: str) -> None:
        """Forget what was known of a topic."""
        self._turns.pop(name, None)

    # Runs

    def append(self, log: PartitionLog, run: AppendRun, done: Done, *, lags: bool = False) -> None:
        """Give a run to its log: frames that keep all rules, at the log's next offset. Does not block or raise.

        `done` is called with what became of it: before this returns if the log takes nothing, else when storage has
        finished a step of its own. `lags` as for the log.
        """
        if self._storage_use.is_limited:
            self._storage_use.stored(log.topic, len(run.data))
        try:
            log.append(run, done, lags=lags)
        except BrokerError as error:
            send = done((run,), error, 0)
            if send is not None:
                send()

    # Messages one by one

    async def publish(
        self, topic: str, message: OutgoingMessage, timestamp_ms: int = 0, *, by_broker: bool = False
    ) -> StoredReceipt:
        """Store one message and return when it is durable. Raises BrokerError; then nothing of it was kept."""
        try:
            (outcome,) = await self.publish_many(topic, [message], timestamp_ms or now_ms(), by_broker=by_broker)
        except BadBatchMessage as bad:
            raise bad.error from None
        if isinstance(outcome, BrokerError):
            raise outcome
        return outcome

    async def store_dead_letter(self, topic: str, body: bytes, key: str | None, properties: Mapping[str, str]) -> None:
        """Store a dead letter, in the first partition, and return when it is durable. Raises BrokerError."""
        await self.publish(topic, OutgoingMessage(body, 0, key, properties), by_broker=True)

    async def publish_many(
        self,
        topic: str,
        messages: Sequence[OutgoingMessage],
        timestamp_ms: int,
        *,
        wait: bool = True,
        made_by: str = "",
        by_broker: bool = False,
    ) -> list[StoredReceipt | BrokerError]:
        """Store messages, all of that time, and return for each where it is or why it is not, when they are durable.

        Those of one partition are kept as a whole or not at all. Without `wait`, returns when the logs have taken them:
        the receipts then promise nothing. A topic that is missing may be made, for the user `made_by`. Raises
        BrokerError, BadBatchMessage; then nothing was kept.
        """
        check_timestamp(timestamp_ms)
        opened = await self.open_topic(topic, made_by=made_by, by_broker=by_broker)
        batches = await self._gather(opened, messages, timestamp_ms)
        for batch in batches:
            await batch.log.wait_for_room()
            self.append(batch.log, batch.run(now_ms()), batch.done)
        if wait:
            for batch in batches:
                await batch.wait()
        durability = self.durability if wait else "none"
        outcomes: dict[int, StoredReceipt | BrokerError] = {}
        for batch in batches:
            for number, index in enumerate(batch.indexes):
                outcomes[index] = batch.outcome(number, durability)
        return [outcomes[index] for index in range(len(messages))]

    async def _gather(
        self, topic: Topic, messages: Sequence[OutgoingMessage], timestamp_ms: int
    ) -> list[PartitionBatch]:
        """Make frames of the messages and sort them by log. Raises BadBatchMessage."""
        known: dict[tuple[int | None, str | None], bytes] = {}  # the properties of messages that have none of their own
        batches: dict[PartitionLog, PartitionBatch] = {}
        async for portion in portions(enumerate(messages)):
            for index, message in portion:
                body, partition, key, properties = message
                encoded = None if properties else known.get((partition, key))
                try:
                    encoded = self._encode(topic.topic, message, encoded)
                    log, _, _ = self._route(topic, partition, key)
                except BrokerError as error:
                    raise BadBatchMessage(index, error) from None
                if not properties:
                    known[partition, key] = encoded
                if log not in batches:
                    batches[log] = PartitionBatch(log)
                batches[log].add(index, encode_frame(MessageType.DATA, 0, timestamp_ms, encoded, body))
        return list(batches.values())

    def _encode(self, topic: str, message: OutgoingMessage, known: bytes | None) -> bytes:
        """Return the properties of a message as it is stored: `known`, or made. Raises BadRequest, MessageTooLarge."""
        encoded = known or encode_properties(_properties(topic, message))
        excess = too_large(len(message.body), len(encoded), self._settings.max_message_size)
        if excess:
            raise excess
        return encoded

    # Messages of transactions

    async def admit_staged(self, topic: str, frame: bytes, body_at: int, made_by: str = "") -> int:
        """Check the messages in the body of a STAGE frame and return how many there are.

        A topic that is missing may be made, for the user `made_by`.

        Raises BadRequest unless each is as a publish to this topic would have to be, and as open_topic().
        """
        await self.open_topic(topic, made_by=made_by)
        count = in_this_step = 0
        at = body_at
        while at < len(frame):
            checked, at = check_messages(frame, at, topic, self._settings.max_message_size, CHECKED_AT_ONCE)
            spend(checked)
            count, in_this_step = count + checked, in_this_step + checked
            if at < len(frame) and (must_give_way() or in_this_step > MOST_AT_ONCE // 2):
                await trio.lowlevel.checkpoint()
                in_this_step = 0
        if not count:
            raise BadRequest(NO_MESSAGES)
        return count

    def admit_few(self, topic: str, frames: bytes) -> int | None:
        """Check messages as admit_staged() does, in one step of the event loop; None: the topic has to be made first.

        They are so few bytes as a TRANSACTION frame carries.
        """
        if self.may_create(topic):
            return None
        self.topic(topic)
        count, _ = check_messages(frames, 0, topic, self._settings.max_message_size, len(frames))
        spend(count)
        if not count:
            raise BadRequest(NO_MESSAGES)
        return count


def _properties(topic: str, message: OutgoingMessage) -> Mapping[str, str]:
    """Return the fields of a message's frame, and its own properties. Raises BadRequest."""
    fields = {"topic": topic}
    if message.partition is not None:
        fields["partition"] = str(message.partition)
    if message.key is not None:
        fields["key"] = message.key
    check_own_properties(message.properties or ())
    return {**fields, **(message.properties or {})}
