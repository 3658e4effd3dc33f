"""Work for a cluster while harm is done to it, and a ledger of everything that was acked.

Publishes, pushes, a group, transactions, JSON lines, peers that know only types 1 to 9, which are passed on by
followers, and readers that ask every broker for what has just been acked.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import msgspec

from qb import AsyncBrokerClient, BrokerClient, Consumer, QBError
from qb.core.wire.addresses import parse_address
from qb.core.wire.frames import MessageType
from tests.support.cluster_ledger import PARTITIONS, Findings, Ledger
from tests.support.line_peers import converse
from tests.support.peers import Peer, stored_messages
from tests.support.waiting import wait_until

PATIENCE = 60.0  # seconds that a request of the load waits: longer than any failover
BRIEF = 2.0  # seconds that a peer waits that has no client: then it asks another broker


class ClusterLoad:
    """Threads that work on topics of their own until they are stopped."""

    def __init__(
        self,
        servers: Sequence[str],
        name: str,
        lines: Sequence[str],
        *,
        patience: float = PATIENCE,
        pause: float = 0.0,
    ) -> None:
        """`lines` are the doors for JSON lines; `pause`: seconds between two pieces of work of each thread."""
        self._servers, self._name, self._lines = list(servers), name, list(lines)
        self._plain, self._staged, self._group = f"{name}-plain", f"{name}-staged", f"{name}-tool"
        self._patience, self._pause = patience, pause
        self.ledger = Ledger()
        self._stopping, self._ending = threading.Event(), threading.Event()
        self._threads: list[threading.Thread] = []

    def _client(self) -> BrokerClient:
        return BrokerClient(servers=self._servers, request_timeout=self._patience, connect_wait=self._patience)

    @contextmanager
    def running(self) -> Iterator[Ledger]:
        """Work inside the block; at its end everything that was acked is looked for."""
        with self._client() as client:
            for topic in (self._plain, self._staged):
                client.create_topic(topic, partitions=PARTITIONS)
            client.create_subscription(self._name, self._plain)
        work: list[Callable[[], None]] = [self._publish, self._publish_async, self._publish_basic, self._publish_lines]
        work += [self._transact, self._commit_offsets, *(partial(self._read, server) for server in self._servers)]
        readers: list[Callable[[], None]] = [self._subscribe, self._consume]
        self._threads = [threading.Thread(target=self._guarded, args=(each,), daemon=True) for each in work + readers]
        for thread in self._threads:
            thread.start()
        try:
            wait_until(lambda: self.ledger.has_begun or self.ledger.faults, self._patience)
            yield self.ledger
        finally:
            self._stopping.set()
            for thread in self._threads[: len(work)]:
                thread.join(self._patience)
            self._end_readers()

    def _end_readers(self) -> None:
        """Let them see everything that was acked, then end them."""
        wanted, pushed, consumed = set(self.ledger.stored.values()), self.ledger.pushed, self.ledger.consumed
        try:
            wait_until(lambda: wanted <= pushed.keys() and wanted <= consumed.keys(), self._patience)
        finally:
            self._ending.set()
            for thread in self._threads:
                thread.join(self._patience)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # the test raises it
            self.ledger.faults.append(error)

    def _until_stopped(self) -> Iterator[int]:
        """Count until the load is stopped."""
        for number in itertools.count():
            if self._stopping.wait(self._pause) if self._pause else self._stopping.is_set():
                return
            yield number

    # The work

    def _publish(self) -> None:
        with self._client() as client:
            last = time.monotonic()
            for number in self._until_stopped():
                body = b"p%d" % number
                receipt = client.publish(self._plain, body, partition=number % PARTITIONS)
                now = time.monotonic()
                self.ledger.longest_gap, last = max(self.ledger.longest_gap, now - last), now
                self.ledger.durabilities.add(receipt.durability)
                self.ledger.note(receipt.partition, receipt.offset, body)

    def _publish_async(self) -> None:
        """Publish with the async client, many at a time."""

        async def publish() -> None:
            options = {"request_timeout": self._patience, "connect_wait": self._patience}
            async with AsyncBrokerClient(servers=self._servers, **options) as client:  # type: ignore[arg-type]
                for number in self._until_stopped():
                    bodies = [b"a%d-%d" % (number, each) for each in range(10)]
                    found = await client.publish_many(self._plain, bodies, partition=1)
                    for offset, body in zip(found, bodies, strict=True):
                        self.ledger.note(1, offset, body)

        asyncio.run(publish())

    def _publish_basic(self) -> None:
        """Publish as a peer that knows only types 1 to 9, through one broker after another."""
        numbers = self._until_stopped()
        for server in itertools.cycle(self._servers):
            if self._stopping.is_set():
                return
            try:
                with _peer(server) as peer:
                    for number in itertools.islice(numbers, 20):
                        body = b"b%d" % number
                        answer = peer.ask(MessageType.PUBLISH, 1, body, topic=self._plain, partition="0").properties
                        if answer["status"] == "success":
                            self.ledger.note(int(answer["partition"]), int(answer["offset"]), body)
                            self.ledger.by_relay += 1
            except OSError:
                self._stopping.wait(0.05)  # that broker is down, or the cell has no owner

    def _publish_lines(self) -> None:
        """Publish some JSON lines at a time, through one broker after another."""
        for number, door in zip(self._until_stopped(), itertools.cycle(self._lines)):
            bodies = [f"j{number}-{each}" for each in range(5)]
            asked = [{"type": "produce", "topic": self._plain, "value": body, "partition": 0} for body in bodies]
            address = parse_address(door)
            try:
                said = converse(address.port, b"".join(map(_line, asked)), BRIEF, address.host)
            except OSError:
                self._stopping.wait(0.05)
                continue
            for body, line in zip(bodies, said.split(b"\n")[:-1]):  # noqa: B905 (those that were answered)
                answer = json.loads(line)
                if answer["ok"]:
                    self.ledger.note(answer["data"]["partition"], answer["data"]["offset"], body.encode())
                    self.ledger.by_lines += 1

    def _transact(self) -> None:
        with self._client() as client:
            for number in self._until_stopped():
                self.ledger.begun.add(number)
                while not self._commit(client, number):
                    if self._stopping.is_set():
                        return
                self.ledger.committed.add(number)

    def _commit(self, client: BrokerClient, number: int) -> bool:
        """Commit one transaction; False if it is not known whether that was done: the same one may be sent again."""
        try:
            with client.transaction(self._name, number) as transaction:
                for partition in range(PARTITIONS):
                    transaction.publish(self._staged, b"t%d" % number, partition=partition)
        except QBError:
            self._stopping.wait(0.05)
            return False
        return True

    def _commit_offsets(self) -> None:
        """Commit what has been acked as the offset of a group."""
        with self._client() as client:
            for _ in self._until_stopped():
                offset = self.ledger.newest.get(0, 0)
                try:
                    client.commit_offsets(self._group, [(self._plain, 0, offset)])
                except QBError:
                    self._stopping.wait(0.05)
                else:
                    self.ledger.offset = offset

    def _read(self, server: str) -> None:
        """Ask one broker, on one connection for as long as it lasts, for what was acked before."""
        while not self._stopping.is_set():
            try:
                with _peer(server) as peer:
                    for number in self._until_stopped():
                        consistent = number % 4 > 1
                        self._read_message(peer, number % PARTITIONS, consistent)
                        self._read_offset(peer, consistent)
                        self._stopping.wait(0.02)
            except OSError:
                self._stopping.wait(0.05)

    def _read_message(self, peer: Peer, partition: int, consistent: bool) -> None:
        acked = self.ledger.newest.get(partition)
        if acked is not None:
            wanted = {"max_messages": "1"} | ({"consistent": "1"} if consistent else {})
            answer = peer.fetch(self._plain, acked, partition, **wanted)
            found = {frame.sequence_number: frame.body for frame in stored_messages(answer.body)}
            self.ledger.check_read(partition, acked, answer.properties.get("code", ""), found, consistent=consistent)

    def _read_offset(self, peer: Peer, consistent: bool) -> None:
        acked = self.ledger.offset
        wanted = {"group": self._group, "topic": self._plain} | ({"consistent": True} if consistent else {})
        question = msgspec.json.encode(wanted)
        answer = peer.ask(MessageType.REQUEST, 2, question, method="committed_offsets")
        if acked and answer.properties["status"] == "success":
            found = [each["offset"] for each in msgspec.json.decode(answer.body) if each["partition"] == 0]
            self.ledger.check_committed(acked, max(found, default=0), consistent=consistent)

    def _subscribe(self) -> None:
        with self._client() as client:
            client.subscribe_to_subscription(self._name, lambda message: self.ledger.pushed.update([message.body]))
            self._ending.wait()

    def _consume(self) -> None:
        options = {"auto_commit_interval_ms": 200, "max_wait_ms": 200, "request_timeout": self._patience}
        with Consumer(self._name, self._plain, servers=self._servers, **options) as consumer:  # type: ignore[arg-type]
            while not self._ending.is_set():
                self.ledger.consumed.update([message.body for message in consumer.poll(0.2)])

    # The end

    def check(self) -> None:
        """Look for everything that was acked: it is there once, at its offset, and transactions are whole."""
        assert not self.ledger.faults, self.ledger.faults
        assert self.ledger.durabilities == {"replicated"}
        assert not any(self.judge()), self.judge()

    def judge(self) -> Findings:
        """Read both topics, and compare them with the ledger."""
        with self._answering() as peer:
            plain, staged = (
                [peer.bodies(topic, partition) for partition in range(PARTITIONS)]
                for topic in (self._plain, self._staged)
            )
        return self.ledger.judge(plain, staged)

    def delete(self) -> None:
        """Delete the topics, so that the journal can be trimmed."""
        with self._client() as client:
            for topic in (self._plain, self._staged):
                client.delete_topic(topic)

    def _answering(self) -> Peer:
        """Return a connection to a broker that answers a basic peer."""
        found: list[Peer] = []

        def answers(server: str) -> bool:
            try:
                peer = _peer(server)
                peer.call("list_topics")
            except (OSError, AssertionError):
                return False
            peer.socket.settimeout(20.0)
            found.append(peer)
            return True

        wait_until(lambda: any(map(answers, self._servers)))
        return found[0]


def _peer(server: str) -> Peer:
    """Return a connection to a broker. Raises OSError."""
    address = parse_address(server)
    return Peer(address.port, BRIEF, address.host)


def _line(request: dict[str, object]) -> bytes:
    return json.dumps(request).encode() + b"\n"
