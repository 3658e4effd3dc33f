"""What does the async client make of an event loop, beside nats-py and redis.asyncio?

One client in one process publishes orders, JSON of different lengths and the same for all sides, pipelined
(publish_many; publish_async; a pipeline of XADD), then from one and from 32 coroutines that each wait for their ack. It
is then pushed the backlog to a handler that counts (NATS: also pulled, acked portion by portion; Redis: XREADGROUP, and
XACK of a portion). Every peer publishes and reads at the depth that is best for it, of those that are tried before the
rounds. All brokers sync before they answer. The sides take turns, round by round; the processor time is the client's.

Last, in the blocking client: how quick is send() of a producer with a linger of 5 ms, beside publish_many?
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from functools import partial
from typing import Any, ClassVar, NamedTuple

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
    timed,
)
from benchmarks.work.orders import orders
from qb import AsyncBrokerClient, BrokerClient, Message

NAME = "async_clients"
BODIES = orders(200_000)[0]
SIZE = sum(map(len, BODIES)) // len(BODIES)
COROUTINES = 32
WINDOW = 10_000
LOOP_TARGET = 0.8  # of trio's rate, on asyncio
COROUTINES_TARGET = 10  # times the rate of one
SEND_TARGET = 0.8  # of publish_many
WORKS = ("pipelined", "1-coroutine", f"{COROUTINES}-coroutines", "push-to-handler")


class Figure(NamedTuple):
    """One work in one round."""

    rate: float
    client_cpu_us: float  # for a message


class AsyncSide(ABC):
    """A connected client, with a topic of its own."""

    counts: tuple[int, int, int, int]  # messages that make a steady round of each of the WORKS
    depths: ClassVar[tuple[int, ...]] = (0,)  # in flight when it pipelines, to choose from; 0: the client chooses
    portions: ClassVar[tuple[int, ...]] = (0,)  # messages that are read at once, to choose from; 0: they are pushed

    @abstractmethod
    async def publish_all(self, count: int, depth: int) -> None:
        """Publish so many, so many of them in flight; return when each is acked."""

    @abstractmethod
    async def publish(self) -> None:
        """Publish one, and return when it is acked."""

    @abstractmethod
    async def handle_all(self, count: int, portion: int) -> None:
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

    counts = 200_000, 400, 6_400, 200_000

    def __init__(self, client: AsyncBrokerClient, topic: str) -> None:
        self._client, self._topic = client, topic

    @classmethod
    @asynccontextmanager
    async def opened(cls, port: int, topic: str) -> AsyncIterator[QBSide]:
        async with AsyncBrokerClient(port=port) as client:
            await client.create_topic(topic)
            yield cls(client, topic)

    async def publish_all(self, count: int, depth: int) -> None:
        await self._client.publish_many(self._topic, BODIES[:count])

    async def publish(self) -> None:
        await self._client.publish(self._topic, BODIES[0])

    async def handle_all(self, count: int, portion: int) -> None:
        countdown = Countdown(count)

        async def handle(message: Message) -> None:
            await countdown.handle(message)

        await self._client.create_subscription(self._topic, self._topic, max_in_flight=WINDOW)
        async with await self._client.subscribe_to_subscription(self._topic, handle):
            await countdown.done.wait()


class NatsSide(AsyncSide):
    """nats-py with JetStream."""

    counts = 10_000, 400, 3_200, 10_000
    depths = 256, 1_000, 4_000
    portions = 0, 500, 2_000

    def __init__(self, connection: Any, topic: str) -> None:
        self._topic, self._connection, self._stream = topic, connection, connection.jetstream()

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

    async def publish_all(self, count: int, depth: int) -> None:
        stream = self._connection.jetstream(publish_async_max_pending=depth)
        await asyncio.gather(*[await stream.publish_async(self._topic, body) for body in BODIES[:count]])

    async def publish(self) -> None:
        await self._stream.publish(self._topic, BODIES[0])

    async def handle_all(self, count: int, portion: int) -> None:
        from nats.js.api import AckPolicy, ConsumerConfig

        countdown = Countdown(count)
        if portion:
            config = ConsumerConfig(max_ack_pending=WINDOW, ack_policy=AckPolicy.ALL)
            puller = await self._stream.pull_subscribe(self._topic, durable=f"pulls-{portion}", config=config)
            while not countdown.done.is_set():
                messages = await puller.fetch(portion)
                for message in messages:
                    await countdown.handle(message)
                await messages[-1].ack()  # all before it, too
            return
        config = ConsumerConfig(max_ack_pending=WINDOW)
        joined = await self._stream.subscribe(self._topic, cb=countdown.handle, config=config)  # acks by itself
        await countdown.done.wait()
        await joined.unsubscribe()


class RedisSide(AsyncSide):
    """redis.asyncio with Streams."""

    counts = 50_000, 400, 6_400, 50_000
    depths = 256, 1_000, 4_000
    portions = 500, 2_000, 8_000

    def __init__(self, client: Any, topic: str) -> None:
        self._client, self._topic = client, topic

    @classmethod
    @asynccontextmanager
    async def opened(cls, port: int, topic: str) -> AsyncIterator[RedisSide]:
        from redis.asyncio import Redis

        async with Redis(port=port) as client:
            yield cls(client, topic)

    async def publish_all(self, count: int, depth: int) -> None:
        for start in range(0, count, depth):
            async with self._client.pipeline(transaction=False) as pipeline:
                for body in BODIES[start : min(start + depth, count)]:
                    pipeline.xadd(self._topic, {"body": body})
                await pipeline.execute()

    async def publish(self) -> None:
        await self._client.xadd(self._topic, {"body": BODIES[0]})

    async def handle_all(self, count: int, portion: int) -> None:
        countdown, group = Countdown(count), f"group-{portion}"
        await self._client.xgroup_create(self._topic, group, "0")
        while not countdown.done.is_set():
            ((_, entries),) = await self._client.xreadgroup(group, "me", {self._topic: ">"}, count=portion)
            for _, entry in entries:
                await countdown.handle(entry)
            await self._client.xack(self._topic, group, *[number for number, _ in entries])


class Setting(NamedTuple):
    """What is best for a side."""

    depth: int
    portion: int


Main = Callable[[], Awaitable[Any]]
Runner = Callable[[Main], Any]
Opened = Callable[[str], AbstractAsyncContextManager[AsyncSide]]


def on_trio(main: Main) -> Any:
    """Run a round on trio."""
    return trio.run(main)


def on_asyncio(main: Main, factory: Callable[[], asyncio.AbstractEventLoop] | None = None) -> Any:
    """Run a round on asyncio, or on a loop of its kind."""

    async def run() -> Any:
        return await main()

    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(run())


def loops() -> dict[str, Runner]:
    """Return the event loops that are installed."""
    found: dict[str, Runner] = {"trio": on_trio, "asyncio": on_asyncio}
    try:
        import uvloop
    except ImportError:
        return found
    return found | {"uvloop": partial(on_asyncio, factory=uvloop.new_event_loop)}


def run(options: BenchmarkOptions) -> None:
    """Let all sides take turns, then print each and its ratio."""
    with scratch(options) as directory, ExitStack() as stack:
        sides: dict[str, tuple[Opened, Runner]] = {}
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
        best = {
            side: runner(partial(_best, opened, f"best-{_plain(side)}", options))
            for side, (opened, runner) in sides.items()
        }
        figures: dict[str, list[dict[str, Figure]]] = {side: [] for side in sides}
        for number in range(options.rounds):
            for side, (opened, runner) in sides.items():
                topic = f"round-{_plain(side)}-{number}"
                figures[side].append(runner(partial(one_round, opened, topic, best[side], options)))
        _report(figures, best)
        _send_beside_publish_many(broker.port, options)


def _plain(side: str) -> str:
    return side.replace(".", "-")


async def _best(opened: Opened, topic: str, options: BenchmarkOptions) -> Setting:
    """Try each depth and each portion on a tenth of a round, and return what was quickest."""
    depths, portions = dict[int, float](), dict[int, float]()
    async with opened(topic) as side:
        if len(side.depths) == len(side.portions) == 1:
            return Setting(side.depths[0], side.portions[0])
        count = options.scaled(side.counts[0]) // 10
        for depth in side.depths:
            depths[depth] = (await _measured(count, partial(side.publish_all, count, depth))).rate
        for portion in side.portions:
            portions[portion] = (await _measured(count, partial(side.handle_all, count, portion))).rate
    return Setting(max(depths, key=depths.__getitem__), max(portions, key=portions.__getitem__))


async def one_round(opened: Opened, topic: str, best: Setting, options: BenchmarkOptions) -> dict[str, Figure]:
    """Connect a side, and measure each of the WORKS."""
    async with opened(topic) as side:
        pipelined, one, each, pushed = (options.scaled(count) for count in side.counts)
        await side.publish()
        return {
            WORKS[0]: await _measured(pipelined, partial(side.publish_all, pipelined, best.depth)),
            WORKS[1]: await _measured(one, partial(_publish_from_all, side, one, 1)),
            WORKS[2]: await _measured(each // COROUTINES * COROUTINES, partial(_publish_from_all, side, each)),
            WORKS[3]: await _measured(pushed, partial(side.handle_all, pushed, best.portion)),
        }


async def _publish_from_all(side: AsyncSide, count: int, coroutines: int = COROUTINES) -> None:
    async def publish() -> None:
        for _ in range(count // coroutines):
            await side.publish()

    async with anyio.create_task_group() as tasks:
        for _ in range(coroutines):
            tasks.start_soon(publish)


def _send_beside_publish_many(port: int, options: BenchmarkOptions) -> None:
    """Let send() of a producer and publish_many take turns on the same bodies, from one thread."""
    many, sent, bodies = list[float](), list[float](), BODIES[: options.scaled(len(BODIES))]
    with BrokerClient(port=port) as client:
        client.create_topic("sent")
        for _ in range(options.rounds):
            many.append(len(bodies) / timed(partial(client.publish_many, "sent", bodies)))
            sent.append(len(bodies) / timed(partial(_send_all, client, bodies)))
    report_rate(NAME, case_name("qb-blocking", SIZE, "publish_many"), SIZE, many)
    report_rate(NAME, case_name("qb-blocking", SIZE, "send-linger-5ms"), SIZE, sent)
    ratio = median_ratio(sent, many)
    judge(NAME, f"send() at least {SEND_TARGET} of publish_many", ratio, ratio >= SEND_TARGET)


def _send_all(client: BrokerClient, bodies: Sequence[bytes]) -> None:
    with client.producer("sent", linger_ms=5) as producer:
        handles = [producer.send(body) for body in bodies]
        producer.flush()
    assert all(handle.done() for handle in handles[-10:])


async def _measured(count: int, work: Callable[[], Awaitable[None]]) -> Figure:
    started, used = time.perf_counter(), time.process_time()
    await work()
    return Figure(count / (time.perf_counter() - started), (time.process_time() - used) / count * 1e6)


def _report(figures: dict[str, list[dict[str, Figure]]], best: dict[str, Setting]) -> None:
    for work in WORKS:
        rates = {side: [each[work].rate for each in rounds] for side, rounds in figures.items()}
        for side, rounds in figures.items():
            cpu = significant(sorted(each[work].client_cpu_us for each in rounds)[len(rounds) // 2])
            report_rate(NAME, case_name(side, SIZE, work), SIZE, rates[side], client_cpu_us=cpu, **best[side]._asdict())
        ratio = median_ratio(rates["qb-asyncio"], rates["qb-trio"])
        judge(NAME, f"{work}: asyncio at least {LOOP_TARGET} of trio", ratio, ratio >= LOOP_TARGET)
        for side, theirs in rates.items():
            if not side.startswith("qb-"):
                ours = f"qb-{side.rpartition('-')[2]}"
                ratio = median_ratio(rates[ours], theirs)
                judge(NAME, f"{work}: {ours} faster than {side}", ratio, ratio > 1)
    for side, rounds in figures.items():
        if side.startswith("qb-"):
            ratio = median_ratio([each[WORKS[2]].rate for each in rounds], [each[WORKS[1]].rate for each in rounds])
            text = f"{side}: {COROUTINES} coroutines at least {COROUTINES_TARGET} times one"
            judge(NAME, text, ratio, ratio >= COROUTINES_TARGET)
