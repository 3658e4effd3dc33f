"""What a start makes of the metadata that it finds without a copy: whole, cut by a kill, or damaged."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

from qb.storage.clean_stop import NAME
from qb.storage.files import CannotOpen, OpenFiles
from qb.storage.metadata import metadata_records
from qb.storage.metadata.metadata_copy import MetadataCopy
from qb.storage.metadata.metadata_files import read_log
from qb.storage.metadata.metadata_log import create_log
from qb.storage.metadata.metadata_records import HEAD
from qb.storage.metadata.metadata_recovery import recover_metadata
from qb.storage.metadata.noted_record import NAME as NOTED
from qb.storage.verification import verify
from tests.support.stores import edit_metadata, metadata_log, open_engine, opened

KEYS = {"subscription/s": {"topic": "t", "floor": 12}, "offset/g/t/0": {"offset": 50}, "group": [1, None, "ä"]}
Facts = dict[str, tuple[Any, int]]


class Stops(dict[str, Path]):
    """Two copies of a data directory with the same state: `clean` was stopped, `killed` was not."""

    states: list[Facts]  # after the snapshot, and after each record


@pytest.fixture(autouse=True)
def no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MetadataCopy, "follow", lambda *_: None)
    monkeypatch.setattr(MetadataCopy, "finish", lambda *_: None)


@pytest.fixture
def stops(tmp_path: Path) -> Stops:
    made = Stops(clean=tmp_path / "clean" / "data", killed=tmp_path / "killed" / "data")
    trio.run(fill, tmp_path, made)
    return made


async def fill(tmp_path: Path, made: Stops) -> None:
    async with opened(tmp_path / "clean") as engine:
        made.states = [{}, facts_of(engine)]
        for key, value in KEYS.items():
            await engine.metadata.put(key, value)
            made.states.append(facts_of(engine))
        await engine.metadata.delete("group")
        made.states.append(facts_of(engine))
        shutil.copytree(made["clean"], made["killed"])


def facts_of(engine: Any) -> Facts:
    return {key: (entry.value, entry.version) for key, entry in engine.metadata.under("").items()}


def files_of(data_dir: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in data_dir.rglob("*") if path.is_file() and path.name != "lock"}


def put_back(files: dict[Path, bytes]) -> None:
    for path, data in files.items():
        path.write_bytes(data)


def start(data_dir: Path) -> tuple[Facts, list[str]]:
    """What a start finds, and what it says of it. Raises CannotOpen."""
    engine = open_engine(data_dir.parent)
    engine.close()
    return facts_of(engine), besides_the_copy(engine.recovery.notes)


def besides_the_copy(notes: Sequence[Any]) -> list[Any]:
    """What was noted, but for the copy that these tests do without."""
    return [note for note in notes if "metadata-copy" not in str(note)]


def recovered(data_dir: Path) -> tuple[set[str], list[str]]:
    """The same without the topics, for tests that do it a thousand times."""
    files = OpenFiles()
    found = recover_metadata(files, data_dir)
    files.close()
    return set(found.entries), besides_the_copy(found.notes)


def flips(path: Path, end: int) -> Iterator[int]:
    """Flip one bit of each byte of a file, one after another."""
    whole = path.read_bytes()
    for at in range(end):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :])
        yield at
    path.write_bytes(whole)


def record_starts(path: Path, size: int) -> list[int]:
    starts, data = [0], path.read_bytes()
    while (end := starts[-1] + HEAD.unpack_from(data, starts[-1])[0]) < size:
        starts.append(end)
    return starts


@pytest.mark.parametrize("kind", ["clean", "killed"])
def test_a_start_finds_all_that_was_durable_and_has_nothing_to_say(stops: Stops, kind: str) -> None:
    assert verify(stops[kind]).findings == besides_the_copy(verify(stops[kind]).notes) == []
    assert start(stops[kind]) == (stops.states[-1], [])
    assert start(stops[kind]) == (stops.states[-1], [])


def test_a_clean_stop_leaves_a_proof_and_the_next_start_takes_it_away(stops: Stops) -> None:
    assert (stops["clean"] / NAME).exists()
    assert not (stops["killed"] / NAME).exists()
    start(stops["clean"])
    assert not (stops["clean"] / NAME).exists()


def test_after_a_clean_stop_a_flip_of_any_byte_is_refused_and_left_as_it_is(stops: Stops) -> None:
    data_dir = stops["clean"]
    path = metadata_log(data_dir)
    count = 0
    for at in flips(path, path.stat().st_size):
        before = files_of(data_dir)
        with pytest.raises(CannotOpen, match=rf"{path.name} is damaged at byte \d+: .* restore"):
            recovered(data_dir)
        assert files_of(data_dir) == before, at
        (finding,) = verify(data_dir).findings
        assert finding.file == str(path)
        assert finding.position <= at
        count += 1
    assert count > 300
    assert start(data_dir) == (stops.states[-1], [])


def test_after_a_clean_stop_a_file_that_ends_elsewhere_is_refused(stops: Stops) -> None:
    data_dir = stops["clean"]
    path = metadata_log(data_dir)
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(CannotOpen, match=rf"{path.name} is damaged at byte"):
            recovered(data_dir)
        assert verify(data_dir).findings
    path.write_bytes(whole + b"more")
    keys, (note,) = recovered(data_dir)
    assert keys == set(stops.states[-1])
    assert f"damaged at byte {len(whole)}: 4 bytes stand behind the last record" in note


def test_after_a_kill_a_flip_is_refused_and_only_in_the_last_record_cut_and_reported(stops: Stops) -> None:
    data_dir = stops["killed"]
    path, whole = metadata_log(data_dir), files_of(data_dir)
    contents = read_log(path)
    last = record_starts(path, contents.size)[-1]
    outcomes = set()
    for at in flips(path, contents.size + 50):
        findings, notes = verify(data_dir).findings, besides_the_copy(verify(data_dir).notes)
        try:
            keys, said = recovered(data_dir)
        except CannotOpen as error:
            assert f"{path.name} is damaged" in str(error)
            assert findings
            outcomes.add("refused")
        else:
            assert at >= last, "only the last record, and the room behind it"
            assert len(said) == 1
            assert "if it was acked, it is lost" in said[0]
            assert [note.file for note in notes] == [str(path)]
            assert keys - set(stops.states[-1]) <= {"group"}, "whole or not at all"
            outcomes.add("cut")
            put_back(whole)
    assert outcomes == {"refused", "cut"}


def test_a_kill_at_any_byte_of_a_record_leaves_all_records_before_it(stops: Stops) -> None:
    data_dir = stops["killed"]
    path, whole = metadata_log(data_dir), files_of(data_dir)
    contents = read_log(path)
    seen = []
    for size in range(contents.size + 1):
        for room in (b"", b"\0" * 100):
            put_back(whole)
            path.write_bytes(whole[path][:size] + room)
            (data_dir / NOTED).unlink()  # it was another one when a shorter file was written
            if size < contents.snapshot_size:
                with pytest.raises(CannotOpen, match="damaged at byte 0"):
                    recovered(data_dir)
                continue
            keys, notes = recovered(data_dir)
            assert keys in [set(state) for state in stops.states]
            cut = whole[path][path.stat().st_size : size]
            assert bool(notes) == bool(cut.strip(b"\0")), "zeros are room that was kept ready; all else is reported"
            seen.append(keys)
    assert {*map(frozenset, seen)} == {frozenset(state) for state in stops.states}
    assert recovered(data_dir) == (set(stops.states[-1]), [])


def test_after_a_kill_only_the_last_record_may_be_missing_and_it_is_reported(stops: Stops) -> None:
    data_dir = stops["killed"]
    path, whole = metadata_log(data_dir), files_of(data_dir)
    starts = [*starts_of_records(path)]
    whole_size = starts[-1] + HEAD.unpack_from(whole[path], starts[-1])[0]
    for size in range(starts[-2], whole_size + 1):
        put_back(whole)
        path.write_bytes(whole[path][:size])
        found = [str(each) for each in (*verify(data_dir).findings, *besides_the_copy(verify(data_dir).notes))]
        if size < starts[-1]:
            assert "this is an older state of the metadata" in found[0]
            with pytest.raises(CannotOpen, match="older state of the metadata"):
                recovered(data_dir)
            continue
        keys, notes = recovered(data_dir)
        assert keys == set(stops.states[-1 if size >= whole_size else -2])
        assert bool(notes) == bool(found) == (size < whole_size)
        assert all("if it was acked, it is lost" in note for note in notes)
        assert recovered(data_dir) == (keys, []), "it is reported once"


def starts_of_records(path: Path) -> Iterator[int]:
    data, at = path.read_bytes(), 0
    while at + HEAD.size <= len(data) and (length := HEAD.unpack_from(data, at)[0]):
        yield at
        at += length


def test_a_note_of_the_last_record_that_is_damaged_or_lost_takes_out_nothing(stops: Stops) -> None:
    data_dir = stops["killed"]
    whole = files_of(data_dir)
    for damage in (b"", b"rubbish", bytes([whole[data_dir / NOTED][0] ^ 1]) + whole[data_dir / NOTED][1:]):
        put_back(whole)
        (data_dir / NOTED).write_bytes(damage)
        assert [note.file for note in besides_the_copy(verify(data_dir).notes)] == [str(data_dir / NOTED)]
        keys, notes = recovered(data_dir)
        assert keys == set(stops.states[-1])
        assert [note for note in notes if NOTED in note] == notes != []
        assert recovered(data_dir) == (keys, [])
    put_back(whole)
    (data_dir / NOTED).unlink()
    assert recovered(data_dir) == (set(stops.states[-1]), [])


@pytest.mark.parametrize("room", [b"", b"\0" * 100, b"rubbish"])
def test_a_snapshot_that_lacks_a_part_is_refused(stops: Stops, monkeypatch: pytest.MonkeyPatch, room: bytes) -> None:
    monkeypatch.setattr(metadata_records, "PART_BYTES", 20)
    path = metadata_log(stops["killed"])
    entries = read_log(path).entries
    create_log(path.parent, entries)
    starts = record_starts(path, path.stat().st_size)
    assert len(starts) > 2
    assert read_log(path).entries == entries
    whole = path.read_bytes()
    for end in starts[1:]:
        path.write_bytes(whole[:end] + room)
        with pytest.raises(CannotOpen, match=rf"damaged at byte {end}: the snapshot that begins the file is not whole"):
            recovered(stops["killed"])


def test_a_damaged_proof_is_reported_and_the_metadata_speaks_for_itself(stops: Stops) -> None:
    data_dir = stops["clean"]
    whole = files_of(data_dir)
    for _ in flips(data_dir / NAME, len(whole[data_dir / NAME])):
        assert verify(data_dir).findings
        keys, (note,) = recovered(data_dir)
        assert keys == set(stops.states[-1])
        assert f"{NAME} is damaged" in note
        assert not (data_dir / NAME).exists()


def test_a_file_that_the_last_clean_stop_did_not_leave_is_refused(stops: Stops) -> None:
    path = metadata_log(stops["clean"])
    older = path.read_bytes()
    path.rename(path.with_name("0" * 19 + "7.log"))
    with pytest.raises(CannotOpen, match="damaged at byte 0"):
        start(stops["clean"])
    path.with_name("0" * 19 + "7.log").unlink()
    path.write_bytes(older)
    text = (stops["clean"] / NAME).read_bytes()
    edit_metadata(stops["clean"], {"more": 1})
    (stops["clean"] / NAME).write_bytes(text)  # a proof of another time
    with pytest.raises(CannotOpen, match="not as at the last clean stop"):
        start(stops["clean"])


def test_what_an_interrupted_snapshot_left_is_removed_and_the_newest_file_counts(stops: Stops) -> None:
    data_dir = stops["killed"]
    path = metadata_log(data_dir)
    (path.parent / f"{3:020}.new").write_bytes(b"half a snapsh")
    older = path.parent / f"{0:020}.log"
    newer = path.parent / f"{9:020}.log"
    assert path == older
    newer.write_bytes(b"")
    with pytest.raises(CannotOpen, match=rf"{newer.name} is damaged"):
        start(data_dir)
    assert older.exists(), "an older file is no substitute, and is not thrown away"
    newer.unlink()
    assert start(data_dir) == (stops.states[-1], [])
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("kind", ["clean", "killed"])
@pytest.mark.parametrize("loss", ["file", "directory", "content"])
def test_metadata_that_is_missing_is_refused_with_a_line_that_says_what_to_do(
    stops: Stops, kind: str, loss: str
) -> None:
    path = metadata_log(stops[kind])
    if loss == "directory":
        shutil.rmtree(path.parent)
    elif loss == "file":
        path.unlink()
    else:
        path.write_bytes(b"")
    for _ in range(2):
        with pytest.raises(
            CannotOpen, match=r"(has no metadata: restore it|damaged at byte 0.* restore).* from a backup"
        ):
            start(stops[kind])
        assert verify(stops[kind]).findings


def test_a_directory_with_topics_that_has_lost_its_format_file_is_refused(stops: Stops) -> None:
    (stops["clean"] / "format").unlink()
    for _ in range(2):
        with pytest.raises(CannotOpen, match="has no file named 'format'"):
            start(stops["clean"])
