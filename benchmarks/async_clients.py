"""What does the async client make of an event loop, beside nats-py and redis.asyncio?

One client in one process publishes 100-byte bodies pipelined (publish_many; publish_async; a pipeline of XADD), then
from 32 coroutines that each wait for their ack, and is then pushed the backlog to a handler that counts (Redis:
XREADGROUP of 500, XACK). All brokers sync before they answer. The sides take turns, round by round; the processor time
is the client's.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from functools import partial
from typing import Any, NamedTuple

import anyio
import trio

from benchmarks.harness import (
    BenchmarkOptions,
    PeerMissing,
    case_name,
    judge,
    median_ratio,
    nats_server,
    qb_server,
    redis_server,
    report_rate,
    scratch,
    significant,
    skipped,
)
from qb import AsyncBrokerClient, Message

NAME = "async_clients"
SIZE = 100
BODY = b"x" * SIZE
COROUTINES = 32
WINDOW = 10_000
DEPTH = 1_000  # publishes that a peer has in flight when it pipelines
REDIS_COUNT = 500
LOOP_TARGET = 0.8  # of trio's rate, on asyncio
WORKS = ("pipelined", f"{COROUTINES}-coroutines", "push-to-handler")


class Figure(NamedTuple):
    """One work in one round."""

    rate: float
    client_cpu_us: float  # for a message


class AsyncSide(ABC):
    """A connected client, with a topic of its own."""

    counts: tuple[int, int, int]  # messages that make a steady round of each of the WORKS

    @abstractmethod
    async def publish_all(self, count: int) -> None:
        """Publish so many, as many in flight as suits the client; return when each is acked."""

    @abstractmethod
    async def publish(self) -> None:
        """Publish one, and return when it is acked."""

    @abstractmethod
    async def handle_all(self, count: int) -> None:
        """Return when a handler was called with each of so many messages of the backlog."""


class Countdown:
    """Counts what is handled, and says when it is enough."""

    def __init__(self, count: int) -> None:
        self._left, self.done = count, anyio.Event()

    async def handle(self, message: object) -> None:
        """Count one."""
        self._left -= 1
        if not self._left:
            self.done.set()


class QBSide(AsyncSide):
    """AsyncBrokerClient."""

    counts = 200_000, 6_400, 200_000

    def __init__(self, client: AsyncBrokerClient, topic: str) -> None:
        self._client, self._topic = client, topic

    @classmethod
    @asynccontextmanager
    async def opened(cls, port: int, topic: str) -> AsyncIterator[QBSide]:
        async with AsyncBrokerClient(port=port) as client:
            await client.create_topic(topic)
            yield cls(client, topic)

    async def publish_all(self, count: int) -> None:
        await self._client.publish_many(self._topic, [BODY] * count)

    async def publish(self) -> None:
        await self._client.publish(self._topic, BODY)

    async def handle_all(self, count: int) -> None:
        countdown = Countdown(count)

        async def handle(message: Message) -> None:
            await countdown.handle(message)

        await self._client.create_subscription(self._topic, self._topic, max_in_flight=WINDOW)
        async with await self._client.subscribe_to_subscription(self._topic, handle):
            await countdown.done.wait()


class NatsSide(AsyncSide):
    """nats-py with JetStream."""

    counts = 10_000, 3_200, 10_000

    def __init__(self, connection: Any, topic: str) -> None:
        self._topic, self._stream = topic, connection.jetstream(publish_async_max_pending=DEPTH)

    @classmethod
    @asynccontextmanager
    async def opened(cls, port: int, topic: str) -> AsyncIterator[NatsSide]:
        import nats

        connection = await nats.connect(f"nats://127.0.0.1:{port}")
        try:
            await connection.jetstream().add_stream(name=topic, subjects=[topic])
            yield cls(connection, topic)
        finally:
            await connection.close()

    async def publish_all(self, count: int) -> None:
        await asyncio.gather(*[await self._stream.publish_async(self._topic, BODY) for _ in range(count)])

    async def publish(self) -> None:
        await self._stream.publish(self._topic, BODY)

    async def handle_all(self, count: int) -> None:
        from nats.js.api import ConsumerConfig

        countdown = Countdown(count)
        config = ConsumerConfig(max_ack_pending=WINDOW)
        joined = await self._stream.subscribe(self._topic, cb=countdown.handle, config=config)  # acks by itself
        await countdown.done.wait()
        await joined.unsubscribe()


class RedisSide(AsyncSide):
    """redis.asyncio with Streams."""

    counts = 50_000, 6_400, 50_000

    def __init__(self, client: Any, topic: str) -> None:
        self._client, self._topic = client, topic

    @classmethod
    @asynccontextmanager
    async def opened(cls, port: int, topic: str) -> AsyncIterator[RedisSide]:
        from redis.asyncio import Redis

        async with Redis(port=port) as client:
            yield cls(client, topic)

    async def publish_all(self, count: int) -> None:
        for start in range(0, count, DEPTH):
            async with self._client.pipeline(transaction=False) as pipeline:
                for _ in range(min(DEPTH, count - start)):
                    pipeline.xadd(self._topic, {"body": BODY})
                await pipeline.execute()

    async def publish(self) -> None:
        await self._client.xadd(self._topic, {"body": BODY})

    async def handle_all(self, count: int) -> None:
        countdown = Countdown(count)
        await self._client.xgroup_create(self._topic, "group", "0")
        while not countdown.done.is_set():
            ((_, entries),) = await self._client.xreadgroup("group", "me", {self._topic: ">"}, count=REDIS_COUNT)
            for _, entry in entries:
                await countdown.handle(entry)
            await self._client.xack(self._topic, "group", *[number for number, _ in entries])


Main = Callable[[], Awaitable[dict[str, Figure]]]
Opened = Callable[[str], AbstractAsyncContextManager[AsyncSide]]


def on_trio(main: Main) -> dict[str, Figure]:
    """Run a round on trio."""
    return trio.run(main)


def on_asyncio(main: Main, factory: Callable[[], asyncio.AbstractEventLoop] | None = None) -> dict[str, Figure]:
    """Run a round on asyncio, or on a loop of its kind."""

    async def run() -> dict[str, Figure]:
        return await main()

    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(run())


def loops() -> dict[str, Callable[[Main], dict[str, Figure]]]:
    """Return the event loops that are installed."""
    found: dict[str, Callable[[Main], dict[str, Figure]]] = {"trio": on_trio, "asyncio": on_asyncio}
    try:
        import uvloop
    except ImportError:
        return found
    return found | {"uvloop": partial(on_asyncio, factory=uvloop.new_event_loop)}


def run(options: BenchmarkOptions) -> None:
    """Let all sides take turns, then print each and its ratio."""
    with scratch(options) as directory, ExitStack() as stack:
        sides: dict[str, tuple[Opened, Callable[[Main], dict[str, Figure]]]] = {}
        broker = stack.enter_context(qb_server(directory / "qb"))
        for loop, runner in loops().items():
            sides[f"qb-{loop}"] = partial(QBSide.opened, broker.port), runner
        for name, server, kind in (("nats-py", nats_server, NatsSide), ("redis.asyncio", redis_server, RedisSide)):
            try:
                peer = stack.enter_context(server(directory))
            except PeerMissing as missing:
                skipped(NAME, case_name(name, SIZE, "all"), str(missing))
                continue
            for loop, runner in loops().items():
                if loop != "trio":
                    sides[f"{name}-{loop}"] = partial(kind.opened, peer.port), runner
        figures: dict[str, list[dict[str, Figure]]] = {side: [] for side in sides}
        for number in range(options.rounds):
            for side, (opened, runner) in sides.items():
                figures[side].append(
                    runner(partial(_round, opened, f"round-{side.replace('.', '-')}-{number}", options))
                )
    _report(figures)


async def _round(opened: Opened, topic: str, options: BenchmarkOptions) -> dict[str, Figure]:
    async with opened(topic) as side:
        pipelined, each, pushed = (options.scaled(count) for count in side.counts)
        await side.publish()
        return {
            WORKS[0]: await _measured(pipelined, partial(side.publish_all, pipelined)),
            WORKS[1]: await _measured(each // COROUTINES * COROUTINES, partial(_publish_from_all, side, each)),
            WORKS[2]: await _measured(pushed, partial(side.handle_all, pushed)),
        }


async def _publish_from_all(side: AsyncSide, count: int) -> None:
    async def publish() -> None:
        for _ in range(count // COROUTINES):
            await side.publish()

    async with anyio.create_task_group() as tasks:
        for _ in range(COROUTINES):
            tasks.start_soon(publish)


async def _measured(count: int, work: Callable[[], Awaitable[None]]) -> Figure:
    started, used = time.perf_counter(), time.process_time()
    await work()
    return Figure(count / (time.perf_counter() - started), (time.process_time() - used) / count * 1e6)


def _report(figures: dict[str, list[dict[str, Figure]]]) -> None:
    for work in WORKS:
        rates = {side: [each[work].rate for each in rounds] for side, rounds in figures.items()}
        for side, rounds in figures.items():
            cpu = significant(sorted(each[work].client_cpu_us for each in rounds)[len(rounds) // 2])
            report_rate(NAME, case_name(side, SIZE, work), SIZE, rates[side], client_cpu_us=cpu)
        ratio = median_ratio(rates["qb-asyncio"], rates["qb-trio"])
        judge(NAME, f"{work}: asyncio at least {LOOP_TARGET} of trio", ratio, ratio >= LOOP_TARGET)
        for side, theirs in rates.items():
            if not side.startswith("qb-"):
                ours = f"qb-{side.rpartition('-')[2]}"
                ratio = median_ratio(rates[ours], theirs)
                judge(NAME, f"{work}: {ours} faster than {side}", ratio, ratio > 1)
