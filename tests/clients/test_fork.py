"""Clients that were used before os.fork(), in the parent and in its children, with a real broker."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from contextlib import suppress
from queue import SimpleQueue

import pytest
import trio

from qb import AsyncBrokerClient, BrokerClient, Consumer, Message, PublishFailed, Receipt, UsedAfterFork
from tests.support.brokers import ROOT, BrokerProcess
from tests.support.forks import PATIENCE, Child, child, raised_by

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


@pytest.fixture
def client(broker: BrokerProcess):
    with BrokerClient(port=broker.port, request_timeout=10) as client:
        client.create_topic("t")
        yield client


def stored(client: BrokerClient) -> list[bytes]:
    return [message.body for message in client.fetch("t", max_messages=100_000)]


def publish_each(client: BrokerClient, bodies: list[bytes]) -> list[Receipt]:
    return [client.publish("t", body) for body in bodies]


def bodies_of(name: str, count: int = 200) -> list[bytes]:
    return [f"{name} {number}".encode() for number in range(count)]


def in_the_log(bodies: list[bytes], receipts: list[Receipt], log: list[bytes]) -> bool:
    return [log[receipt.offset] for receipt in receipts] == bodies and not any(r.duplicate for r in receipts)


def test_parent_and_children_publish_at_once_and_each_message_is_stored_once_where_its_receipt_says(client):
    first = client.publish("t", b"first")
    children = {name: Child(lambda name=name: publish_each(client, bodies_of(name))) for name in ("a", "b")}
    parents = publish_each(client, bodies_of("parent"))
    theirs = {name: each.result() for name, each in children.items()}
    log = stored(client)
    assert len(log) == len(set(log)) == 601
    assert in_the_log([b"first"], [first], log)
    assert in_the_log(bodies_of("parent"), parents, log)
    for name in theirs:
        assert in_the_log(bodies_of(name), theirs[name], log)


def test_a_grandchild_has_a_connection_and_a_producer_id_of_its_own_too(client):
    client.publish("t", b"parent")

    def publish_and_fork() -> int:
        client.publish("t", b"child")
        return child(lambda: client.publish("t", b"grandchild").offset)

    assert child(publish_and_fork) == 2
    assert not client.publish("t", b"parent again").duplicate
    assert stored(client) == [b"parent", b"child", b"grandchild", b"parent again"]


_inherited: BrokerClient | None = None  # by the workers of a pool


def _publish(body: bytes) -> Receipt:
    assert _inherited is not None
    return _inherited.publish("t", body)


def test_the_workers_of_a_fork_pool_publish_with_the_client_that_they_inherit(client, monkeypatch):
    client.publish("t", b"first")
    monkeypatch.setattr(sys.modules[__name__], "_inherited", client)
    bodies = bodies_of("pool", 400)
    with multiprocessing.get_context("fork").Pool(4) as pool:
        receipts = pool.map_async(_publish, bodies, chunksize=10).get(PATIENCE)
    log = stored(client)
    assert len(log) == 401
    assert in_the_log(bodies, receipts, log)


def test_children_forked_while_another_thread_is_in_publish_many_publish_at_once(client):
    stop, results = threading.Event(), SimpleQueue()

    def endless():
        number = 0
        while not stop.is_set():
            yield b"many %d" % number
            number += 1

    thread = threading.Thread(target=lambda: results.put(client.publish_many("t", endless())))
    thread.start()
    try:
        receipts = [child(lambda n=n: client.publish("t", b"child %d" % n)) for n in range(8)]
    finally:
        stop.set()
        thread.join()
    offsets = results.get(timeout=0)
    assert len(set(offsets)) == len(offsets)
    assert client.offsets("t").next == len(offsets) + 8
    for number, receipt in enumerate(receipts):
        assert client.fetch("t", offset=receipt.offset, max_messages=1)[0].body == b"child %d" % number


def test_a_publish_many_whose_bodies_fork_goes_on_in_the_parent_only(client):
    pids = []

    def bodies():
        yield from bodies_of("before", 3000)
        pids.append(os.fork())
        yield from bodies_of("after", 3000)

    try:
        offsets = client.publish_many("t", bodies())
    except PublishFailed as error:  # in the child
        os._exit(7 if error.index < 3000 or isinstance(error.__cause__, UsedAfterFork) else 1)
    if not pids[0]:
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pids[0], 0)[1]) == 7
    assert len(set(offsets)) == client.offsets("t").next == 6000


@pytest.mark.parametrize("ending", ["sys.exit", "os._exit"])
@pytest.mark.parametrize("receiver", ["subscriber", "consumer"])
def test_a_child_that_publishes_and_exits_does_not_disturb_what_its_parent_receives(broker, receiver, ending):
    program = [sys.executable, str(ROOT / "tests" / "support" / "forks.py"), str(broker.port), receiver, ending]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    started = subprocess.Popen(program, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert (started.communicate(timeout=50)[1], started.returncode) == ("", 0)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)  # its child too
        started.communicate()


def test_a_subscriber_in_a_child_raises_and_its_unsubscribe_leaves_the_parents_alone(client):
    got: SimpleQueue[bytes] = SimpleQueue()
    subscriber = client.create_and_subscribe("s", "t", lambda message: got.put(message.body))

    def use() -> list[str]:
        uses = [subscriber.wait, lambda: client.unsubscribe_from_subscription("s"), subscriber.unsubscribe]
        return [*map(raised_by, uses), raised_by(client.disconnect)]

    assert child(use) == ["UsedAfterFork", "NotJoined", "nothing", "nothing"]
    client.publish("t", b"after")
    assert got.get(timeout=PATIENCE) == b"after"


def test_a_message_of_the_parent_cannot_be_settled_in_a_child(client):
    got: SimpleQueue[Message] = SimpleQueue()
    client.create_and_subscribe("s", "t", got.put, ack="manual")
    client.publish("t", b"1")
    message = got.get(timeout=PATIENCE)
    assert child(lambda: raised_by(message.ack)) == "UsedAfterFork"
    message.ack()
    client.unsubscribe_from_subscription("s")
    assert client.describe_subscription("s")["lag"] == 0


def test_a_child_that_returns_from_the_handler_that_forked_it_ends_and_handles_nothing(client):
    got: SimpleQueue[tuple[bytes, int]] = SimpleQueue()
    reader, writer = os.pipe()

    def handler(message: Message) -> None:
        pid = os.fork() if message.body == b"0" else 0
        os.write(writer, message.body)
        if message.body != b"0" or pid:
            got.put((message.body, pid))

    client.publish_many("t", [b"0", b"1", b"2"])
    client.create_and_subscribe("s", "t", handler)
    received = [got.get(timeout=PATIENCE) for _ in range(3)]
    assert [data for data, _ in received] == [b"0", b"1", b"2"]
    os.waitpid(received[0][1], 0)  # bounded by the time limit of every test
    assert Counter(os.read(reader, 100)) == Counter(b"0012")
    os.close(reader)
    os.close(writer)


def test_a_child_may_join_subscriptions_of_its_own_with_the_inherited_client(client):
    client.create_and_subscribe("parents", "t", lambda message: None)
    client.publish("t", b"1")

    def join() -> bytes:
        got: SimpleQueue[bytes] = SimpleQueue()
        with client.create_and_subscribe("childs", "t", lambda message: got.put(message.body)):
            return got.get(timeout=PATIENCE)

    assert child(join) == b"1"


def test_a_consumer_opened_by_the_parent_raises_in_a_child_and_one_that_was_not_goes_on(client):
    client.publish("t", b"1")
    with client.consumer("opened", "t") as opened, client.consumer("unopened", "t") as spare:
        messages, unopened = iter(opened), Consumer("later", "t", port=client.port)
        assert next(messages).body == b"1"
        uses = [lambda: next(messages), opened.poll, opened.commit, lambda: opened.assignment, spare.poll]
        uses += [lambda: opened.seek("t", 0, 0), opened.stop, opened.close]

        def use() -> list[str]:
            with unopened:
                assert unopened.poll(PATIENCE)[0].body == b"1"
            return [raised_by(each) for each in uses]

        assert child(use) == ["UsedAfterFork"] * 6 + ["nothing"] * 2
        opened.commit()


def test_a_handler_of_a_consumer_may_fork_and_its_child_exit_out_of_run(client):
    client.publish_many("t", [b"0", b"1"])
    consumer, statuses, sockets = client.consumer("g", "t"), [], []

    def handler(message: Message) -> None:
        sockets.append(consumer._member.link._connection.socket)
        if not (pid := os.fork()):
            sys.exit(7)
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        if message.offset == 1:
            consumer.stop()

    try:
        with consumer:
            consumer.run(handler)
    except SystemExit as leaving:  # in the children
        os._exit(leaving.code)
    assert statuses == [7, 7]
    assert sockets[0] is sockets[1]  # the parent's connection has lived on
    assert [row["offset"] for row in client.committed_offsets("g")] == [2]


def test_a_transaction_that_was_open_at_a_fork_is_committed_by_the_parent_only(client):
    def leave(fail: bool) -> str:
        try:
            transaction.__exit__(*((KeyError, KeyError(), None) if fail else (None, None, None)))
        except Exception as error:
            return type(error).__name__
        return "nothing"

    with client.transaction("tx") as transaction:
        transaction.publish("t", b"before")
        assert child(lambda: raised_by(lambda: transaction.publish("t", b"child"))) == "UsedAfterFork"
        assert child(lambda: leave(fail=True)) == "nothing"
        assert child(lambda: leave(fail=False)) == "UsedAfterFork"
        assert child(lambda: (client.ping(), leave(fail=True))[1]) == "nothing"
        transaction.publish("t", b"after")
    assert stored(client) == [b"before", b"after"]


def test_a_stage_of_the_parent_raises_in_a_child(client):
    stage = client.begin_transaction("tx")
    uses = [lambda: stage.add("t", 0, b"", 0), stage.finish, stage.abandon]
    assert child(lambda: [raised_by(each) for each in uses]) == ["UsedAfterFork", "UsedAfterFork", "nothing"]
    assert stage.finish() == 0
    assert client.abort_transaction("tx") == 1


def test_a_child_holds_no_descriptor_of_its_parents_connection(client):
    def sockets() -> set[str]:
        links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
        return {os.readlink(link) for link in links if os.path.islink(link)}

    name = os.readlink(f"/proc/self/fd/{client._link._connection.socket.fileno()}")
    assert name in sockets()
    assert name not in child(sockets)


async def test_an_async_client_raises_in_a_child_and_goes_on_in_the_parent(broker):
    def refused(awaitable) -> str:
        """Run it up to where it would wait: a child must not turn the loop of its parent."""
        try:
            awaitable.send(None)
        except StopIteration:
            return "nothing"
        except Exception as error:
            return type(error).__name__
        return "waits"

    async with AsyncBrokerClient(port=broker.port, request_timeout=10) as client, client.consumer("g", "t") as consumer:
        await client.create_topic("t")
        await client.publish("t", b"1")
        subscriber = await client.create_and_subscribe("s", "t", lambda message: None)
        await client.create_subscription("iterated", "t")
        messages = client.messages("iterated")
        assert (await anext(messages)).body == b"1"
        transaction = client.transaction("tx")
        await transaction.__aenter__()
        stage = await client.begin_transaction("staged")
        assert stage is not None

        def use() -> list[str]:
            calls = [client.publish("t", b"2"), client.publish_many("t", [b"2"]), client.list_topics()]
            calls += [client.connect(), subscriber.wait(), consumer.poll(), consumer.commit()]
            calls += [transaction.publish("t", b"2"), stage.finish(), messages.__anext__()]
            ends = [subscriber.unsubscribe(), client.disconnect(), consumer.close(), messages.aclose()]
            ends += [transaction.__aexit__(KeyError, KeyError(), None)]
            messages.__del__()
            return [refused(each) for each in calls + ends]

        assert child(use) == ["UsedAfterFork"] * 10 + ["nothing"] * 5
        assert (await client.publish("t", b"3")).offset == 1
        assert (await anext(messages)).body == b"3"
        await transaction.publish("t", b"4")
        await transaction.__aexit__(None, None, None)
        await subscriber.unsubscribe()
        await messages.aclose()
        assert (await client.offsets("t")).next == 3


def test_an_async_client_that_was_disconnected_before_the_fork_raises_in_a_child(broker):
    client = AsyncBrokerClient(port=broker.port, request_timeout=10)
    unopened = AsyncBrokerClient(port=broker.port, request_timeout=10)

    async def publish(client: AsyncBrokerClient) -> int:
        async with client:
            return (await client.publish("t", b"1")).offset

    with BrokerClient(port=broker.port) as maker:
        maker.create_topic("t")
    assert trio.run(publish, client) == 0
    assert child(lambda: raised_by(lambda: trio.run(publish, client))) == "UsedAfterFork"
    assert child(lambda: trio.run(publish, unopened)) == 1
    assert trio.run(publish, client) == 2


FORK_UNDER_UVLOOP = """
import asyncio, os, sys, uvloop
from qb import AsyncBrokerClient, BrokerClient

async def publish():
    async with AsyncBrokerClient(host, port) as client:
        await client.publish("t", b"1")
        if when == "inside":
            code = await asyncio.to_thread(status_of, fork())
            await client.publish("t", b"3")
            print(code)

def fork():
    pid = os.fork()
    if not pid:
        with BrokerClient(host, port) as client:
            client.publish("t", b"2")
        sys.exit(0)
    return pid

def status_of(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

when, host, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
uvloop.run(publish())
if when == "after":
    print(status_of(fork()))
"""


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
@pytest.mark.parametrize("when", ["after", "inside"])
def test_a_child_of_a_process_that_uses_an_async_client_under_uvloop_exits_normally(client, broker, when, host):
    command = [sys.executable, "-c", FORK_UNDER_UVLOOP, when, host, str(broker.port)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.stdout, done.stderr) == ("0\n", "")
    assert stored(client) == [b"1", b"2", b"3"][: 2 if when == "after" else 3]
