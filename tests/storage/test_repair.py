"""A repair names what is in doubt where both files of the metadata are damaged, and goes on only when asked to."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from qb.core.wire.errors import LogDamaged
from qb.storage import repair
from qb.storage.clean_stop import remove_proof
from qb.storage.engine import Topic
from qb.storage.files import CannotOpen, OpenFiles
from qb.storage.maintenance import drop_segments
from qb.storage.metadata.metadata_files import copy_of, read_log, read_newest
from qb.storage.metadata.metadata_records import MetadataRecord, decode_changes, whole_records
from qb.storage.metadata.metadata_recovery import recover_metadata
from qb.storage.verification import verify
from tests.support.stores import edit_metadata, everything, flip, metadata_log, open_engine, opened, running, store

KEYS = {"subscription/s": {"topic": "t"}, "offset/g/t/0": {"offset": 50}, "group/g/t": [1, "ä"], "offset/g/t/1": 7}


@pytest.fixture(params=["clean", "killed"])
def data_dir(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    trio.run(fill, tmp_path)
    if request.param == "killed":
        remove_proof(tmp_path / "data")
    return tmp_path / "data"


async def fill(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        await store(engine.log("t", 0), b"one", b"two")
        for key, value in KEYS.items():
            await engine.metadata.put(key, value)


def records(data_dir: Path) -> list[tuple[int, int, MetadataRecord]]:
    """Return where each record stands, where it ends, and the record."""
    data = metadata_log(data_dir).read_bytes()
    return [(at, at + int.from_bytes(data[at : at + 4]), record) for at, record in whole_records(data)]


def keys_of(record: MetadataRecord) -> set[str]:
    return {key for key, _ in decode_changes(record.body)}


def start(data_dir: Path) -> dict[str, Any]:
    """Return what a start finds. Raises CannotOpen."""
    files = OpenFiles()
    try:
        return {key: value.data for key, value in recover_metadata(files, data_dir).entries.items()}
    finally:
        files.close()


def carry_out(data_dir: Path) -> repair.MetadataRepair:
    found = repair.plan(data_dir)
    assert found
    repair.repair(data_dir, *found)
    return found[0]


def flip_both(path: Path, at: int) -> None:
    for each in (path, copy_of(path)):
        flip(each, at)


@pytest.mark.timeout(240)
def test_a_byte_damaged_in_both_costs_at_most_what_its_record_had_changed_and_that_is_named(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for sync in ("fsync", "fdatasync"):
        monkeypatch.setattr(f"os.{sync}", lambda fd: None)  # there are thousands, and no power cut is meant
    path, whole = metadata_log(data_dir), tmp_path / "whole"
    state, there, was_clean = start_of(data_dir), records(data_dir), (data_dir / "clean-stop").exists()
    shutil.copytree(data_dir, whole)
    for at in range(read_log(path).size):
        flip_both(path, at)
        hit = next(number for number, (_, end, _) in enumerate(there) if at < end)
        if was_clean or hit < len(there) - 1:
            with pytest.raises(CannotOpen, match=f"qb repair {data_dir}"):
                start(data_dir)
            planned = carry_out(data_dir)
            changed, later = keys_of(there[hit][2]), {key for each in there[hit + 1 :] for key in keys_of(each[2])}
            found, doubtful = start(data_dir), {key for keys in planned.doubtful.values() for key in keys}
            for key, value in state.items():
                if not key.startswith(("log/", "topic/")) and found.get(key) != value:
                    assert key in changed - later
                    assert key in doubtful or key not in found
            assert later.isdisjoint(doubtful)
            assert verify(data_dir).findings == []
            assert repair.plan(data_dir) is None
            assert len(list(data_dir.glob("metadata-damaged-1/*/*.log"))) == 2
        shutil.rmtree(data_dir)
        shutil.copytree(whole, data_dir)


def start_of(data_dir: Path) -> dict[str, Any]:
    return {key: value.data for key, value in read_newest(data_dir / "metadata").entries.items()}


def test_nothing_is_changed_unless_it_is_asked_for(data_dir: Path) -> None:
    flip_both(metadata_log(data_dir), 100)
    before = {path: path.read_bytes() for path in data_dir.rglob("*") if path.is_file()}
    for _ in range(2):
        assert repair.plan(data_dir)
    assert {path: path.read_bytes() for path in data_dir.rglob("*") if path.is_file()} == before


def test_a_directory_that_a_start_takes_is_left_alone(data_dir: Path) -> None:
    flip(metadata_log(data_dir), 100)
    assert repair.plan(data_dir) is None


def test_every_system_call_of_a_repair_may_be_the_last(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, whole = metadata_log(data_dir), tmp_path / "whole"
    flip_both(path, records(data_dir)[-2][0] + 40)
    shutil.copytree(data_dir, whole)

    class Killed(BaseException):
        pass

    def count_down(real: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return real(*arguments, **named)

        return call

    left, steps, wanted = 10**9, 0, None
    for name in ("open", "pwrite", "replace", "fdatasync", "fsync", "mkdir"):
        monkeypatch.setattr(f"os.{name}", count_down(getattr(__import__("os"), name)))
    while True:
        found = repair.plan(data_dir)
        assert found
        left = steps
        try:
            repair.repair(data_dir, *found)
        except Killed:
            left = 10**9
            if repair.plan(data_dir):
                carry_out(data_dir)
            wanted = wanted or start(data_dir)
            assert start(data_dir) == wanted
            steps += 1
            shutil.rmtree(data_dir)
            shutil.copytree(whole, data_dir)
            continue
        left = 10**9
        break
    assert start(data_dir) == wanted
    assert steps > 10


@pytest.mark.parametrize("loss", ["files", "directories", "content", "format 1"])
def test_metadata_that_is_gone_is_made_of_the_topics_that_are_there(data_dir: Path, loss: str) -> None:
    path = metadata_log(data_dir)
    for each in (path, copy_of(path)):
        if loss == "directories":
            shutil.rmtree(each.parent)
        elif loss == "files":
            each.unlink()
        else:
            each.write_bytes(b"")
    if loss == "format 1":
        (data_dir / "format").write_text("qb-storage 1\n")
        with pytest.raises(CannotOpen, match="older format"):
            repair.plan(data_dir)
        return
    planned = carry_out(data_dir)
    assert planned.kept == 0
    assert start(data_dir).keys() == {"topic/t"}
    topic = msgspec.json.decode(start(data_dir)["topic/t"], type=Topic)
    assert (topic.partitions, topic.retention_hours, topic.retention_bytes) == (1, 0, 0)


async def test_messages_are_there_at_their_offsets_after_a_repair_and_new_ones_come_behind_them(tmp_path: Path) -> None:
    await fill(tmp_path)
    data_dir = tmp_path / "data"
    flip_both(metadata_log(data_dir), records(data_dir)[0][0] + 40)
    carry_out(data_dir)
    async with running(open_engine(tmp_path)) as engine:
        log = engine.log("t", 0)
        assert await everything(log) == [b"one", b"two"]
        await store(log, b"three")
        assert log.end_offset == 3
    assert verify(data_dir).findings == []


async def test_partitions_whose_making_is_lost_keep_their_messages(tmp_path: Path) -> None:
    await fill(tmp_path)
    async with running(open_engine(tmp_path)) as engine:
        await engine.add_partitions("t", 4)
        await store(engine.log("t", 2), b"in the third")
    edit_metadata(tmp_path / "data", {"last": 1})
    hits = [at for at, _, record in records(tmp_path / "data") if "topic/t" in keys_of(record)]
    flip_both(metadata_log(tmp_path / "data"), hits[-1] + 40)
    assert carry_out(tmp_path / "data").topics == ["t has messages in 3 partitions, not in 1"]
    async with running(open_engine(tmp_path)) as engine:
        assert await everything(engine.log("t", 2)) == [b"in the third"]


async def test_a_log_whose_beginning_was_noted_in_what_is_lost_is_served(tmp_path: Path) -> None:
    async with opened(tmp_path, segment_bytes=200) as engine:
        for number in range(8):
            await store(engine.log("t", 0), b"%d" % number * 100)
        await engine.metadata.put("before", 1)
        await drop_segments(engine.log("t", 0), 4)
        first = engine.log("t", 0).first_offset
        await engine.metadata.put("behind", 1)
    data_dir = tmp_path / "data"
    hit = next(at for at, _, record in records(data_dir)[1:] if "log/t/0" in keys_of(record))
    flip_both(metadata_log(data_dir), hit + 40)
    carry_out(data_dir)
    async with running(open_engine(tmp_path, segment_bytes=200)) as engine:
        assert engine.log("t", 0).first_offset == first
        assert len(await everything(engine.log("t", 0))) == 8 - first


async def test_a_stage_whose_end_is_lost_is_forgotten_and_an_open_one_can_be_committed(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        ended, still_open = await engine.begin_stage("x", None), await engine.begin_stage("y", None)
        await engine.delete_stages([ended.stage_id])
        await engine.metadata.put("behind", 1)
    data_dir = tmp_path / "data"
    hits = [at for at, _, record in records(data_dir) if f"stage/{ended.stage_id}" in keys_of(record)]
    flip_both(metadata_log(data_dir), hits[-1] + 40)
    planned = carry_out(data_dir)
    assert set(planned.doubtful["stage"]) == {f"stage/{each.stage_id}" for each in (ended, still_open)}
    assert verify(data_dir).findings == []
    async with running(open_engine(tmp_path)) as engine:
        assert engine.stages().keys() == {still_open.stage_id}
        assert engine.stages()[still_open.stage_id].failure is None


async def test_a_topic_whose_deletion_is_lost_is_refused_until_it_is_deleted(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        await engine.create_topic(Topic(topic="gone"))
        await engine.metadata.flush()
        await engine.delete_topic("gone")
        await engine.metadata.put("behind", 1)
    data_dir = tmp_path / "data"
    hits = [at for at, _, record in records(data_dir) if "topic/gone" in keys_of(record)]
    flip_both(metadata_log(data_dir), hits[-1] + 40)
    assert "topic/gone" in carry_out(data_dir).doubtful["topic"]
    async with running(open_engine(tmp_path)) as engine:
        with pytest.raises(LogDamaged):
            engine.log("gone", 0).check_writable()
        engine.log("t", 0).check_writable()
        await engine.delete_topic("gone")
        assert engine.topics().keys() == {"t"}
