"""What clients do in a world: publish through three doors, handle, consume, transact, administer, look on."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any, TypeVar

import trio

from qb import AsyncBrokerClient, LogDamaged, Message, QBError
from tests.simulation.ledger import BrokenPromise, Ledger, Logs, Stored, Transaction, Where
from tests.simulation.world import FRAMES, HTTP, LINES, World

TOPIC, OTHER = "orders", "audit"
WORKERS, READERS = "workers", "readers"
DEAD_LETTERS = f"{WORKERS}.dead-letters"
POISON = "poison"  # in a body: every handler fails with it
ATTEMPTS = 3
REQUEST_TIMEOUT = 20.0
LONGEST_OUTAGE = 60.0
CALM = 400.0  # seconds after the last disturbance within which everything must be handled

T = TypeVar("T")


class Clients:
    """All clients of one world."""

    def __init__(self, world: World, ledger: Ledger, chance: Random, operations: int) -> None:
        self._world, self._ledger, self._chance = world, ledger, chance
        self._left = operations
        self._numbers = 0
        self.partitions = chance.choice((1, 1, 3))

    def _client(self, name: str) -> AsyncBrokerClient:
        timeouts = {"request_timeout": REQUEST_TIMEOUT, "heartbeat_interval": 5.0, "connect_wait": LONGEST_OUTAGE}
        return AsyncBrokerClient(port=FRAMES, client_id=name, **timeouts)

    def _next_body(self, name: str) -> str:
        self._numbers += 1
        kind = f"-{POISON}" if self._chance.random() < 0.01 else ""
        return f"{name}-{self._numbers}{kind}" + " " * self._chance.choice((0, 10, 300))

    async def prepare(self) -> None:
        """Make topics and a subscription."""
        async with self._client("operator") as client:
            await client.create_topic(TOPIC, self.partitions)
            await client.create_topic(OTHER)
            mode = self._chance.choice(("shared", "key_shared"))
            options = {"mode": mode, "max_in_flight": self._chance.choice((1, 10, 1_000)), "max_deliveries": ATTEMPTS}
            await client.create_subscription(WORKERS, TOPIC, backoff={"initial": 0.1, "cap": 1.0}, **options)

    async def _until_done(self, act: Callable[[], Awaitable[T]]) -> T:
        while True:
            try:
                return await act()
            except LogDamaged as error:
                raise BrokenPromise(str(error)) from error
            except QBError as error:
                self._world.note(f"again: {type(error).__name__}: {error}")
                await trio.sleep(0.2)

    # Publishing

    async def publish(self, name: str) -> None:
        """Publish until all operations are done: one by one, many at once and in transactions."""
        async with self._client(name) as client:
            while self._left > 0:
                act = self._chance.choice((self._publish_one, self._publish_one, self._publish_many, self._transact))
                try:
                    await act(client, name)
                except QBError as error:
                    self._world.note(f"{name}: {type(error).__name__}: {error}")
                    await trio.sleep(0.05)
                if self._chance.random() < 0.3:
                    await trio.sleep(self._chance.random() * 0.2)

    async def _publish_one(self, client: AsyncBrokerClient, name: str) -> None:
        self._left -= 1
        body, topic = self._next_body(name), self._chance.choice((TOPIC, TOPIC, OTHER))
        receipt = await client.publish(topic, self._ledger.attempt(body), key=self._chance.choice((None, "a", "b")))
        self._ledger.ack(body, Where(topic, receipt.partition, receipt.offset))

    async def _publish_many(self, client: AsyncBrokerClient, name: str) -> None:
        bodies = [self._next_body(name) for _ in range(self._chance.randint(2, 30))]
        self._left -= len(bodies)
        offsets = await client.publish_many(TOPIC, [self._ledger.attempt(body) for body in bodies])
        for body, partition, offset in zip(bodies, offsets.partitions, offsets, strict=True):
            self._ledger.ack(body, Where(TOPIC, partition, offset))

    async def _transact(self, client: AsyncBrokerClient, name: str) -> None:
        bodies = [self._next_body(name) for _ in range(self._chance.randint(2, 5))]
        self._left -= len(bodies)
        transaction = self._ledger.transactions[f"{name}-tx-{self._numbers}"] = Transaction(bodies)
        async with client.transaction(f"{name}-tx-{self._numbers}") as wanted:
            for number, body in enumerate(bodies):
                await wanted.publish(TOPIC if number % 2 else OTHER, self._ledger.attempt(body))
        transaction.committed = True
        self._world.note(f"committed {name}-tx-{self._numbers}")

    async def publish_lines(self, name: str) -> None:
        """Publish through the door for JSON lines, which knows no producers: a lost answer leaves it open."""
        await self._publish_plainly(name, LINES, self._publish_line)

    async def publish_http(self, name: str) -> None:
        """Publish over HTTP, which knows no producers either."""
        await self._publish_plainly(name, HTTP, self._post)

    async def _publish_plainly(self, name: str, port: int, publish: Callable[[Any, str], Awaitable[Any]]) -> None:
        """Publish one by one through a door, over connections that may end; `publish` returns the answer."""
        while self._left > 0:
            try:
                stream = await trio.open_tcp_stream("127.0.0.1", port)
                while self._left > 0:
                    self._left -= 1
                    body = self._next_body(name)
                    self._ledger.attempt(body)
                    answer = await publish(stream, body)
                    if "offset" in answer:
                        self._ledger.ack(body, Where(OTHER, answer["partition"], answer["offset"]))
                    else:
                        self._world.note(f"{name}: {answer}")
            except (OSError, trio.BrokenResourceError, ConnectionError) as error:
                self._world.note(f"{name}: {error!r}")
            await trio.sleep(self._chance.random() * 0.2)

    async def _publish_line(self, stream: Any, body: str) -> Any:
        await stream.send_all(json.dumps({"type": "produce", "topic": OTHER, "value": body}).encode() + b"\n")
        answer = json.loads(await self._received(stream, lambda received: received.endswith(b"\n")))
        return answer["data"] if answer["ok"] else answer["error"]

    async def _post(self, stream: Any, body: str) -> Any:
        content = json.dumps({"value": body}).encode()
        head = f"POST /topics/{OTHER}/messages HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        await stream.send_all(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        return json.loads((await self._received(stream, _is_answer)).partition(b"\r\n\r\n")[2])

    async def _received(self, stream: Any, is_whole: Callable[[bytes], bool]) -> bytes:
        """Return what the broker sends. Raises ConnectionError if it ends before that is whole."""
        received = b""
        while not is_whole(received):
            received += (data := await stream.receive_some())
            if not data:
                raise ConnectionError("the broker has closed the connection")
        return received

    # Handling and consuming

    async def subscribe(self, name: str) -> None:
        """Handle messages of the subscription until cancelled; a handler may fail or take its time."""

        async def handle(message: Message) -> None:
            body = bytes(message.body).decode()
            self._world.note(f"{name} handles {body.rstrip()}")
            self._ledger.delivered(body)
            await trio.sleep(self._chance.choice((0.0, 0.0, 0.001, 0.1)))
            if POISON in body or self._chance.random() < 0.02:
                raise ValueError("the handler fails")
            self._ledger.handled[body] = trio.current_time()

        async with self._client(name) as client:
            joined = await self._until_done(lambda: client.subscribe_to_subscription(WORKERS, handle))
            await joined.wait()

    async def consume(self, name: str) -> None:
        """Consume a topic as a member of a group, and commit each message, until cancelled."""
        async with self._client(name) as client:
            while True:
                try:
                    async with client.consumer(READERS, OTHER, auto_commit=False) as consumer:
                        while True:
                            for message in await consumer.poll(timeout=1.0):
                                where = (message.topic, message.partition)
                                self._ledger.try_commit(where, message.offset + 1)
                                await consumer.commit(message)
                                self._ledger.commit(where, message.offset + 1)
                except QBError as error:
                    self._world.note(f"{name}: {type(error).__name__}: {error}")
                    await trio.sleep(0.5)

    # Looking on

    async def administer(self, name: str) -> None:
        """Make and delete topics, pause and resume, describe and list, until cancelled: all beside the others' work."""
        async with self._client(name) as client:
            while True:
                number = self._chance.randrange(3)
                acts: list[Callable[[], Awaitable[object]]] = [
                    lambda: client.create_topic(f"scratch-{number}", self._chance.choice((1, 2))),  # noqa: B023
                    lambda: client.delete_topic(f"scratch-{number}"),  # noqa: B023
                    lambda: client.publish(f"scratch-{number}", b"scratch"),  # noqa: B023
                    lambda: client.pause(WORKERS),
                    lambda: client.describe_subscription(WORKERS),
                    lambda: client.describe_topic(TOPIC),
                    lambda: client.list_groups(),
                ]
                try:
                    await self._chance.choice(acts)()
                    await client.resume(WORKERS)
                except QBError as error:
                    self._world.note(f"{name}: {type(error).__name__}: {error}")
                await trio.sleep(self._chance.random() * 0.3)

    async def observe(self, name: str) -> None:
        """Read one topic and then the other, until cancelled: of a transaction all is seen, or nothing."""
        async with self._client(name) as client:
            while True:
                try:
                    before = await self._fetch_all(client, {OTHER: 1})
                    self._ledger.observe(before, await self._fetch_all(client, {TOPIC: self.partitions}))
                except QBError as error:
                    self._world.note(f"{name}: {type(error).__name__}: {error}")
                await trio.sleep(self._chance.random() * 0.2)

    async def settle(self) -> tuple[Logs, Logs]:
        """Wait until all that is stored has been handled and committed, and return it, and the dead letters."""
        async with self._client("auditor") as client:
            await self._until_done(lambda: client.resume(WORKERS))
            logs = await self._until_done(lambda: self._fetch_all(client))
            calm_until = trio.current_time() + CALM
            dead_letters = await self._dead_letters(client)
            while trio.current_time() < calm_until and not self._ledger.is_settled(logs, dead_letters, TOPIC, OTHER):
                await trio.sleep(1.0)
                dead_letters = await self._dead_letters(client)
            return logs, dead_letters

    async def _dead_letters(self, client: AsyncBrokerClient) -> Logs:
        return await self._until_done(lambda: self._fetch_all(client, {DEAD_LETTERS: 1}))

    async def committed(self) -> dict[tuple[str, int], int]:
        """Return what the broker has stored of the group."""
        async with self._client("auditor") as client:
            offsets = await self._until_done(lambda: client.committed_offsets(READERS))
        return {(each["topic"], each["partition"]): each["offset"] for each in offsets}

    async def _fetch_all(self, client: AsyncBrokerClient, topics: dict[str, int] | None = None) -> Logs:
        logs: Logs = {}
        known = {topic["topic"] for topic in await client.list_topics()}
        for topic, partitions in (topics or {TOPIC: self.partitions, OTHER: 1}).items():
            for partition in range(partitions) if topic in known else ():
                extent = await client.offsets(topic, partition)
                stored: list[Stored] = logs.setdefault((topic, partition), [])
                at = extent.first
                while at < extent.next:
                    for message in await client.fetch(topic, partition, at):
                        stored.append(Stored(Where(topic, partition, message.offset), bytes(message.body).decode()))
                        at = message.offset + 1
        return logs


def _is_answer(received: bytes) -> bool:
    """Say whether an answer over HTTP is whole."""
    head, blank, content = received.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length: (\d+)", head)
    return bool(blank) and length is not None and len(content) >= int(length[1])
