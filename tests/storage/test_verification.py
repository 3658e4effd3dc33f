"""The proof of a whole data directory, and what it says of one that is not."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from qb.storage.engine import Topic
from qb.storage.files import CannotOpen
from qb.storage.log.sealed_batches import seal
from qb.storage.repair import check_repairable
from qb.storage.verification import Finding, verify
from tests.support.stores import NOON, Clock, as_killed, frames, indexes, logs, metadata_log, opened, store


@pytest.fixture
async def data(tmp_path: Path) -> Path:
    """Two closed segments and a newest one with three batches."""
    clock = Clock()
    async with opened(tmp_path, clock, segment_bytes=278) as engine:
        await engine.create_topic(Topic(topic="empty", partitions=3))
        for number in range(10):
            clock.now += 1000
            await store(engine.log("t", 0), b"%d" % number, b"+", producer_id=1, first_number=1 + 2 * number)
    assert len(logs(tmp_path)) == 5
    return tmp_path


def files(directory: Path) -> dict[str, tuple[int, int]]:
    found = {path: path.stat() for path in directory.rglob("*") if path.is_file()}
    return {str(path): (stat.st_mtime_ns, stat.st_size) for path, stat in found.items()}


async def test_a_whole_directory_has_no_findings_and_is_not_touched(data: Path) -> None:
    before = files(data)
    report = verify(data / "data")
    assert (report.findings, report.notes) == ([], [])
    assert (report.topics, report.partitions, report.segments) == (2, 4, 8)
    assert (report.messages, report.batches) == (20, 18)
    assert report.bytes == sum(path.stat().st_size for path in (data / "data").rglob("*.log"))
    assert files(data) == before


async def test_a_flip_of_any_byte_of_a_log_is_found_with_its_file_and_batch(data: Path) -> None:
    for path in (logs(data)[0], logs(data)[-1]):
        whole = path.read_bytes()
        for at in range(len(whole)):
            flipped = bytearray(whole)
            flipped[at] ^= 1 << at % 8
            path.write_bytes(flipped)
            report = verify(data / "data")
            found = [*report.findings, *report.notes]
            assert any(finding.file == str(path) and finding.position <= at for finding in found), at
            if path == logs(data)[0]:
                assert report.findings, at
        path.write_bytes(whole)
    assert verify(data / "data").findings == []


async def test_a_flip_of_any_byte_of_an_index_is_found_at_its_entry(data: Path) -> None:
    path = indexes(data)[0]
    whole = path.read_bytes()
    for at in range(len(whole)):
        flipped = bytearray(whole)
        flipped[at] ^= 1
        path.write_bytes(flipped)
        (finding,) = verify(data / "data").findings
        assert (finding.file, finding.position) == (str(path), at // 16 * 16)


async def test_a_torn_tail_and_a_short_index_of_the_newest_segment_are_notes(data: Path) -> None:
    as_killed(data / "data")
    newest, index = logs(data)[-1], indexes(data)[-1]
    size = newest.stat().st_size
    newest.write_bytes(newest.read_bytes() + frames(20, [b"never sealed"])[0])
    index.write_bytes(index.read_bytes()[:-16])
    report = verify(data / "data")
    assert report.findings == []
    assert {(note.file, note.position) for note in report.notes} == {
        (str(newest), size),
        (str(index), index.stat().st_size),
    }


async def test_a_torn_tail_of_a_closed_segment_is_a_finding(data: Path) -> None:
    closed = logs(data)[0]
    closed.write_bytes(closed.read_bytes()[:-1])
    findings = verify(data / "data").findings
    assert [finding.file for finding in findings if finding.position][:1] == [str(closed)]


@pytest.mark.parametrize("spoil", ["index", "segment", "partition", "topic"])
async def test_what_is_missing_is_found(data: Path, spoil: str) -> None:
    if spoil == "index":
        indexes(data)[-1].unlink()
    elif spoil == "segment":
        logs(data)[1].unlink()
    elif spoil == "partition":
        for path in (data / "data/topics/empty/1").iterdir():
            path.unlink()
        (data / "data/topics/empty/1").rmdir()
    else:
        os.rename(data / "data/topics/empty", data / "elsewhere")
    assert verify(data / "data").findings


async def test_time_that_goes_back_and_frames_that_do_not_add_up_are_found(data: Path) -> None:
    newest = logs(data)[-1]
    position = newest.stat().st_size
    frame = bytearray(frames(20, [b"body"])[0])
    frame[27] = 9  # properties_length
    with newest.open("ab") as file:
        file.write(bytes(frame) + seal([bytes(frame)], 20, 1, NOON, []))
    indexes(data)[-1].unlink()
    found = verify(data / "data").findings
    assert Finding(str(newest), position, "the lengths in this frame do not add up") in found
    assert any(finding.position == position and "append time" in finding.what for finding in found)


async def test_metadata_that_is_damaged_or_missing_is_found(data: Path) -> None:
    path = metadata_log(data / "data")
    path.write_bytes(b"no records" * 100)
    (finding,) = verify(data / "data").findings
    assert (finding.file, finding.position) == (str(path), 0)
    assert "read from the copy" in finding.what
    shutil.rmtree(data / "data" / "metadata-copy")
    (finding,) = verify(data / "data").findings
    assert (finding.file, finding.position) == (str(path), 0)
    path.unlink()
    (finding,) = verify(data / "data").findings
    assert "has no metadata: restore it from a backup" in finding.what


async def test_other_directories_and_newer_formats_are_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(CannotOpen, match="nowhere"):
        verify(tmp_path / "nowhere")
    (data / "data" / "format").write_text("qb-storage 3\n")
    with pytest.raises(CannotOpen, match="version 3"):
        verify(data / "data")


async def test_a_directory_without_its_format_file_is_named_as_what_it_is(tmp_path: Path) -> None:
    async with opened(tmp_path):
        pass
    (tmp_path / "data" / "format").unlink()
    (tmp_path / "empty").mkdir()
    for name, words in (
        ("data", "yet it is not empty: restore that file from a backup"),
        ("empty", "it has no file named 'format'"),
        ("missing", "there is no such directory"),
    ):
        for ask in (verify, check_repairable):
            with pytest.raises(CannotOpen, match=words):
                ask(tmp_path / name)
