"""The brokers, each driven as its own client does best: publish many messages with keys, handle a backlog."""

from __future__ import annotations

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.harness import PeerMissing, Server, nats_server, qb_server, rabbitmq_server, redis_server
from benchmarks.work.orders import PARTITIONS, Parse, by_partition, partition_of
from qb import BrokerClient, Message

PATIENCE = 300.0  # seconds for a backlog


class WorkBroker(ABC):
    """A broker that syncs before it answers."""

    name: ClassVar[str]
    share: ClassVar[float] = 1.0  # of the messages of a case: slower brokers are given fewer
    server: Server

    @classmethod
    @abstractmethod
    def started(cls, directory: Path) -> AbstractContextManager[WorkBroker]:
        """Return the broker on a server of its own. Raises PeerMissing when entered."""

    @abstractmethod
    def publish(self, bodies: Sequence[bytes], keys: Sequence[str]) -> None:
        """Publish to a fresh topic of PARTITIONS partitions; return when each message is acked."""

    @abstractmethod
    def handle(self, count: int, parse: Parse, *, batches: bool) -> float:
        """Return the seconds in which a new group has parsed and acked that backlog."""


class Qb(WorkBroker):
    """publish_many, and a handler at default options."""

    name = "qb"

    def __init__(self, server: Server, client: BrokerClient) -> None:
        self.server, self.client = server, client
        self._made = 0

    @classmethod
    @contextmanager
    def started(cls, directory: Path) -> Iterator[Qb]:
        with qb_server(directory / "qb") as server, BrokerClient(port=server.port) as client:
            yield cls(server, client)

    @property
    def topic(self) -> str:
        return f"orders-{self._made}"

    def publish(self, bodies: Sequence[bytes], keys: Sequence[str]) -> None:
        self._made += 1
        self.client.create_topic(self.topic, partitions=PARTITIONS)
        self.client.publish_many(self.topic, bodies, keys=keys)

    def handle(self, count: int, parse: Parse, *, batches: bool, **options: Any) -> float:
        return handle_backlog(self.client, self.topic, count, parse, batches=batches, **options)


def handle_backlog(
    client: BrokerClient,
    topic: str,
    count: int,
    parse: Parse,
    *,
    batches: bool = False,
    subscribers: int = 1,
    **options: Any,
) -> float:
    """Return the seconds in which the subscribers of a new subscription have parsed and acked the backlog of a topic.

    Each subscriber is a connection of its own in this process.
    """
    handled, done, lock = 0, threading.Event(), threading.Lock()

    def handler(message: Message) -> None:
        parse(message.body)
        count_up(1)

    def batch_handler(messages: list[Message]) -> None:
        for message in messages:
            parse(message.body)
        count_up(len(messages))

    def count_up(number: int) -> None:
        nonlocal handled
        if subscribers == 1:
            handled += number
        else:
            with lock:
                handled += number
        if handled >= count:
            done.set()

    chosen: dict[str, Any] = {"batch_handler": batch_handler} if batches else {"handler": handler}
    subscription = f"handle-{time.monotonic_ns()}"
    client.create_subscription(subscription, topic, **options)
    with ExitStack() as stack:
        others = [BrokerClient(host=client.host, port=client.port) for _ in range(subscribers - 1)]
        clients = [client, *map(stack.enter_context, others)]
        began = time.perf_counter()
        joined = [each.subscribe_to_subscription(subscription, **chosen) for each in clients]
        if not done.wait(PATIENCE):
            raise TimeoutError(f"{handled} of {count} messages were handled")
        for each in joined:
            each.unsubscribe()  # what was acked is durable when it returns
        seconds = time.perf_counter() - began
    client.delete_subscription(subscription)
    return seconds


class Redis(WorkBroker):
    """XADD in pipelines to a stream for each partition; XREADGROUP and XACK of 500 at a time."""

    name = "redis"
    depth, count = 1_000, 500

    def __init__(self, server: Server, client: Any) -> None:
        self.server, self.client = server, client
        self._made = 0

    @classmethod
    @contextmanager
    def started(cls, directory: Path) -> Iterator[Redis]:
        try:
            import redis
        except ImportError:
            raise PeerMissing("redis, the Python client, is not installed") from None
        with redis_server(directory) as server, redis.Redis(port=server.port, protocol=2) as client:
            yield cls(server, client)

    @property
    def streams(self) -> list[str]:
        return [f"orders-{self._made}-{partition}" for partition in range(PARTITIONS)]

    def publish(self, bodies: Sequence[bytes], keys: Sequence[str]) -> None:
        if self._made:
            self.client.delete(*self.streams)
        self._made += 1
        streams = self.streams
        for at in range(0, len(bodies), self.depth):
            with self.client.pipeline(transaction=False) as pipeline:
                for body, key in zip(bodies[at : at + self.depth], keys[at : at + self.depth], strict=True):
                    pipeline.xadd(streams[partition_of(key)], {"key": key, "body": body})
                pipeline.execute()

    def handle(self, count: int, parse: Parse, *, batches: bool) -> float:
        streams, handled = self.streams, 0
        for stream in streams:
            self.client.xgroup_create(stream, "group", "0")
        wanted = dict.fromkeys(streams, ">")
        began = time.perf_counter()
        while handled < count:
            found = self.client.xreadgroup("group", "worker", wanted, count=self.count)
            with self.client.pipeline(transaction=False) as pipeline:
                for stream, entries in found:
                    for _, fields in entries:
                        parse(fields[b"body"])
                    pipeline.xack(stream, "group", *[entry for entry, _ in entries])
                    handled += len(entries)
                pipeline.execute()
        seconds = time.perf_counter() - began
        for stream in streams:
            self.client.xgroup_destroy(stream, "group")
        return seconds


class JetStream(WorkBroker):
    """publish_async and a pull consumer, through nats-py."""

    name = "jetstream"
    share = 0.05
    depth, count = 1_000, 500

    def __init__(self, server: Server, runner: asyncio.Runner, connection: Any) -> None:
        self.server, self._runner, self._connection = server, runner, connection
        self._made = 0

    @classmethod
    @contextmanager
    def started(cls, directory: Path) -> Iterator[JetStream]:
        try:
            import nats
        except ImportError:
            raise PeerMissing("nats-py is not installed") from None
        with nats_server(directory) as server, asyncio.Runner() as runner:
            connection = runner.run(nats.connect(f"nats://127.0.0.1:{server.port}"))
            yield cls(server, runner, connection)
            runner.run(connection.close())

    def publish(self, bodies: Sequence[bytes], keys: Sequence[str]) -> None:
        self._runner.run(self._publish(bodies, keys))

    async def _publish(self, bodies: Sequence[bytes], keys: Sequence[str]) -> None:
        stream = self._connection.jetstream(publish_async_max_pending=self.depth)
        if self._made:
            await stream.delete_stream(f"orders-{self._made}")
        self._made += 1
        await stream.add_stream(name=f"orders-{self._made}", subjects=["orders.*"])
        acks = []
        for body, key in zip(bodies, keys, strict=True):
            acks.append(await stream.publish_async(f"orders.{partition_of(key)}", body, headers={"key": key}))
        await asyncio.gather(*acks)

    def handle(self, count: int, parse: Parse, *, batches: bool) -> float:
        return self._runner.run(self._handle(count, parse))

    async def _handle(self, count: int, parse: Parse) -> float:
        stream = self._connection.jetstream()
        pulled = await stream.pull_subscribe("orders.*", f"worker-{time.monotonic_ns()}", f"orders-{self._made}")
        handled, began = 0, time.perf_counter()
        while handled < count:
            for message in await pulled.fetch(self.count, timeout=10):
                parse(message.data)
                await message.ack()
                handled += 1
        await self._connection.flush()
        return time.perf_counter() - began


class RabbitMq(WorkBroker):
    """Quorum queues through pika: persistent messages, confirms, a window of 500."""

    name = "rabbitmq"
    share = 0.02
    count = 500

    def __init__(self, server: Server, connection: Any) -> None:
        self.server, self._connection = server, connection
        self._made = 0

    @classmethod
    @contextmanager
    def started(cls, directory: Path) -> Iterator[RabbitMq]:
        try:
            import pika
        except ImportError:
            raise PeerMissing("pika is not installed") from None
        with rabbitmq_server(directory) as server:
            connection = pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", server.port))
            yield cls(server, connection)
            connection.close()

    @property
    def queues(self) -> list[str]:
        return [f"orders-{self._made}-{partition}" for partition in range(PARTITIONS)]

    def publish(self, bodies: Sequence[bytes], keys: Sequence[str]) -> None:
        import pika

        with self._connection.channel() as channel:
            for queue in self.queues if self._made else ():
                channel.queue_delete(queue)
            self._made += 1
            for queue in self.queues:
                channel.queue_declare(queue, durable=True, arguments={"x-queue-type": "quorum"})
            channel.confirm_delivery()
            persistent = pika.BasicProperties(delivery_mode=2)
            for partition, part in enumerate(by_partition(bodies, keys)):
                for body in part:
                    channel.basic_publish("", self.queues[partition], body, persistent)

    def handle(self, count: int, parse: Parse, *, batches: bool) -> float:
        handled = 0

        def handler(channel: Any, method: Any, properties: Any, body: bytes) -> None:
            nonlocal handled
            parse(body)
            handled += 1
            if handled % self.count == 0 or handled == count:
                channel.basic_ack(method.delivery_tag, multiple=True)
            if handled == count:
                channel.stop_consuming()

        with self._connection.channel() as channel:
            channel.basic_qos(prefetch_count=self.count)
            began = time.perf_counter()
            for queue in self.queues:
                channel.basic_consume(queue, handler)
            channel.start_consuming()
            return time.perf_counter() - began


PEERS: tuple[type[WorkBroker], ...] = (Redis, JetStream, RabbitMq)
