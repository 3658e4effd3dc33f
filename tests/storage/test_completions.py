"""Storage runs what it owes its callers when its own step is finished, never in the middle of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from qb.storage.commit.completions import Completions, Watchers
from qb.storage.engine import Topic
from tests.support.stores import make_run, opened, storage_at_work, store


@pytest.fixture(autouse=True)
def endless_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn must not end in a test because the machine is busy."""
    monkeypatch.setattr("qb.storage.commit.completions.TURN", inf)


class Calls(list[str]):
    """Notes calls in their order."""

    def __call__(self, name: str, then: str | None = None) -> Callable[[], Callable[[], None] | None]:
        def call() -> Callable[[], None] | None:
            self.append(name)
            return None if then is None else lambda: self.append(then)

        return call


def test_a_step_makes_all_answers_then_sends_them_then_notifies_watchers() -> None:
    completions, calls, watchers = Completions(), Calls(), Watchers()
    watchers.add(lambda: calls.append("moved"))
    with completions:
        completions.notify(watchers)
        completions.add(calls("made 1", "sent 1"))
        completions.notify(watchers)
        completions.add(calls("made 2", "sent 2"))
        with completions:
            completions.add(calls("made 3"))
        assert calls == []
    assert calls == ["made 1", "made 2", "made 3", "sent 1", "sent 2", "moved"]


def test_what_a_completion_queues_is_run_behind_it_and_never_nested_in_it() -> None:
    completions, calls = Completions(), Calls()

    def publishes_again() -> None:
        with completions:
            completions.add(calls("inner"))
        calls.append("outer")

    with completions:
        completions.add(publishes_again)
    assert calls == ["outer", "inner"]


def test_a_completion_that_fails_is_logged_and_does_not_keep_others_from_being_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    completions, calls, watchers = Completions(), Calls(), Watchers()

    def fail() -> None:
        raise ValueError("a fault of ours")

    watchers.add(fail)
    watchers.add(lambda: calls.append("moved"))
    with caplog.at_level(logging.ERROR), completions:
        completions.add(fail)
        completions.add(lambda: fail)
        completions.add(calls("made", "sent"))
        completions.notify(watchers)
    assert calls == ["made", "sent", "moved"]
    assert len(caplog.records) == 3


def test_a_watcher_that_was_removed_meanwhile_is_not_called() -> None:
    completions, calls, watchers = Completions(), Calls(), Watchers()
    stop = watchers.add(lambda: calls.append("moved"))
    with completions:
        completions.notify(watchers)
        completions.add(stop)
    assert calls == []


async def test_what_is_queued_outside_of_a_step_is_run_in_a_turn_of_its_own() -> None:
    completions, calls = Completions(), Calls()
    completions.add(calls("one"))
    completions.add(calls("two"))
    assert calls == []
    await wait_all_tasks_blocked()
    assert calls == ["one", "two"]


async def test_completions_that_take_long_go_on_in_other_turns_of_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("qb.storage.commit.completions.TURN", 0.0)
    completions, calls, watchers = Completions(), Calls(), Watchers()
    watchers.add(lambda: calls.append("moved"))
    with completions:
        for number in range(3):
            completions.add(calls(f"made {number}", f"sent {number}"))
        completions.notify(watchers)
    assert calls == ["made 0", "sent 0", "moved"], "a watcher waits for one turn of answers, and not for all"
    await wait_all_tasks_blocked()
    assert calls == ["made 0", "sent 0", "moved", "made 1", "sent 1", "made 2", "sent 2"]


@pytest.fixture
def seen() -> Iterator[list[set[str]]]:
    """Collects what storage was in the middle of whenever it called back; in the end that must always be nothing."""
    found: list[set[str]] = []
    yield found
    assert found
    assert not set().union(*found)


async def test_answers_and_watchers_of_a_log_are_called_when_no_log_is_at_work(
    tmp_path: Path, seen: list[set[str]]
) -> None:
    async with opened(tmp_path) as engine:
        log = engine.log("t", 0)
        log.watch(lambda: seen.append(storage_at_work()))
        answered = trio.Event()

        def done(*_: object) -> Callable[[], None]:
            seen.append(storage_at_work())
            answered.set()
            return lambda: seen.append(storage_at_work())

        for idle in [True, False] * 50:  # by a writer thread and, when the disk has shown to be quick, at once
            answered = trio.Event()
            with engine.commit_step(idle=idle):
                log.append(make_run(log.next_offset, [b"x"]), done)
            await answered.wait()
        log.hold()
        await store(log, b"held")
        log.release()
        await wait_all_tasks_blocked()


async def test_the_answers_of_a_topic_that_is_deleted_come_when_no_log_is_at_work(
    tmp_path: Path, seen: list[set[str]]
) -> None:
    async with opened(tmp_path) as engine:
        await engine.create_topic(Topic(topic="u"))
        log = engine.log("u", 0)
        log.watch(lambda: seen.append(storage_at_work()))
        await engine.delete_topic("u")
        await wait_all_tasks_blocked()


async def test_metadata_calls_back_when_it_is_not_at_work(tmp_path: Path, seen: list[set[str]]) -> None:
    async with opened(tmp_path) as engine:
        ended = trio.Event()

        def done(_: object) -> None:
            seen.append(storage_at_work())
            ended.set()

        engine.metadata.put_then({"k": 1}, done)
        await ended.wait()
