"""Batches on their way to the disk: gathering, answering, and what happens when the disk fails."""

from __future__ import annotations

import errno
import os
import select
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import trio

from qb.core.wire.errors import BrokerError, DiskFull, LogPoisoned, ShuttingDown, UnknownTopic
from qb.storage.engine import AppendRun, Done, ProducerRange, Topic
from qb.storage.local_engine import LocalEngine
from qb.storage.log import partition_log, segment
from qb.storage.metadata import metadata_store
from tests.support.disk import patch_sync, patch_write
from tests.support.stores import everything, give, logs, make_run, open_engine, opened, running, store


@pytest.fixture(autouse=True)
def only_what_a_test_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Metadata that may lag is not written by a timer: the tests count syncs, however slow the machine is."""
    monkeypatch.setattr(metadata_store, "SOON", float("inf"))


class Gate:
    """Holds every sync until it is opened."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.reached, self.open, self.calls = threading.Event(), threading.Event(), 0
        real = os.fdatasync

        def sync(fd: int) -> None:
            self.calls += 1
            self.reached.set()
            assert self.open.wait(30)
            real(fd)

        patch_sync(patch, sync)


async def reached(event: threading.Event) -> None:
    assert await trio.to_thread.run_sync(event.wait, 10)


async def test_what_arrives_while_a_batch_is_synced_goes_into_the_next_one_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as engine:
        log = engine.log("t", 0)
        gate = Gate(monkeypatch)
        first = give(log, [b"first"])
        await reached(gate.reached)
        others = [give(log, [b"%d" % number, b"+"], producer_id=9, first_number=1 + 2 * number) for number in range(50)]
        assert not any(other.calls for other in others)
        gate.open.set()
        for receipt in (first, *others):
            await receipt.wait()
        assert gate.calls == 2
        assert [len(receipt.calls) for receipt in (first, *others)] == [1] * 51
        assert list(log.ranges()) == [ProducerRange(9, 1, 1, 100)]
        assert (await everything(log))[:3] == [b"first", b"0", b"+"]


async def test_the_next_batch_is_being_synced_while_the_answers_of_the_one_before_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as engine:
        log = engine.log("t", 0)
        gate = Gate(monkeypatch)
        answered, at_work = trio.Event(), []

        def done(*_: object) -> None:
            at_work.append(gate.reached.wait(10))
            answered.set()

        log.append(make_run(0, [b"first"]), done)
        await reached(gate.reached)
        second = give(log, [b"second"])
        gate.reached.clear()
        gate.open.set()
        await answered.wait()
        await second.wait()
        assert at_work == [True]


async def test_what_is_appended_in_one_step_of_the_event_loop_is_one_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as engine:
        log = engine.log("t", 0)
        gate = Gate(monkeypatch)
        gate.open.set()
        with engine.commit_step(idle=False):
            receipts = [give(log, [b"%d" % number]) for number in range(50)]
            assert gate.calls == 0
        for receipt in receipts:
            await receipt.wait()
        assert gate.calls == 1
        assert await everything(log) == [b"%d" % number for number in range(50)]


async def test_what_a_thread_has_finished_is_answered_at_the_end_of_the_next_step_and_once(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        answers = list[object]()

        def done(runs: object, error: object, append_ms: int) -> None:
            answers.append(error)

        with engine.commit_step(idle=False):
            engine.log("t", 0).append(make_run(0, [b"x"]), done)
        assert select.select([engine._writers._awake], [], [], 10)[0], "the thread has written"
        assert not answers, "nothing has looked yet"
        with engine.commit_step(idle=False):
            pass
        assert answers == [None]
        await give(engine.log("t", 0), [b"y"]).wait()  # the results of later batches still come by themselves
        assert answers == [None]


class Threads:
    """Notes which threads sync, and makes them slow on demand."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seen: list[int] = []
        self.seconds = 0.0  # that each sync seems to take
        self._now = 0.0
        real = os.fdatasync

        def sync(fd: int) -> None:
            self.seen.append(threading.get_ident())
            self._now += self.seconds
            real(fd)

        patch_sync(patch, sync)
        patch.setattr(time, "perf_counter", lambda: self._now)


async def publish_alone(engine: LocalEngine, body: bytes) -> None:
    with engine.commit_step(idle=True):
        receipt = give(engine.log("t", 0), [body])
    await receipt.wait()


async def test_a_short_commit_that_comes_alone_needs_no_thread_on_a_disk_that_has_shown_to_be_quick(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as engine:
        await engine.create_topic(Topic(topic="u"))
        threads, here = Threads(monkeypatch), threading.get_ident()
        for _ in range(100):
            await publish_alone(engine, b"x")
        assert threads.seen[0] != here, "how quick the disk is, is not known yet"
        assert threads.seen[-50:] == [here] * 50
        await store(engine.log("t", 0), b"not announced")
        await publish_alone(engine, b"x" * 100_000)
        with engine.commit_step(idle=True):
            both = [give(engine.log(topic, 0), [b"x"]) for topic in ("t", "u")]
        for receipt in both:
            await receipt.wait()
        with engine.commit_step(idle=False):
            busy = give(engine.log("t", 0), [b"x"])
        await busy.wait()
        assert here not in threads.seen[100:]


async def test_while_another_peer_is_served_metadata_is_not_synced_by_the_event_loop_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as engine:
        threads, here = Threads(monkeypatch), threading.get_ident()
        for _ in range(100):
            await publish_alone(engine, b"x")
        for idle in (True, False):
            threads.seen.clear()
            with engine.commit_step(idle):
                pass
            await engine.metadata.put("a", {"idle": idle})
            assert (threads.seen[-1] == here) is idle


async def test_after_one_stall_of_the_disk_no_commit_holds_up_the_event_loop_until_it_is_trusted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as engine:
        threads, here = Threads(monkeypatch), threading.get_ident()
        for _ in range(100):
            await publish_alone(engine, b"x")
        threads.seconds = 0.5
        for _ in range(20):
            await publish_alone(engine, b"x")
        assert threads.seen[100] == here
        assert here not in threads.seen[101:]
        threads.seconds = 0.0
        for _ in range(200):
            await publish_alone(engine, b"x")
        assert threads.seen[120] != here
        assert threads.seen[-1] == here


async def test_a_disk_is_trusted_that_is_slow_now_and_then_and_not_one_that_is_slow_most_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as engine:
        threads, here = Threads(monkeypatch), threading.get_ident()
        for number in range(200):
            threads.seconds = 0.02 if number % 10 == 0 else 0.0002
            await publish_alone(engine, b"x")
        assert threads.seen[100:] == [here] * 100
        for number in range(100):
            threads.seconds = 0.0002 if number % 2 == 0 else 0.02
            await publish_alone(engine, b"x")
        assert here not in threads.seen[220:]


async def test_a_sync_that_fails_without_a_thread_poisons_the_log_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as engine:
        threads, here = Threads(monkeypatch), threading.get_ident()
        for _ in range(100):
            await publish_alone(engine, b"x")

        def failing(fd: int) -> None:
            threads.seen.append(threading.get_ident())
            raise OSError(errno.EIO, "Input/output error")

        with monkeypatch.context() as patch:
            patch_sync(patch, failing)
            with pytest.raises(LogPoisoned, match="Input/output error"):
                await publish_alone(engine, b"lost")
        assert threads.seen[-1] == here
        assert engine.log("t", 0).state().status == "poisoned"
        assert await everything(engine.log("t", 0)) == [b"x"] * 100


async def test_logs_do_not_wait_for_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(tmp_path) as engine:
        await engine.create_topic(Topic(topic="u"))
        slow = threading.Event()
        fd_of_t = [0]
        real = os.fdatasync

        def sync(fd: int) -> None:
            if os.readlink(f"/proc/self/fd/{fd}").endswith("/t/0/00000000000000000000.log"):
                fd_of_t[0] = fd
                assert slow.wait(30)
            real(fd)

        patch_sync(monkeypatch, sync)
        waiting = give(engine.log("t", 0), [b"slow"])
        await store(engine.log("u", 0), b"fast")
        assert waiting.calls == []
        slow.set()
        await waiting.wait()
        assert fd_of_t[0]


async def test_a_log_without_room_says_so_until_its_batch_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path, max_pending_bytes=1000) as engine:
        log = engine.log("t", 0)
        gate = Gate(monkeypatch)
        give(log, [b"x" * 2000])
        assert log.has_room  # it is being written, not waiting
        give(log, [b"x" * 500])
        assert log.has_room
        last = give(log, [b"x" * 500])
        assert not log.has_room
        await reached(gate.reached)
        gate.open.set()
        await log.wait_for_room()
        assert log.has_room
        await last.wait()


async def test_a_failed_sync_poisons_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(tmp_path) as engine:
        log = engine.log("t", 0)
        await engine.create_topic(Topic(topic="u"))
        await store(log, b"durable")
        calls = []

        def failing(fd: int) -> None:
            calls.append(fd)
            raise OSError(errno.EIO, "Input/output error")

        with monkeypatch.context() as patch:
            patch_sync(patch, failing)
            first, second = give(log, [b"a"]), give(log, [b"b"])
            for receipt in (first, second):
                with pytest.raises(LogPoisoned, match="Input/output error"):
                    await receipt.wait()
        assert len(calls) == 1  # never tried again
        assert (log.end_offset, log.next_offset) == (1, 1)
        assert log.state().status == "poisoned"
        with pytest.raises(LogPoisoned):
            give(log, [b"c"])
        await log.wait_for_room()
        assert await everything(log) == [b"durable"]
        await store(engine.log("u", 0), b"others go on")
    async with opened(tmp_path) as engine:
        assert await everything(engine.log("t", 0)) == [b"durable"]
        await store(engine.log("t", 0), b"again")


FAILURES = [(errno.ENOSPC, DiskFull), (errno.EDQUOT, DiskFull), (errno.EFBIG, DiskFull)]


@pytest.mark.parametrize(("code", "kind"), FAILURES)
async def test_a_write_that_fails_halfway_is_cut_off_and_the_next_one_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[BrokerError]
) -> None:
    async with opened(tmp_path) as engine:
        log = engine.log("t", 0)
        await store(log, b"kept")
        size = logs(tmp_path)[0].stat().st_size
        with monkeypatch.context() as patch:
            patch_write(patch, writes_half_and_fails(os.pwrite, code))
            receipts = [give(log, [b"x" * 100], producer_id=5, first_number=number) for number in (1, 2, 3)]
            for receipt in receipts:
                with pytest.raises(kind):
                    await receipt.wait()
        assert [len(receipt.calls) for receipt in receipts] == [1, 1, 1]
        assert logs(tmp_path)[0].stat().st_size == size
        assert (log.end_offset, log.next_offset, log.state().status) == (1, 1, "ok")
        assert list(log.ranges()) == []
        await store(log, b"next")
        assert await everything(log) == [b"kept", b"next"]
    async with opened(tmp_path) as engine:
        assert engine.recovery.cut_bytes == 0
        assert await everything(engine.log("t", 0)) == [b"kept", b"next"]


def writes_half_and_fails(real: Callable[..., int], code: int) -> Callable[..., int]:
    def pwrite(fd: int, data: bytes, position: int) -> int:
        if len(data) < 60:
            raise OSError(code, os.strerror(code))
        return real(fd, bytes(data)[: len(data) // 2], position)

    return pwrite


async def test_the_remains_of_a_write_are_cut_off_durably_before_the_next_segment_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path, segment_bytes=200) as engine:
        log = engine.log("t", 0)
        with monkeypatch.context() as patch:
            patch_write(patch, writes_half_and_fails(os.pwrite, errno.ENOSPC))
            with pytest.raises(DiskFull):
                await store(log, b"x" * 300)
        await store(log, b"x" * 200)
        calls: list[str] = []

        def noted(name: str, real: Callable[..., None]) -> Callable[..., None]:
            return lambda *arguments: calls.append(name) or real(*arguments)

        with monkeypatch.context() as patch:
            for name in ("ftruncate", "fdatasync"):
                patch.setattr(os, name, noted(name, getattr(os, name)))
            await store(log, b"the first of the next segment")
        assert len(logs(tmp_path)) == 2
        assert calls[:2] == ["ftruncate", "fdatasync"]


async def test_a_write_whose_remains_cannot_be_cut_poisons_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as engine:
        log = engine.log("t", 0)
        await store(log, b"kept")

        def failing(fd: int, size: int) -> None:
            raise OSError(errno.EIO, "Input/output error")

        with monkeypatch.context() as patch:
            patch_write(patch, writes_half_and_fails(os.pwrite, errno.ENOSPC))
            patch.setattr(os, "ftruncate", failing)
            with pytest.raises(LogPoisoned, match="cut off"):
                await store(log, b"x" * 100)
        assert log.state().status == "poisoned"
    async with opened(tmp_path) as engine:
        assert engine.recovery.cut_bytes > 0
        assert await everything(engine.log("t", 0)) == [b"kept"]


async def test_a_new_segment_that_cannot_be_made_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path, segment_bytes=50) as engine:
        log = engine.log("t", 0)
        await store(log, b"a")
        with monkeypatch.context() as patch:
            patch_write(patch, lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
            with pytest.raises(DiskFull):
                await store(log, b"b")
        assert [path.name for path in sorted(logs(tmp_path)[0].parent.iterdir())] == [
            "00000000000000000000.idx", "00000000000000000000.log"
        ]  # fmt: skip
        await store(log, b"c")
        assert await everything(log) == [b"a", b"c"]
        assert len(logs(tmp_path)) == 2


async def test_a_batch_that_fails_in_a_new_segment_leaves_that_segment_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path, segment_bytes=50) as engine:
        log = engine.log("t", 0)
        await store(log, b"a")
        real = os.pwrite

        def only_seals(fd: int, data: bytes, position: int) -> int:
            if len(data) > 80:
                raise OSError(errno.ENOSPC, "full")
            return real(fd, data, position)

        with monkeypatch.context() as patch:
            patch_write(patch, only_seals)
            with pytest.raises(DiskFull):
                await store(log, b"b" * 100)
        assert len(logs(tmp_path)) == 2
        await store(log, b"c")
        assert len(logs(tmp_path)) == 2
    async with opened(tmp_path) as engine:
        assert await everything(engine.log("t", 0)) == [b"a", b"c"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    mounted = subprocess.run(mount, capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("this test needs the right to mount a tmpfs")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


async def test_a_full_disk_refuses_publishes_keeps_reads_going_and_recovers(small_disk: Path) -> None:
    async with opened(small_disk) as engine:
        log = engine.log("t", 0)
        stored = 0
        with pytest.raises(DiskFull):
            while True:
                await store(log, b"x" * 50_000)
                stored += 1
        assert stored > 3
        with pytest.raises(DiskFull):
            await store(log, b"y" * 500_000)
        assert log.end_offset == log.next_offset == stored
        assert await everything(log) == [b"x" * 50_000] * stored
        filler = small_disk / "filler"
        with pytest.raises(OSError), filler.open("wb") as file:
            file.write(b"z" * 2**20)
        with pytest.raises(DiskFull):
            await engine.create_topic(Topic(topic="more", partitions=400))
        assert "more" not in engine.topics()
        filler.unlink()
        small = give(log, [b"small"])
        await small.wait()
        assert await everything(log) == [b"x" * 50_000] * stored + [b"small"]
    async with opened(small_disk) as engine:
        assert engine.log("t", 0).end_offset == stored + 1


async def test_what_was_given_before_the_end_is_finished_and_what_comes_after_is_refused(tmp_path: Path) -> None:
    engine = open_engine(tmp_path)
    async with running(engine):
        await engine.create_topic(Topic(topic="t"))
        log = engine.log("t", 0)
        receipts = [give(log, [b"%d" % number]) for number in range(20)]
    assert [receipt.calls[0][0] for receipt in receipts] == [None] * 20
    assert [len(receipt.calls) for receipt in receipts] == [1] * 20
    with pytest.raises(ShuttingDown):
        log.append(make_run(log.next_offset, [b"late"]), lambda *_: None)
    async with opened(tmp_path) as engine:
        assert await everything(engine.log("t", 0)) == [b"%d" % number for number in range(20)]


async def test_a_disk_that_never_answers_does_not_keep_the_broker_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qb.storage.local_engine.FINISH_WITHIN", 0.01)
    engine = open_engine(tmp_path)
    async with running(engine):
        await engine.create_topic(Topic(topic="t"))
        gate = Gate(monkeypatch)
        stuck = give(engine.log("t", 0), [b"stuck"])
        gathered = give(engine.log("t", 0), [b"gathered"])
        await reached(gate.reached)
    gate.open.set()
    for receipt in (stuck, gathered):
        assert [type(error) for error, _ in receipt.calls] == [ShuttingDown]


async def test_deleting_a_topic_refuses_what_waits_and_finishes_what_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as engine:
        log = engine.log("t", 0)
        gate = Gate(monkeypatch)
        written, waiting = give(log, [b"a"]), give(log, [b"b"])
        await reached(gate.reached)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.delete_topic, "t")
            with pytest.raises(UnknownTopic):
                await waiting.wait()
            assert written.calls == []
            gate.open.set()
        await written.wait()
        with pytest.raises(UnknownTopic):
            give(log, [b"c"])
        with pytest.raises(UnknownTopic):
            await log.read(0, 100)
        assert len(waiting.calls) == len(written.calls) == 1


async def test_an_answer_that_fails_does_not_keep_the_others_from_theirs(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        log = engine.log("t", 0)

        def broken(runs: Sequence[AppendRun], error: BrokerError | None, append_ms: int) -> None:
            raise ValueError("a bug of the caller")

        log.append(make_run(0, [b"a"]), broken)
        log.append(make_run(1, [b"b"]), broken)
        await store(log, b"c")
        assert log.end_offset == 3


async def test_without_fsync_nothing_is_synced_but_new_segments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path, fsync_on_write=False) as engine:
        assert engine.durability == "written"
        gate = Gate(monkeypatch)
        gate.open.set()
        for _ in range(5):
            await store(engine.log("t", 0), b"x")
        assert gate.calls == 0


async def test_a_batch_takes_about_two_megabytes_and_the_rest_waits_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = [b"%02d" % number + b"x" * 400_000 for number in range(12)]
    async with opened(tmp_path) as engine:
        log, gate = engine.log("t", 0), Gate(monkeypatch)
        receipts = [give(log, [body]) for body in bodies]
        await reached(gate.reached)
        gate.open.set()
        for receipt in receipts:
            await receipt.wait()
        assert await everything(log, 10_000_000) == bodies
        assert gate.calls == 1 + 3, "the first alone, then eleven that had gathered: five, five, one"


class Fault:
    """A disk whose syncs wait until they are let go, and then fail."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.reached, self.go, self.calls = threading.Event(), threading.Event(), 0
        patch_sync(patch, self._sync)

    def _sync(self, fd: int) -> None:
        self.calls += 1
        self.reached.set()
        assert self.go.wait(30)
        raise OSError(errno.EIO, os.strerror(errno.EIO))


FULL = 1024 * 1024  # two bodies of this length fill a batch


async def test_a_full_batch_waits_behind_the_one_that_is_written_and_begins_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = [bytes([number]) * FULL for number in range(6)]
    async with opened(tmp_path) as engine:
        log, gate = engine.log("t", 0), Gate(monkeypatch)
        receipts = [give(log, [b"first"])]
        await reached(gate.reached)
        receipts += [give(log, [body]) for body in bodies]
        gate.reached.clear()
        gate.open.set()
        assert gate.reached.wait(10), "while it waits here, the event loop cannot help"
        for receipt in receipts:
            await receipt.wait()
        assert await everything(log, 10 * FULL) == [b"first", *bodies]
    async with opened(tmp_path) as engine:
        assert (engine.recovery.cut_bytes, engine.log("t", 0).end_offset) == (0, 7)


async def test_when_a_batch_fails_the_one_behind_it_is_not_written_and_all_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as engine:
        log = engine.log("t", 0)
        await store(log, b"kept")
        size = logs(tmp_path)[0].stat().st_size
        with monkeypatch.context() as patch:
            fault = Fault(patch)
            receipts = [give(log, [b"first"])]
            await reached(fault.reached)
            receipts += [give(log, [bytes(FULL)]) for _ in range(5)]
            fault.go.set()
            for receipt in receipts:
                with pytest.raises(LogPoisoned):
                    await receipt.wait()
            assert fault.calls == 1
        assert [len(receipt.calls) for receipt in receipts] == [1] * 6
        assert logs(tmp_path)[0].stat().st_size == size
        assert (log.next_offset, log.state().status) == (1, "poisoned")
    async with opened(tmp_path) as engine:
        assert await everything(engine.log("t", 0)) == [b"kept"]


async def test_without_room_for_a_batch_the_one_behind_it_is_refused_and_the_next_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as engine:
        log, waits, go = engine.log("t", 0), threading.Event(), threading.Event()

        def full(fd: int, data: bytes, position: int) -> int:
            waits.set()
            assert go.wait(30)
            raise OSError(errno.ENOSPC, "full")

        with monkeypatch.context() as patch:
            patch_write(patch, full)
            receipts = [give(log, [b"first"])]
            await reached(waits)
            receipts += [give(log, [bytes(FULL)]) for _ in range(5)]
            go.set()
            for receipt in receipts:
                with pytest.raises(DiskFull):
                    await receipt.wait()
        await store(log, b"room again")
        assert await everything(log) == [b"room again"]
    async with opened(tmp_path) as engine:
        assert await everything(engine.log("t", 0)) == [b"room again"]


async def test_full_batches_go_on_in_new_segments_in_order(tmp_path: Path) -> None:
    bodies = [b"%02d" % number * (FULL // 2) for number in range(12)]
    async with opened(tmp_path, segment_bytes=3 * FULL) as engine:
        log = engine.log("t", 0)
        for receipt in [give(log, [body]) for body in bodies]:
            await receipt.wait()
        assert len(logs(tmp_path)) > 2
        assert await everything(log, 20 * FULL) == bodies
    async with opened(tmp_path) as engine:
        assert await everything(engine.log("t", 0), 20 * FULL) == bodies


async def test_runs_of_one_publisher_in_a_batch_are_answered_in_one_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as engine:
        log, gate, answered = engine.log("t", 0), Gate(monkeypatch), list[list[int]]()

        def done(runs: Sequence[AppendRun], error: BrokerError | None, append_ms: int) -> None:
            assert error is None
            answered.append([run.first_offset for run in runs])

        log.append(make_run(0, [b"alone"]), done)
        await reached(gate.reached)
        for offset in (1, 2, 3):
            log.append(make_run(offset, [b"together"]), done)
        other = give(log, [b"of another peer"])
        log.append(make_run(5, [b"after it"]), done)
        gate.open.set()
        await other.wait()
        await store(log, b"last")
        assert answered == [[0], [1, 2, 3], [5]]


async def test_answers_are_sent_when_all_of_a_batch_have_been_made_and_one_that_fails_harms_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as engine:
        log, happened = engine.log("t", 0), list[str]()

        def publisher(name: str) -> Done:
            def send() -> None:
                happened.append(f"sent to {name}")
                if name == "b":
                    raise RuntimeError("it has gone")

            def done(runs: Sequence[AppendRun], error: BrokerError | None, append_ms: int) -> Callable[[], None]:
                assert log.durable_offset == 3, "not before the batch is durable"
                happened.append(f"answer {name}")
                if name == "c":
                    raise RuntimeError("it cannot be answered")
                return send

            return done

        with engine.commit_step(idle=False):
            for offset, name in enumerate("abc"):
                log.append(make_run(offset, [b"x"]), publisher(name))
        await store(log, b"last")
        assert happened == ["answer a", "answer b", "answer c", "sent to a", "sent to b"]


async def test_entries_of_the_index_are_written_by_a_thread_while_publishing_goes_on(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        log = engine.log("t", 0)
        for _ in range(5):
            await store(log, *[b"x"] * 300)
        await log.wait_until_idle()  # type: ignore[attr-defined]
        index = logs(tmp_path)[0].with_suffix(".idx")
        assert index.stat().st_size >= 1200 * 16
        assert await everything(log) == [b"x"] * 1500
    assert index.stat().st_size == 1500 * 16


async def test_a_short_batch_is_not_written_beside_the_one_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as engine:
        log = engine.log("t", 0)
        for _ in range(100):
            await publish_alone(engine, b"x")  # the disk is trusted now
        gate = Gate(monkeypatch)
        first = give(log, [b"first"])
        await reached(gate.reached)
        with engine.commit_step(idle=True):
            small = give(log, [b"small"])
        with engine.commit_step(idle=True):
            big = give(log, [b"big" * FULL])  # more than fits beside the small one
        assert (small.calls, gate.calls) == ([], 1)
        gate.open.set()
        for receipt in (first, small, big):
            await receipt.wait()
        await store(log, b"last")
        bodies = [b"x"] * 100 + [b"first", b"small", b"big" * FULL, b"last"]
        assert await everything(log, 10 * FULL) == bodies
    async with opened(tmp_path) as engine:
        assert await everything(engine.log("t", 0), 10 * FULL) == bodies


async def test_logs_that_are_never_idle_leave_a_writer_to_those_that_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    reach, go, waited_for = threading.Semaphore(0), threading.Event(), threading.Event()
    real = os.fdatasync

    def sync(fd: int) -> None:
        topic = Path(os.readlink(f"/proc/self/fd/{fd}")).parent.parent.name
        synced.append(topic)
        reach.release()
        assert go.wait(30)
        if topic == "t4":
            waited_for.set()
        elif synced.count(topic) > 1:
            assert waited_for.wait(10), "all writers have a second turn before the log that waits has its first"
        real(fd)

    async with opened(tmp_path) as engine:
        for number in range(5):
            await engine.create_topic(Topic(topic=f"t{number}"))
        *busy, cold = [engine.log(f"t{number}", 0) for number in range(5)]
        patch_sync(monkeypatch, sync)
        receipts = [give(log, [b"first"]) for log in busy]
        for _ in busy:
            assert await trio.to_thread.run_sync(reach.acquire, True, 10)
        receipts.append(give(cold, [b"one alone"]))
        receipts += [give(log, [bytes(FULL)]) for log in busy for _ in range(4)]
        go.set()
        for receipt in receipts:
            await receipt.wait()


async def test_a_fault_in_a_batch_keeps_the_one_behind_it_from_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, go, writes = threading.Event(), threading.Event(), 0

    def failing(fd: int, parts: Sequence[bytes], position: int) -> None:
        nonlocal writes
        writes += 1
        waits.set()
        assert go.wait(30)
        raise MemoryError

    async with opened(tmp_path) as engine:
        log = engine.log("t", 0)
        await store(log, b"kept")
        with monkeypatch.context() as patch:
            patch.setattr(segment, "write_durably", failing)
            receipts = [give(log, [b"first"])]
            await reached(waits)
            receipts += [give(log, [bytes(FULL)]) for _ in range(3)]
            go.set()
            for receipt in receipts:
                with pytest.raises(LogPoisoned):
                    await receipt.wait()
        assert writes == 1
    async with opened(tmp_path) as engine:
        assert await everything(engine.log("t", 0)) == [b"kept"]


async def test_a_batch_that_cannot_be_put_together_is_refused_and_nothing_comes_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise MemoryError

    async with opened(tmp_path) as engine:
        log, gate = engine.log("t", 0), Gate(monkeypatch)
        first = give(log, [b"first"])
        await reached(gate.reached)
        second = give(log, [b"second"])
        monkeypatch.setattr(partition_log, "assemble", failing)
        gate.open.set()
        await first.wait()
        with pytest.raises(LogPoisoned):
            await second.wait()
        with pytest.raises(LogPoisoned):
            give(log, [b"third"])
    async with opened(tmp_path) as engine:
        assert await everything(engine.log("t", 0)) == [b"first"]


@pytest.mark.parametrize(("code", "kind"), [(errno.ENOSPC, DiskFull), (errno.EIO, LogPoisoned)])
async def test_where_a_write_cannot_sync_its_failures_mean_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[BrokerError]
) -> None:
    def unsupported(*_: object) -> int:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    def failing(fd: int) -> None:
        raise OSError(code, os.strerror(code))

    async with opened(tmp_path) as engine:
        log = engine.log("t", 0)
        monkeypatch.setattr(os, "pwritev", unsupported)
        await store(log, b"kept")
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", failing)
            with pytest.raises(kind):
                await store(log, b"lost")
        assert log.state().status == ("ok" if kind is DiskFull else "poisoned")
    async with opened(tmp_path) as engine:
        assert await everything(engine.log("t", 0)) == [b"kept"]


async def test_runs_larger_than_a_batch_are_stored_one_by_one(tmp_path: Path) -> None:
    bodies = [b"%d" % number * 1_500_000 for number in range(3)]
    async with opened(tmp_path) as engine:
        log = engine.log("t", 0)
        for receipt in [give(log, [body]) for body in bodies]:
            await receipt.wait()
        assert await everything(log, 10_000_000) == bodies
