"""One poll of all peers: those that can be read are called in one step, and one that fails harms no other."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
import trio

from qb.core.pacing import current
from qb.doors import socket_poll as readiness
from qb.doors import step_shares
from qb.doors.socket_poll import SocketPoll
from qb.doors.transport import Transport

pytestmark = pytest.mark.skipif(not readiness.AVAILABLE, reason="there is no epoll here: each socket is waited for")


@pytest.fixture
def pair() -> Iterator[Callable[[], tuple[socket.socket, socket.socket]]]:
    """Makes two ends of a connection: ours and theirs."""
    with ExitStack() as opened:

        def make() -> tuple[socket.socket, socket.socket]:
            ours, theirs = socket.socketpair()
            return opened.enter_context(ours), opened.enter_context(theirs)

        yield make


class Steps:
    """What a Readiness does in each step: whom it calls, and whether it said that this is only one."""

    def __init__(self) -> None:
        self.calls: list[tuple[bool, list[str]]] = []

    @contextmanager
    def commit_step(self, idle: bool) -> Iterator[None]:
        self.calls.append((idle, []))
        yield

    def called(self, name: str) -> None:
        self.calls[-1][1].append(name)


def small_steps(monkeypatch: pytest.MonkeyPatch, step_bytes: int) -> Steps:
    """Receive 1,000 bytes at a time, and so many in a step."""
    for name, size in (("RECEIVE_BYTES", 1000), ("ROOM", 1000), ("STEP_BYTES", step_bytes)):
        monkeypatch.setattr(readiness, name, size)
    return Steps()


async def until_quiet() -> None:
    await trio.testing.wait_all_tasks_blocked(0.01)


class Clock:
    """Stands for perf_counter in the poll: the time goes on only when a test says so."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        patch.setattr(readiness, "perf_counter", lambda: self.now)


async def test_all_that_are_ready_are_called_in_one_step(nursery, pair):
    steps = Steps()
    ready = SocketPoll(steps.commit_step)
    pairs = {name: pair() for name in ("a", "b", "c")}

    for name, (ours, _) in pairs.items():
        ready.add(ours, lambda data, name=name: steps.called(name))
    for name in ("a", "b"):
        pairs[name][1].send(b"x")
    nursery.start_soon(ready.run)
    await until_quiet()
    pairs["c"][1].send(b"x")
    await until_quiet()
    ready.remove(pairs["a"][0])
    ready.remove(pairs["a"][0])
    pairs["a"][1].send(b"x")
    await until_quiet()
    assert [sorted(names) for _, names in steps.calls] == [["a", "b"], ["c"]]
    nursery.cancel_scope.cancel()


async def test_a_peer_is_alone_in_its_step_only_when_no_other_peer_has_spoken_lately(nursery, pair, monkeypatch):
    clock, steps = Clock(monkeypatch), Steps()
    ready = SocketPoll(steps.commit_step)
    pairs = {name: pair() for name in ("a", "b", "http")}
    for name in ("a", "b"):
        ready.add(pairs[name][0], lambda data, name=name: steps.called(name))
    ours = pairs["http"][0]
    by_itself = Transport(ours, ready)  # a session that receives without the poll
    nursery.start_soon(ready.run)

    async def say(name: str, *, after: float) -> bool:
        clock.now += after
        pairs[name][1].send(b"x")
        await until_quiet()
        return steps.calls[-1][0]

    long, soon = readiness.SERVED * 1.1, readiness.SERVED / 2
    assert not await say("a", after=long), "a has just come"
    assert await say("a", after=long)
    assert await say("a", after=soon)
    assert not await say("b", after=soon)
    assert not await say("a", after=soon), "b is being served"
    assert not await say("a", after=soon)
    assert await say("a", after=soon + soon)
    pairs["http"][1].send(b"x")
    assert await by_itself.receive() == b"x"
    assert not await say("a", after=soon)
    nursery.cancel_scope.cancel()


async def test_one_that_is_removed_in_the_same_step_is_not_called_any_more(nursery, pair):
    ready, called = SocketPoll(), []
    pairs = [pair(), pair()]

    def reader(number: int) -> None:
        called.append(number)
        for ours, _ in pairs:
            ready.remove(ours)

    for number, (ours, theirs) in enumerate(pairs):
        ready.add(ours, lambda data, number=number: reader(number))
        theirs.send(b"x")
    nursery.start_soon(ready.run)
    await until_quiet()
    assert len(called) == 1
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize("one_look", [True, False])
async def test_attending_ends_with_what_must_be_waited_for_and_goes_on_after_it(nursery, pair, one_look):
    ready = SocketPoll()
    nursery.start_soon(ready.run)
    ours, theirs = pair()
    transport, taken = Transport(ours, ready if one_look else None), []

    def take(data: memoryview) -> bool:
        taken.append(bytes(data))
        return bytes(data) != b"wait"

    async def talk() -> None:
        for word in (b"one", b"two", b"wait", b"four"):
            before = len(taken)
            theirs.send(word)
            while len(taken) == before:
                await trio.lowlevel.checkpoint()
        theirs.close()

    nursery.start_soon(talk)
    assert await transport.attend(take) is True
    assert taken == [b"one", b"two", b"wait"]
    assert await transport.attend(take) is False
    assert taken[3:] == [b"four"]
    transport.close()
    nursery.cancel_scope.cancel()


async def test_what_comes_while_a_session_waits_is_left_in_the_socket_until_it_listens_again(
    nursery, pair, monkeypatch
):
    ready, words = SocketPoll(), [b"%d." % number for number in range(200)]
    nursery.start_soon(ready.run)
    ours, theirs = pair()
    transport, taken = Transport(ours, ready), bytearray()

    def take(data: memoryview) -> bool:
        nonlocal taken
        taken += data
        if words:
            theirs.send(words.pop(0))  # so that the socket can be read before the poll knows that we wait
        return False

    theirs.send(words.pop(0))
    while len(taken) < sum(len(b"%d." % number) for number in range(200)):
        assert await transport.attend(take) is True
    assert taken == b"".join([b"%d." % number for number in range(200)])
    nursery.cancel_scope.cancel()


async def test_what_many_bring_is_received_before_any_of_it_is_handed_over_as_far_as_there_is_room(
    nursery, pair, monkeypatch
):
    monkeypatch.setattr(readiness, "ROOM", readiness.RECEIVE_BYTES - 150)
    ready, taken, left = SocketPoll(), [], []
    pairs = [pair() for _ in range(5)]

    def take(number: int, data: memoryview) -> None:
        taken.append((number, bytes(data)))
        left.append(sum(_is_readable(ours) for ours, _ in pairs))

    for number, (ours, theirs) in enumerate(pairs):
        ready.add(ours, lambda data, number=number: take(number, data))
        theirs.send(bytes([number]) * 100)
    nursery.start_soon(ready.run)
    await until_quiet()
    assert sorted(taken) == [(number, bytes([number]) * 100) for number in range(5)]
    assert left == [3, 3, 1, 1, 0]
    nursery.cancel_scope.cancel()


async def test_a_peer_that_sends_much_is_read_until_it_is_silent_or_has_had_its_share_of_a_step(
    nursery, pair, monkeypatch
):
    steps = small_steps(monkeypatch, 3000)
    ready, (ours, theirs) = SocketPoll(steps.commit_step), pair()
    ready.add(ours, lambda data: steps.called(str(len(data))))
    theirs.send(bytes(7_500))
    nursery.start_soon(ready.run)
    await until_quiet()
    assert [sizes for _, sizes in steps.calls] == [["1000"] * 3, ["1000"] * 3, ["1000", "500"]]
    nursery.cancel_scope.cancel()


async def test_many_who_send_much_share_a_step_and_each_has_its_turn(nursery, pair, monkeypatch):
    steps = small_steps(monkeypatch, 2000)
    monkeypatch.setattr(step_shares, "LEAST_SHARE", 100)
    ready, pairs = SocketPoll(steps.commit_step), [pair() for _ in range(5)]
    for number, (ours, theirs) in enumerate(pairs):
        ready.add(ours, lambda data, number=number: steps.called(f"{number}:{len(data)}"))
        theirs.send(bytes(800))
    nursery.start_soon(ready.run)
    await until_quiet()
    assert [sorted(names) for _, names in steps.calls] == [[f"{number}:200" for number in range(5)]] * 4
    nursery.cancel_scope.cancel()


async def test_beside_others_a_peer_brings_at_most_one_filling_of_the_buffer_in_a_step(nursery, pair, monkeypatch):
    clock, steps = Clock(monkeypatch), small_steps(monkeypatch, 5000)
    monkeypatch.setattr(step_shares, "LEAST_SHARE", 100)
    ready, pairs = SocketPoll(steps.commit_step), {name: pair() for name in ("noisy", "quiet")}
    for name, (ours, _) in pairs.items():
        ready.add(ours, lambda data, name=name: steps.called(f"{name}:{len(data)}"))
    nursery.start_soon(ready.run)

    async def steps_of(sent: dict[str, int]) -> list[list[str]]:
        steps.calls.clear()
        for name, size in sent.items():
            pairs[name][1].send(bytes(size))
        await until_quiet()
        return [sorted(names) for _, names in steps.calls]

    assert await steps_of({"noisy": 3000}) == [["noisy:1000"] * 3], "it is alone"
    assert await steps_of({"noisy": 2000, "quiet": 10}) == [
        ["noisy:500", "quiet:10"],
        ["noisy:1000"],
        ["noisy:500"],
    ]
    clock.now += readiness.SERVED / 2
    assert await steps_of({"noisy": 3000}) == [["noisy:1000"]] * 3, "another one has just been served"
    clock.now += readiness.SERVED * 1.1
    assert await steps_of({"noisy": 3000}) == [["noisy:1000"] * 3]
    nursery.cancel_scope.cancel()


async def test_what_is_brief_is_committed_before_one_that_has_had_its_share_and_has_more(nursery, pair, monkeypatch):
    steps = small_steps(monkeypatch, 5000)
    monkeypatch.setattr(step_shares, "LEAST_SHARE", 100)
    ready, pairs = SocketPoll(steps.commit_step), {name: pair() for name in ("noisy", "quiet")}

    def take(name: str, data: memoryview) -> None:
        steps.called(f"{name}:{len(data)}")
        if name == "noisy":  # so that both can be read in the next pass
            pairs["quiet"][1].send(bytes(10))

    for name, (ours, _) in pairs.items():
        ready.add(ours, lambda data, name=name: take(name, data))
    pairs["quiet"][1].send(bytes(10))
    nursery.start_soon(ready.run)
    await until_quiet()
    pairs["noisy"][1].send(bytes(2200))
    await until_quiet()
    assert [names for _, names in steps.calls] == [
        ["quiet:10"],
        ["noisy:1000"],  # how much it has is not known yet
        *(["quiet:10"], ["noisy:500"]),
        *(["quiet:10"], ["noisy:500"]),
        *(["quiet:10"], ["noisy:200"]),
        ["quiet:10"],
    ]
    nursery.cancel_scope.cancel()


async def test_deliveries_learn_that_peers_wait_only_while_several_accounts_are_served(nursery, pair, monkeypatch):
    clock, seen = Clock(monkeypatch), []
    ready, pairs = SocketPoll(), [pair(), pair()]
    assert not current.peers_wait()

    def take(data: memoryview) -> None:
        seen.append(current.peers_wait())  # the other byte of a pair waits in its socket

    for ours, _ in pairs:
        ready.add(ours, take, portion=1)
    nursery.start_soon(ready.run)

    async def seen_after(number: int, seconds: float) -> list[bool]:
        clock.now += seconds
        seen.clear()
        pairs[number][1].send(b"xy")
        await until_quiet()
        return seen.copy()

    assert await seen_after(0, 0.0) == [False, False], "it is alone"
    assert await seen_after(1, 0.0) == [True, False], "another one has just been served"
    assert await seen_after(1, readiness.SERVED * 1.1) == [False, False]
    nursery.cancel_scope.cancel()
    await until_quiet()


async def test_all_connections_of_an_account_have_one_share_of_a_step_and_each_has_its_turn(nursery, pair, monkeypatch):
    steps = small_steps(monkeypatch, 5000)
    ready = SocketPoll(steps.commit_step)
    for number in range(3):
        ours, theirs = pair()
        ready.add(ours, lambda data, number=number: steps.called(f"noisy-{number}:{len(data)}"), account="noisy")
        theirs.send(bytes(2000))
    ours, theirs = pair()
    ready.add(ours, lambda data: steps.called(f"quiet:{len(data)}"), account="quiet")
    theirs.send(bytes(10))
    monkeypatch.setattr(step_shares, "LEAST_SHARE", 500)
    nursery.start_soon(ready.run)
    await until_quiet()
    brought = [names for _, names in steps.calls]
    assert "quiet:10" in brought[0]
    assert all(sum(int(name.partition(":")[2]) for name in names if "noisy" in name) <= 1000 for names in brought)
    turns = [name.partition(":")[0] for names in brought for name in names if "noisy" in name]
    assert set(turns[:3]) == {"noisy-0", "noisy-1", "noisy-2"}, "none has to wait for long"
    nursery.cancel_scope.cancel()


def _is_readable(sock: socket.socket) -> bool:
    return bool(select.select([sock], [], [], 0)[0])


@pytest.mark.parametrize("one_look", [True, False])
async def test_what_a_listener_raises_reaches_its_own_session_and_no_other(nursery, pair, one_look):
    ready = SocketPoll()
    nursery.start_soon(ready.run)
    pairs = [pair(), pair()]
    failing, other = (Transport(ours, ready if one_look else None) for ours, _ in pairs)

    def fail(data: memoryview) -> bool:
        raise ValueError("no")

    pairs[0][1].send(b"x")
    with pytest.raises(ValueError, match="no"):
        await failing.attend(fail)
    pairs[1][1].send(b"x")
    assert await other.attend(lambda data: False) is True
    nursery.cancel_scope.cancel()


async def test_attending_can_be_cancelled_and_taken_up_again(nursery, pair):
    ready = SocketPoll()
    nursery.start_soon(ready.run)
    ours, theirs = pair()
    transport, taken = Transport(ours, ready), []
    with trio.move_on_after(0):
        await transport.attend(lambda data: bool(taken.append(bytes(data))))
    theirs.send(b"x")
    assert await transport.attend(lambda data: bool(taken.append(bytes(data)))) is True
    assert taken == [b"x"]
    nursery.cancel_scope.cancel()


async def test_more_parts_than_the_system_takes_at_once_are_all_sent(nursery, pair):
    ours, theirs = pair()
    transport = Transport(ours)
    nursery.start_soon(transport.send_queued)
    transport.send(*[b"%d." % number for number in range(3_000)])
    received = b""
    while not received.endswith(b".2999."):
        received += await trio.to_thread.run_sync(theirs.recv, 100_000)
    assert received == b"".join([b"%d." % number for number in range(3_000)])
    assert not transport.gone
    nursery.cancel_scope.cancel()


class Publisher:
    """A step that is over at once, as that of a lone publish is."""

    def __init__(self) -> None:
        self.at_once = True
        self.steps: list[bool] = []

    @contextmanager
    def commit_step(self, idle: bool) -> Iterator[Publisher]:
        self.steps.append(idle)
        yield self


async def test_with_low_latency_the_next_publish_after_a_lone_one_that_came_soon_finds_us_awake(
    nursery, pair, monkeypatch
):
    monkeypatch.setattr(readiness, "AWAKE", 30.0)
    waits = 0
    real = trio.lowlevel.wait_readable

    async def wait_readable(fd: object) -> None:
        nonlocal waits
        waits += 1
        await real(fd)

    monkeypatch.setattr(trio.lowlevel, "wait_readable", wait_readable)
    publisher, (ours, theirs), others = Publisher(), pair(), 0
    ready = SocketPoll(publisher.commit_step, low_latency=True)
    ready.add(ours, lambda data: None)
    nursery.start_soon(ready.run)

    async def another_task() -> None:
        nonlocal others
        while True:
            await trio.lowlevel.checkpoint()
            others += 1

    nursery.start_soon(another_task)
    for number in range(1, 6):
        before = others
        theirs.send(b"x")
        while len(publisher.steps) < number or others < before + 3:
            await trio.lowlevel.checkpoint()
    assert len(publisher.steps) == 5
    assert waits <= 2, "it has not gone to sleep between them"
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize(("awake", "low_latency"), [(0.0, True), (3600.0, False)])
async def test_a_peer_is_not_waited_for_awake_if_it_comes_late_or_without_low_latency(
    nursery, pair, monkeypatch, awake, low_latency
):
    monkeypatch.setattr(readiness, "AWAKE", awake)
    publisher, (ours, theirs) = Publisher(), pair()
    ready = SocketPoll(publisher.commit_step, low_latency=low_latency)
    ready.add(ours, lambda data: None)
    nursery.start_soon(ready.run)
    for number in range(1, 4):
        theirs.send(b"x")
        await until_quiet()  # which it would never be
        assert len(publisher.steps) == number
    nursery.cancel_scope.cancel()


async def test_little_is_received_of_each_while_peers_hold_much(nursery, pair):
    tight, taken = True, []
    ready = SocketPoll(is_tight=lambda: tight)
    nursery.start_soon(ready.run)
    ours, theirs = pair()
    ours.setblocking(False)
    ready.add(ours, lambda data: taken.append(len(data)))
    theirs.sendall(b"x" * 100_000)
    await until_quiet()
    assert max(taken) == readiness.TIGHT_BYTES
    tight, taken[:] = False, []
    theirs.sendall(b"x" * 100_000)
    await until_quiet()
    assert max(taken) > readiness.TIGHT_BYTES
    ready.remove(ours)


@pytest.mark.parametrize(("portion", "largest"), [(100, 100), (readiness.RECEIVE_BYTES * 4, readiness.RECEIVE_BYTES)])
async def test_a_portion_is_the_most_that_is_received_of_a_peer_also_if_there_is_less_room(
    nursery, pair, portion, largest
):
    poll, sizes = SocketPoll(), []
    nursery.start_soon(poll.run)
    ours, theirs = pair()
    ours.setblocking(False)
    theirs.send(bytes(1_000))
    poll.add(ours, lambda data: sizes.append(len(data)), portion)
    with trio.fail_after(10):
        while sum(sizes) < 1_000:
            await trio.lowlevel.checkpoint()
    assert max(sizes) == min(largest, 1_000)
    poll.remove(ours)
    nursery.cancel_scope.cancel()
