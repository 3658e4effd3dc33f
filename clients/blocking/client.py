"""BrokerClient, for threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import monotonic, perf_counter
from types import TracebackType
from typing import Any

from qb.clients.blocking.joined import JoinedSubscribers
from qb.clients.blocking.link import BlockingLink
from qb.clients.blocking.offsets_and_groups import OffsetAndGroupMethods
from qb.clients.blocking.read_ahead import ReadAhead
from qb.clients.blocking.subscriptions import SubscriptionMethods
from qb.clients.blocking.transactions import TransactionMethods
from qb.clients.protocol.client_errors import QBError
from qb.clients.protocol.conversation import Conversation, answer_of
from qb.clients.protocol.forking import call_in_child
from qb.clients.protocol.partition_spread import PartitionSpread, TopicRoutes, check_keys
from qb.clients.protocol.publish_frames import Body, PublishForm, as_bytes, check_size, form_of, portions
from qb.clients.protocol.publish_tally import PublishTally
from qb.clients.protocol.receipts import Offsets, Receipt
from qb.clients.protocol.unacked_publishes import UnackedBatch
from qb.core.wire.frames import Frame

Send = Callable[
    [PublishForm, Sequence[bytes]], UnackedBatch
]  # bodies of one publish_many, on the link that it began with


class BrokerClient(SubscriptionMethods, OffsetAndGroupMethods, TransactionMethods):
    """A broker, for any number of threads. Every method may block for up to `request_timeout` seconds.

    Connects at the first use and again, by itself, whenever the connection is lost. Calls made meanwhile wait for
    it and raise BrokerUnavailable when it takes too long. `idempotent` publishes that were on their way are sent
    again and are never stored twice; without it they raise PublishUncertain. A refusal raises RequestRefused or one
    of its subclasses.

    In a child of os.fork() the client goes on with a connection and a producer id of its own, from the next call on,
    and the parent with its own. Subscribers, transactions and stages stay with the parent: in the child they raise
    UsedAfterFork, and to leave them there does nothing.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 9999,
        client_id: str | None = None,
        *,
        request_timeout: float = 30.0,
        heartbeat_interval: float = 30.0,
        idempotent: bool = True,
    ) -> None:
        self.host, self.port, self.client_id = host, port, client_id
        self._request_timeout = request_timeout
        self._heartbeat_interval, self._idempotent = heartbeat_interval, idempotent
        self._routes = TopicRoutes()
        self._begin()
        call_in_child(self, BrokerClient._begin)

    def _begin(self) -> None:
        """Start out without a connection, a producer id and anything in flight."""
        self._conversation = Conversation(self.client_id, idempotent=self._idempotent)
        self._link = BlockingLink(self.host, self.port, self._conversation, heartbeat_interval=self._heartbeat_interval)
        self._read_ahead = ReadAhead(self._link, self._ask_for)
        self._handling = self._link.listener = JoinedSubscribers(self._link, self._conversation, self._request_timeout)

    @property
    def max_message_size(self) -> int:
        """The longest body that the broker takes; known once connected."""
        return self._conversation.max_message_size

    def connect(self, wait: float = 0.0) -> None:
        """Connect now. Raises BrokerUnavailable if that fails: at once, or after `wait` seconds of trying again."""
        started = self._link.started
        try:
            self._link.open(monotonic() + (wait or self._request_timeout), patient=wait > 0)
        except BaseException:
            if not started:
                self._link.close()
            raise

    def disconnect(self) -> None:
        """Leave all subscriptions and end the connection; a later call connects anew.

        Calls of other threads that are on their way raise. In a handler it returns at once, and the rest happens when
        the handler has returned.
        """
        if self._handling.runs_the_caller:
            threading.Thread(target=self.disconnect, name="qb disconnects").start()
            return
        self._handling.close()
        self._link.close()

    def __enter__(self) -> BrokerClient:
        self.connect()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.disconnect()

    def create_topic(
        self,
        topic: str,
        partitions: int = 1,
        retention_hours: float | None = None,
        retention_bytes: int | None = None,
    ) -> dict[str, Any]:
        """Make a topic and return it. Raises TopicExists, BadName, BadRequest."""
        created: dict[str, Any] = self._request(
            "create_topic",
            topic=topic,
            partitions=partitions,
            retention_hours=retention_hours,
            retention_bytes=retention_bytes,
        )
        return created

    def delete_topic(self, topic: str, if_unused: bool = False) -> None:
        """Delete a topic with all its messages. Raises UnknownTopic, and TopicInUse with `if_unused`."""
        self._request("delete_topic", topic=topic, if_unused=if_unused)

    def list_topics(self) -> list[dict[str, Any]]:
        """Return every topic."""
        topics: list[dict[str, Any]] = self._request("list_topics")
        return topics

    def describe_topic(self, topic: str) -> dict[str, Any]:
        """Return a topic with its partitions, offsets and sizes. Raises UnknownTopic."""
        described: dict[str, Any] = self._request("describe_topic", topic=topic)
        return described

    def describe_topics(self, topics: Iterable[str]) -> list[dict[str, Any]]:
        """Return these topics as describe_topic() does, all as they are at one moment. Raises UnknownTopic."""
        described: list[dict[str, Any]] = self._request("describe_topics", topics=list(topics))
        return described

    def server_info(self) -> dict[str, Any]:
        """Return what the broker says about itself."""
        info: dict[str, Any] = self._request("server_info")
        return info

    def ping(self) -> float:
        """Return the seconds that a round trip to the broker takes."""
        started = perf_counter()
        self._ask(self._conversation.ping)
        return perf_counter() - started

    def publish(
        self,
        topic: str,
        data: Body,
        partition: int | None = None,
        key: str | None = None,
        *,
        timestamp_ms: int = 0,
        **properties: str,
    ) -> Receipt:
        """Store one message and return where it is. `timestamp_ms` 0 is replaced by the broker's clock.

        Raises PublishUncertain if the answer is lost for good.
        """
        form = form_of(topic, partition, key, properties, timestamp_ms)
        body = data if type(data) is bytes else as_bytes(data)
        check_size(body, self._conversation.max_message_size)
        deadline = monotonic() + self._request_timeout
        answered = threading.Lock()
        answered.acquire()
        batch = self._link.publish(form, (body,), answered, deadline)
        if not self._link.wait(answered, deadline):
            self._link.abandon(batch)
        return batch.receipt(topic)

    def publish_text(
        self,
        topic: str,
        text: str,
        partition: int | None = None,
        key: str | None = None,
        *,
        timestamp_ms: int = 0,
        **properties: str,
    ) -> Receipt:
        """Store one message whose body is the text in UTF-8; see publish()."""
        return self.publish(topic, text.encode(), partition, key, timestamp_ms=timestamp_ms, **properties)

    def publish_many(
        self,
        topic: str,
        bodies: Iterable[Body],
        partition: int | None = None,
        key: str | None = None,
        properties: Mapping[str, str] | None = None,
        *,
        keys: Iterable[str | None] | None = None,
        timestamp_ms: int = 0,
    ) -> Offsets:
        """Store the bodies in order, many in flight at once, and return their offsets: a compact sequence of ints.

        `key` is the key of all of them; `keys` gives each its own. In a topic with several partitions, bodies with a
        key go where it belongs and the others take turns, unless all go to one `partition`; see Offsets.partitions.
        The bodies may come from a generator: no more of them are held than are in flight. Stops at the first failure
        and raises, once all that is on its way is settled: PublishFailed (see its `index` and `stored`), or
        PublishUncertain, or unchanged what the iterable itself raised.
        """
        form = PublishForm(topic, partition, key, properties, timestamp_ms)
        check_keys(partition, key, keys)
        self._link.open(monotonic() + self._request_timeout, patient=True)  # to know the broker's size limit
        tally, answered, link = PublishTally(), threading.Semaphore(0), self._link
        count = self._partitions_of(topic) if partition is None and key is None else 1

        def send(form: PublishForm, bodies: Sequence[bytes]) -> UnackedBatch:
            return link.publish(form, bodies, answered, monotonic() + self._request_timeout, tally.check)

        with link.attended():
            if count > 1 or keys is not None:
                scatter = PartitionSpread(topic, count, self._routes, properties, timestamp_ms)
                self._scatter(scatter, bodies, keys, tally, send)
            else:
                self._send_many(form, bodies, tally, send)
            patience = 0 if tally.hopeless else self._request_timeout
            while tally.pending and answered.acquire(timeout=patience):
                tally.collect()
            for _, batch in tally.pending:
                link.abandon(batch)
        return self._routes.checked(topic, tally)

    def _partitions_of(self, topic: str) -> int:
        """Return how many partitions a topic has; 1 if that cannot be found out: then the broker does the routing."""
        try:
            return self._count_partitions(topic)
        except QBError:
            return 1

    def _count_partitions(self, topic: str, expected: int = 1) -> int:
        """Return how many partitions a topic has; if fewer than expected were known, the broker is asked again."""
        count = self._routes.partitions(topic, monotonic())
        if count is None or count < expected:
            count = self.describe_topic(topic).get("partitions", 1)
            self._routes.learn(topic, count, monotonic())
        return count

    def _scatter(
        self,
        scatter: PartitionSpread,
        bodies: Iterable[Body],
        keys: Iterable[str | None] | None,
        tally: PublishTally,
        send: Send,
    ) -> None:
        """Send to several partitions until the bodies end or something fails, which is noted in the tally."""
        try:
            bodies = bodies if keys is None else scatter.with_keys(bodies, keys)
            limit = self._conversation.max_message_size
            for block in portions(bodies, scatter.overhead, limit, scatter.block_bytes):
                for _, indexes, form, some in scatter.pieces(block):
                    tally.add(send(form, some), indexes)
        except Exception as error:
            tally.fail(scatter.next_index, error)

    def _send_many(self, form: PublishForm, bodies: Iterable[Body], tally: PublishTally, send: Send) -> None:
        """Send until the bodies end or something fails, which is noted in the tally."""
        try:
            for portion in portions(bodies, form.overhead, self._conversation.max_message_size):
                tally.add(send(form, portion))
        except Exception as error:
            tally.fail(tally.sent, error)

    def _request(self, method: str, **arguments: Any) -> Any:
        return answer_of(self._ask(lambda: self._conversation.request(method, arguments)))

    def _ask(self, compose: Callable[[], tuple[int, bytes]]) -> Frame:
        return self._link.ask(compose, monotonic() + self._request_timeout)
