"""Topics in a data directory: who may open it, how topics come and go, and what a crash in between leaves."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import trio

from qb.core.wire.errors import TopicExists, UnknownPartition, UnknownTopic
from qb.storage.engine import MetadataEntry, Topic
from qb.storage.files import CannotOpen
from qb.storage.local_engine import LocalEngine
from qb.storage.verification import verify
from tests.support.brokers import ROOT
from tests.support.disk import Crash, crash_at
from tests.support.stores import NOON, Clock, edit_metadata, everything, open_engine, opened, running, store
from tests.support.waiting import until


async def test_a_topic_is_there_after_a_restart_as_it_was_asked_for(tmp_path: Path) -> None:
    asked = Topic(topic="orders", partitions=3, retention_hours=2.5, retention_bytes=1000)
    async with running(open_engine(tmp_path)) as engine:
        created = await engine.create_topic(asked)
        assert created.created_ms == NOON
        assert engine.topics() == {"orders": created}
        assert engine.durability == "fsynced"
        for number in range(3):
            await store(engine.log("orders", number), b"%d" % number)
    async with running(open_engine(tmp_path)) as engine:
        assert engine.topics() == {"orders": created}
        assert (engine.recovery.topics, engine.recovery.messages, engine.recovery.notes) == (1, 3, ())
        for number in range(3):
            assert await everything(engine.log("orders", number)) == [b"%d" % number]


async def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        with pytest.raises(UnknownTopic):
            engine.log("nope", 0)
        for number in (-1, 1):
            with pytest.raises(UnknownPartition):
                engine.log("t", number)
        with pytest.raises(TopicExists):
            await engine.create_topic(Topic(topic="t"))
        with pytest.raises(UnknownTopic):
            await engine.delete_topic("nope")


async def test_of_two_who_create_the_same_topic_one_is_refused(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        refused = []

        async def create() -> None:
            try:
                await engine.create_topic(Topic(topic="same"))
            except TopicExists:
                refused.append(1)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(create)
            nursery.start_soon(create)
        assert len(refused) == 1


@pytest.mark.parametrize("name", [".hidden", ".creating-x-1", ".deleted-x-1", "a-b-c", "..a", "x" * 200, "%2E"[1:]])
async def test_any_allowed_name_can_be_a_topic(tmp_path: Path, name: str) -> None:
    async with opened(tmp_path) as engine:
        await engine.create_topic(Topic(topic=name))
        await store(engine.log(name, 0), b"kept")
    edit_metadata(tmp_path / "data", {f"topic/{name}": None})
    async with opened(tmp_path) as engine:
        assert await everything(engine.log(name, 0)) == [b"kept"]
        await engine.delete_topic(name)
    async with opened(tmp_path) as engine:
        assert list(engine.topics()) == ["t"]


async def test_a_deleted_topic_is_gone_and_its_name_starts_anew(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        old = engine.log("t", 0)
        await store(old, b"old")
        await engine.delete_topic("t")
        assert engine.topics() == {}
        assert engine.metadata.get("topic/t") is None
        assert list((tmp_path / "data" / "topics").iterdir()) == []
        await engine.create_topic(Topic(topic="t", partitions=2))
        new = engine.log("t", 0)
        assert (new.first_offset, new.next_offset) == (0, 0)
        await store(new, b"new")
        assert await everything(new) == [b"new"]
        with pytest.raises(UnknownTopic):
            await old.read(0, 100)
    async with opened(tmp_path) as engine:
        assert await everything(engine.log("t", 0)) == [b"new"]


async def test_a_topic_that_only_has_a_directory_is_adopted_with_a_note(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        await engine.create_topic(Topic(topic="wide", partitions=3))
        await store(engine.log("wide", 2), b"kept")
    edit_metadata(tmp_path / "data", {"topic/t": None, "topic/wide": None})
    async with opened(tmp_path) as engine:
        assert {name: topic.partitions for name, topic in engine.topics().items()} == {"t": 1, "wide": 3}
        assert sum("adopted" in note for note in engine.recovery.notes) == 2
        assert await everything(engine.log("wide", 2)) == [b"kept"]
    async with opened(tmp_path) as engine:
        assert engine.recovery.notes == ()


def test_a_creation_interrupted_at_any_step_is_whole_or_not_there(tmp_path: Path) -> None:
    step, finished = 0, False
    while not finished:
        step += 1
        place = tmp_path / str(step)
        engine = open_engine(place)
        with pytest.MonkeyPatch.context() as patch:
            crash_at(patch, step)
            try:
                engine._directories.create(engine._files, "orders", 2, NOON)
                finished = True
            except Crash:
                pass
        engine.close()
        engine = open_engine(place)
        assert [log.state().status for _, log in engine._logs()] in ([], ["ok", "ok"])
        assert not list((place / "data" / "topics").glob(".*"))
        engine.close()
        assert verify(place / "data").findings == []
    assert step > 10


def test_a_deletion_interrupted_at_any_step_is_finished_or_not_begun(tmp_path: Path) -> None:
    engine = open_engine(tmp_path / "whole")
    engine._directories.create(engine._files, "orders", 2, NOON)
    engine.metadata.write_now({"topic/orders": b'{"topic": "orders", "partitions": 2}'})
    engine.close()
    step, finished = 0, False
    outcomes = set()
    while not finished:
        step += 1
        place = tmp_path / str(step)
        shutil.copytree(tmp_path / "whole", place)
        engine = open_engine(place)
        with pytest.MonkeyPatch.context() as patch:
            crash_at(patch, step)
            try:
                hidden = engine._directories.hide("orders")
                engine._directories.remove(hidden)  # the row in the metadata is still there
                finished = True
            except Crash:
                pass
        engine.close()
        if finished:
            break
        engine = open_engine(place)
        outcomes.add(tuple(engine.topics()))
        assert all(log.state().status == "ok" for _, log in engine._logs())
        assert bool(engine.metadata.get("topic/orders")) == bool(engine.topics())
        assert not list((place / "data" / "topics").glob(".*"))
        engine.close()
    assert outcomes == {(), ("orders",)}


async def test_a_topic_made_again_while_its_old_files_lie_about_is_kept(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        await store(engine.log("t", 0), b"new")
    shutil.copytree(tmp_path / "data/topics/t", tmp_path / "data/topics/.deleted-t-abcd")
    async with opened(tmp_path) as engine:
        assert engine.metadata.get("topic/t") is not None
        assert await everything(engine.log("t", 0)) == [b"new"]
        assert not (tmp_path / "data/topics/.deleted-t-abcd").exists()


def test_the_refusal_of_a_second_opener_names_who_has_the_directory(tmp_path: Path) -> None:
    program = (
        "import sys; from tests.support.stores import *; "
        "engine = open_engine(Path(sys.argv[1])); print('open', flush=True); input()"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "open\n"
        with pytest.raises(CannotOpen, match=rf"in use.*pid {holder.pid}\b"):
            open_engine(tmp_path)
        holder.send_signal(signal.SIGKILL)
    open_engine(tmp_path).close()


async def test_a_directory_closed_is_free_for_the_next(tmp_path: Path) -> None:
    engine = open_engine(tmp_path)
    with pytest.raises(CannotOpen, match=str(os.getpid())):
        open_engine(tmp_path)
    engine.close()
    open_engine(tmp_path).close()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("qb-storage 3\n", "version 3"),
        ("qb-storage 0\n", "no data directory"),
        ("qb-storage \u00b2\n", "no data directory"),
        ("nonsense\n", "no data directory"),
        ("", "no data directory"),
    ],
)
async def test_a_format_that_is_not_ours_is_refused_and_left_alone(tmp_path: Path, text: str, says: str) -> None:
    async with opened(tmp_path):
        pass
    path = tmp_path / "data" / "format"
    assert path.read_text() == "qb-storage 2\n"
    path.write_text(text)
    for _ in range(2):
        with pytest.raises(CannotOpen, match=says):
            open_engine(tmp_path)
    assert path.read_text() == text


async def test_a_directory_that_cannot_be_used_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file")
    with pytest.raises(CannotOpen, match=r"data cannot be opened"):
        open_engine(tmp_path)


async def test_damage_in_a_closed_segment_is_found_in_the_background(tmp_path: Path) -> None:
    async with opened(tmp_path, segment_bytes=200) as engine:
        for number in range(9):
            await store(engine.log("t", 0), b"%d" % number)
    path = sorted((tmp_path / "data/topics/t/0").glob("*.log"))[1]
    path.write_bytes(path.read_bytes().replace(b"topic=t", b"topic=x", 1))
    engine = open_engine(tmp_path)
    assert engine.log("t", 0).state().status == "ok"  # the cheap check at the start does not see it
    async with running(engine):
        await until(lambda: engine.log("t", 0).state().status == "damaged")
        assert str(path) in str(engine.log("t", 0).state().reason)


async def test_the_clock_is_the_one_that_was_given(tmp_path: Path) -> None:
    clock = Clock(5)
    async with opened(tmp_path, clock) as engine:
        clock.now = 77
        assert await store(engine.log("t", 0), b"x") == 77
        assert engine.metadata.get("topic/t") == MetadataEntry(
            {"topic": "t", "partitions": 1, "retention_hours": None, "retention_bytes": None, "created_ms": 5}, 1
        )
    assert isinstance(engine, LocalEngine)
