"""Work for a cluster while harm is done to it, and a ledger of everything that was acked.

Publishes, pushes, a group, transactions, and peers that know only types 1 to 9, which are passed on by followers.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from qb import AsyncBrokerClient, BrokerClient, Consumer, QBError
from qb.core.wire.frames import MessageType
from tests.support.peers import Peer
from tests.support.waiting import wait_until

PARTITIONS = 2
PATIENCE = 60.0  # seconds that a request of the load waits: longer than any failover


class Ledger:
    """What was acked, and what was seen."""

    def __init__(self) -> None:
        self.stored: dict[tuple[int, int], bytes] = {}  # by partition and offset: an ack said so
        self.durabilities: set[str] = set()
        self.committed: set[int] = set()  # numbers of transactions
        self.begun: set[int] = set()
        self.pushed: Counter[bytes] = Counter()
        self.consumed: Counter[bytes] = Counter()
        self.by_relay = 0  # acks to basic peers
        self.longest_gap = 0.0  # seconds between two acks of one publisher
        self.faults: list[BaseException] = []


class ClusterLoad:
    """Threads that work on topics of their own until they are stopped."""

    def __init__(self, servers: Sequence[str], name: str) -> None:
        self._servers, self._name = list(servers), name
        self._plain, self._staged = f"{name}-plain", f"{name}-staged"
        self.ledger = Ledger()
        self._stopping, self._ending = threading.Event(), threading.Event()
        self._threads: list[threading.Thread] = []

    def _client(self) -> BrokerClient:
        return BrokerClient(servers=self._servers, request_timeout=PATIENCE, connect_wait=PATIENCE)

    @contextmanager
    def running(self) -> Iterator[Ledger]:
        """Work inside the block; at its end everything that was acked is looked for."""
        with self._client() as client:
            for topic in (self._plain, self._staged):
                client.create_topic(topic, partitions=PARTITIONS)
            client.create_subscription(self._name, self._plain)
        work: list[Callable[[], None]] = [self._publish, self._publish_async, self._publish_basic, self._transact]
        readers: list[Callable[[], None]] = [self._subscribe, self._consume]
        self._threads = [threading.Thread(target=self._guarded, args=(each,), daemon=True) for each in work + readers]
        for thread in self._threads:
            thread.start()
        try:
            wait_until(lambda: self._begun or self.ledger.faults)
            yield self.ledger
        finally:
            self._stopping.set()
            for thread in self._threads[: len(work)]:
                thread.join(PATIENCE)
            self._end_readers()

    @property
    def _begun(self) -> bool:
        ledger = self.ledger
        return bool(ledger.by_relay and ledger.committed and ledger.pushed and ledger.consumed)

    def _end_readers(self) -> None:
        """Let them see everything that was acked, then end them."""
        wanted = set(self.ledger.stored.values())
        try:
            wait_until(lambda: wanted <= {*self.ledger.pushed} and wanted <= {*self.ledger.consumed}, PATIENCE / 2)
        finally:
            self._ending.set()
            for thread in self._threads:
                thread.join(PATIENCE)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # the test raises it
            self.ledger.faults.append(error)

    # The work

    def _publish(self) -> None:
        with self._client() as client:
            last = time.monotonic()
            for number in itertools.count():
                if self._stopping.is_set():
                    return
                body = b"p%d" % number
                receipt = client.publish(self._plain, body, partition=number % PARTITIONS)
                now = time.monotonic()
                self.ledger.longest_gap, last = max(self.ledger.longest_gap, now - last), now
                self.ledger.durabilities.add(receipt.durability)
                self._note(receipt.partition, receipt.offset, body)

    def _publish_async(self) -> None:
        """Publish with the async client, many at a time."""

        async def publish() -> None:
            options = {"request_timeout": PATIENCE, "connect_wait": PATIENCE}
            async with AsyncBrokerClient(servers=self._servers, **options) as client:  # type: ignore[arg-type]
                for number in itertools.count():
                    if self._stopping.is_set():
                        return
                    bodies = [b"a%d-%d" % (number, each) for each in range(10)]
                    found = await client.publish_many(self._plain, bodies, partition=1)
                    for offset, body in zip(found, bodies, strict=True):
                        self._note(1, offset, body)

        asyncio.run(publish())

    def _publish_basic(self) -> None:
        """Publish as a peer that knows only types 1 to 9, through one broker after another."""
        numbers = itertools.count()
        for server in itertools.cycle(self._servers):
            if self._stopping.is_set():
                return
            try:
                with Peer(int(server.rpartition(":")[2]), timeout=2.0) as peer:
                    for number in itertools.islice(numbers, 20):
                        body = b"b%d" % number
                        answer = peer.ask(MessageType.PUBLISH, 1, body, topic=self._plain, partition="0").properties
                        if answer["status"] == "success":
                            self._note(int(answer["partition"]), int(answer["offset"]), body)
                            self.ledger.by_relay += 1
            except OSError:
                self._stopping.wait(0.05)  # that broker is down, or the cell has no owner

    def _note(self, partition: int, offset: int, body: bytes) -> None:
        assert self.ledger.stored.setdefault((partition, offset), body) == body, f"offset {offset} was used twice"

    def _transact(self) -> None:
        with self._client() as client:
            for number in itertools.count():
                if self._stopping.is_set():
                    return
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

    def _subscribe(self) -> None:
        with self._client() as client:
            client.subscribe_to_subscription(self._name, lambda message: self.ledger.pushed.update([message.body]))
            self._ending.wait()

    def _consume(self) -> None:
        options = {"auto_commit_interval_ms": 200, "max_wait_ms": 200, "request_timeout": PATIENCE}
        with Consumer(self._name, self._plain, servers=self._servers, **options) as consumer:  # type: ignore[arg-type]
            while not self._ending.is_set():
                self.ledger.consumed.update([message.body for message in consumer.poll(0.2)])

    # The end

    def check(self) -> None:
        """Look for everything that was acked: it is there once, at its offset, and transactions are whole."""
        ledger = self.ledger
        assert not ledger.faults, ledger.faults
        assert ledger.durabilities == {"replicated"}
        with Peer(self._answering()) as peer:
            for partition in range(PARTITIONS):
                bodies = peer.bodies(self._plain, partition)
                acked = {offset: body for (of, offset), body in ledger.stored.items() if of == partition}
                assert {offset: bodies[offset] for offset in acked} == acked
                again = [body for body, count in Counter(bodies).items() if count > 1 and body[:1] in b"pa"]
                assert again == [], "a publish was stored twice"
                staged = peer.bodies(self._staged, partition)
                assert len(staged) == len(set(staged)), "a transaction was stored twice"
                found = {int(body[1:]) for body in staged}
                assert ledger.committed <= found <= ledger.begun
                if partition == 0:
                    whole = found
                assert found == whole, "a transaction is there in part"

    def _answering(self) -> int:
        """Return the port of a broker that answers a basic peer."""

        def answers(port: int) -> bool:
            try:
                with Peer(port, timeout=2.0) as peer:
                    peer.call("list_topics")
            except (OSError, AssertionError):
                return False
            return True

        ports = [int(server.rpartition(":")[2]) for server in self._servers]
        found: list[int] = []
        wait_until(lambda: found or found.extend(filter(answers, ports)) or found)
        return found[0]
