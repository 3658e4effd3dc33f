"""Other brokers as publishers see them, each driven the way its own client does best."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.harness import PeerMissing, nats_server, redis_server, timed


class ComparedBroker(ABC):
    """A broker that syncs before it answers."""

    name: ClassVar[str]
    depths: ClassVar[tuple[int, ...]]  # how many messages in flight to try
    count: ClassVar[int]  # how many messages make a steady round

    @classmethod
    @abstractmethod
    def started(cls, directory: Path) -> AbstractContextManager[ComparedBroker]:
        """Return the peer on a server of its own. Raises PeerMissing when entered."""

    @abstractmethod
    def publish(self, body: bytes, count: int, depth: int) -> None:
        """Publish `count` messages with `depth` in flight; return when each of them is acked."""


def best_depth(peer: ComparedBroker, body: bytes) -> int:
    """Return the depth at which the peer is fastest."""
    return max(peer.depths, key=lambda depth: rate(peer, body, max(peer.count // 4, 2 * depth), depth))


def rate(peer: ComparedBroker, body: bytes, count: int, depth: int) -> float:
    """Return acked messages a second."""
    return count / timed(lambda: peer.publish(body, count, depth))


class RedisStreams(ComparedBroker):
    """XADD in pipelines through redis-py."""

    name = "redis-streams"
    depths = (100, 500, 2000, 8000)
    count = 100_000

    def __init__(self, client: Any) -> None:
        self._client = client

    @classmethod
    @contextmanager
    def started(cls, directory: Path) -> Iterator[RedisStreams]:
        try:
            import redis
        except ImportError:
            raise PeerMissing("redis, the Python client, is not installed") from None
        with redis_server(directory) as server, redis.Redis(port=server.port) as client:
            yield cls(client)

    def publish(self, body: bytes, count: int, depth: int) -> None:
        for _ in range(count // depth):
            with self._client.pipeline(transaction=False) as pipeline:
                for _ in range(depth):
                    pipeline.xadd("bench", {"body": body})
                pipeline.execute()

    def publish_one(self, body: bytes) -> None:
        """Publish and wait for the answer."""
        self._client.xadd("bench", {"body": body})


class JetStream(ComparedBroker):
    """publish_async through nats-py, acks awaited together."""

    name = "jetstream"
    depths = (250, 1000, 4000)
    count = 10_000

    def __init__(self, runner: asyncio.Runner, connection: Any) -> None:
        self._runner, self._connection = runner, connection

    @classmethod
    @contextmanager
    def started(cls, directory: Path) -> Iterator[JetStream]:
        try:
            import nats
        except ImportError:
            raise PeerMissing("nats-py is not installed") from None
        with nats_server(directory) as server, asyncio.Runner() as runner:
            connection = runner.run(nats.connect(f"nats://127.0.0.1:{server.port}"))
            runner.run(connection.jetstream().add_stream(name="bench", subjects=["bench"]))
            yield cls(runner, connection)
            runner.run(connection.close())

    def publish(self, body: bytes, count: int, depth: int) -> None:
        self._runner.run(self._publish(body, count, depth))

    async def _publish(self, body: bytes, count: int, depth: int) -> None:
        stream = self._connection.jetstream(publish_async_max_pending=depth)
        acks = [await stream.publish_async("bench", body) for _ in range(count)]
        await asyncio.gather(*acks)
