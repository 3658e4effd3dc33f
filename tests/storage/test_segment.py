"""One .log/.idx pair, without an engine round it."""

from __future__ import annotations

import os
import tempfile
from array import array
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qb.core.wire.frames import frame_length
from qb.storage.commit.batch_commit import BatchCommit, CommitQueue, CommittedBatch, assemble
from qb.storage.files import OpenFiles
from qb.storage.log.recent_batches import StoredBatch
from qb.storage.log.record_positions import RecordPositions
from qb.storage.log.sealed_batches import BadBatch
from qb.storage.log.segment import Segment
from qb.storage.log.segment_index import ENTRY, IndexFile, encode
from tests.support.disk import patch_write
from tests.support.stores import NOON, make_run


@pytest.fixture
def files() -> OpenFiles:
    return OpenFiles(capacity=4)


def fill(
    files: OpenFiles,
    directory: Path,
    batches: list[list[bytes]],
    base: int = 100,
    times: list[int] | None = None,
    sync: bool = False,
    segment: Segment | None = None,
) -> Segment:
    """A segment with these batches, one a second unless their times are given."""
    segment = segment or Segment.create(files, directory, base, NOON, ())
    for number, bodies in enumerate(batches):
        run = make_run(segment.next_offset, bodies)
        now = times[number] if times else NOON + 1000 * number
        batch, ranges = assemble([run], now)
        commit = BatchCommit(
            ("t", 0), files, segment, segment.size, batch, ranges, CommitQueue(), sync=sync, new_segment_ranges=None
        )
        assert isinstance(commit.carry_out(), CommittedBatch)
        segment.index.append(encode(batch.positions, now, commit.position))
        segment.extend(commit.end, batch.next_offset, now)
    return segment


def frames(batches: list[StoredBatch]) -> list[tuple[int, bytes]]:
    return [
        (batch.first_offset + number, batch.data[at : at + frame_length(batch.data, at)])
        for batch in batches
        for number, at in enumerate(batch.positions)
    ]


BATCHES = [[b"a", b"bb"], [b"c" * 500], [b"d", b"e" * 90, b"f"]]


@pytest.mark.parametrize("max_bytes", [1, 100, 700, 5000])
def test_a_read_returns_whole_batches_from_the_one_that_holds_the_offset(
    files: OpenFiles, tmp_path: Path, max_bytes: int
) -> None:
    segment = fill(files, tmp_path, BATCHES)
    firsts = [100, 100, 102, 103, 103, 103]
    for offset, first in enumerate(firsts, 100):
        found = segment.read(offset, max_bytes, segment.size)
        assert found[0].first_offset == first
        assert [batch.first_offset for batch in found[1:]] == [batch.next_offset for batch in found[:-1]]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_believed_index_leads_to_the_same_batches_as_walking(data: st.DataObject) -> None:
    batches = data.draw(
        st.lists(st.lists(st.integers(0, 300).map(lambda size: b"x" * size), min_size=1, max_size=9), min_size=1)
    )
    steps = data.draw(st.lists(st.integers(0, 1), min_size=len(batches), max_size=len(batches)))
    with tempfile.TemporaryDirectory() as directory:
        files = OpenFiles(capacity=4)
        segment = fill(files, Path(directory), batches, times=list(accumulate(steps, initial=NOON))[1:])
        for offset in range(segment.base_offset, segment.next_offset):
            max_bytes = data.draw(st.sampled_from([1, 200, 10_000]))
            found = []
            for believed in (True, False):
                segment.index.believed = believed
                segment._starts.clear()
                found.append(frames(segment.read(offset, max_bytes, segment.size)))
            by_index, by_walking = found
            assert by_index[: len(by_walking)] == by_walking  # and perhaps more, to where the time changes
            assert offset in [number for number, _ in by_walking]
        files.close()


def test_a_clock_that_stands_still_makes_no_read_larger(
    files: OpenFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qb.storage.log.segment.LONGEST", 1000)
    segment = fill(files, tmp_path, [[b"x" * 100]] * 50, times=[NOON] * 50)
    assert segment.index.believed
    assert sum(len(batch.data) for batch in segment.read(110, 500, segment.size)) < 2000


def test_a_reader_in_the_event_loop_is_refused_when_the_file_would_have_to_be_opened(
    files: OpenFiles, tmp_path: Path
) -> None:
    segment = fill(files, tmp_path, BATCHES)
    files.forget(segment.log_path)
    with pytest.raises(BlockingIOError):
        segment.read(100, 100, segment.size, cached=True)


def test_a_wrong_index_is_rebuilt_when_a_read_meets_it(files: OpenFiles, tmp_path: Path) -> None:
    segment = fill(files, tmp_path, BATCHES)
    good = Path(segment.index_path).read_bytes()
    for bad in (b"\0" * len(good), b"\xff" * len(good), good[16:] + good[:16], good[:20], b""):
        Path(segment.index_path).write_bytes(bad)
        (last,) = segment.read(104, 1, segment.size)
        assert last.first_offset == 103
        assert Path(segment.index_path).read_bytes() == good


def test_a_deleted_index_is_rebuilt_when_a_read_meets_it(files: OpenFiles, tmp_path: Path) -> None:
    segment = fill(files, tmp_path, BATCHES)
    segment.index.write()
    good = Path(segment.index_path).read_bytes()
    files.close()
    Path(segment.index_path).unlink()
    assert segment.read(104, 1, segment.size)[0].first_offset == 103
    assert Path(segment.index_path).read_bytes() == good


def test_every_read_proves_what_it_returns(files: OpenFiles, tmp_path: Path) -> None:
    segment = fill(files, tmp_path, BATCHES)
    segment.read(102, 1, segment.size)
    log = bytearray(Path(segment.log_path).read_bytes())
    log[log.index(b"ccc")] ^= 1
    Path(segment.log_path).write_bytes(log)
    with pytest.raises(BadBatch):
        segment.read(102, 1, segment.size)


def test_a_time_leads_to_the_first_record_of_that_time_or_later(files: OpenFiles, tmp_path: Path) -> None:
    segment = fill(files, tmp_path, BATCHES)
    for time_ms, offset in [(0, 100), (NOON, 100), (NOON + 1, 102), (NOON + 1000, 102), (NOON + 2000, 103)]:
        assert segment.first_at(time_ms, segment.count, segment.size) == offset
    assert segment.first_at(NOON + 2001, segment.count, segment.size) == segment.next_offset


def test_a_time_is_not_believed_from_the_index_alone(files: OpenFiles, tmp_path: Path) -> None:
    segment = fill(files, tmp_path, BATCHES)
    index = Path(segment.index_path)
    times = [entry[0] for entry in ENTRY.iter_unpack(index.read_bytes())]
    index.write_bytes(encode(times, 5))
    assert segment.first_at(NOON + 1000, segment.count, segment.size) == 102


@pytest.mark.parametrize("count", [3, 17, 1000])
def test_index_entries_may_be_counted_from_anywhere(count: int) -> None:
    expected = b"".join([ENTRY.pack(2**40 + 50 * number, NOON) for number in range(count)])
    regular = range(0, 50 * count, 50)
    for positions in (regular, list(regular), array("I", regular), RecordPositions(encode(regular, 7))):
        assert encode(positions, NOON, 2**40) == expected


def test_index_entries_are_position_and_time_of_each_record() -> None:
    assert list(ENTRY.iter_unpack(encode([0, 145, 290], NOON))) == [(0, NOON), (145, NOON), (290, NOON)]
    assert encode([], NOON) == b""


def test_entries_that_the_disk_does_not_take_are_kept_and_written_later(
    files: OpenFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.idx"
    path.touch()
    index = IndexFile(files, str(path))
    index.append(encode([1], NOON))
    index.write()
    with monkeypatch.context() as patch:
        patch_write(patch, lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        index.append(encode([2], NOON))
        index.write()
    assert [index.entry(number) for number in range(3)] == [(1, NOON), (2, NOON), (0, 0)]
    index.append(encode([3], NOON))
    index.write()
    assert path.read_bytes() == encode([1, 2, 3], NOON)


def test_short_batches_have_room_ready_behind_the_log_which_is_given_back(files: OpenFiles, tmp_path: Path) -> None:
    segment = fill(files, tmp_path, [[b"x" * 20_000]], sync=True)
    log = Path(segment.log_path)
    assert log.stat().st_size == segment.size, "a log begins small"
    grown = fill(files, tmp_path, [[b"y"]] * 5, sync=True, segment=segment)
    assert log.stat().st_size > grown.size
    assert not log.read_bytes()[grown.size :].strip(b"\0")
    assert len(frames(grown.read(100, 10**6, grown.size))) == 6
    grown.trim(grown.size)
    assert log.stat().st_size == grown.size
    fill(files, tmp_path, [[b"z"]], sync=True, segment=segment)
    assert log.stat().st_size > segment.size
    segment.cut(segment.size)
    assert log.stat().st_size == segment.size


def test_long_batches_and_unsynced_ones_have_no_room_ready(files: OpenFiles, tmp_path: Path) -> None:
    long = fill(files, tmp_path, [[b"x" * 100_000]] * 3, sync=True)
    assert Path(long.log_path).stat().st_size == long.size
    (tmp_path / "unsynced").mkdir()
    unsynced = fill(files, tmp_path / "unsynced", [[b"x" * 10_000]] * 5)
    assert Path(unsynced.log_path).stat().st_size == unsynced.size


def test_entries_gather_in_memory_and_are_written_in_bulk(files: OpenFiles, tmp_path: Path) -> None:
    path = tmp_path / "x.idx"
    index = IndexFile(files, str(path))
    for number in range(255):
        index.append(encode([number], NOON))
    assert not path.exists()
    assert index.entry(254) == (254, NOON)
    assert not index.is_due
    index.append(encode([255], NOON))
    assert index.is_due
    index.write()
    assert path.read_bytes() == encode(range(256), NOON)
    assert not index.is_due


def test_few_files_stay_open_and_one_in_use_stays_valid(tmp_path: Path) -> None:
    files = OpenFiles(capacity=2)
    paths = [tmp_path / str(number) for number in range(20)]
    for path in paths:
        path.write_bytes(path.name.encode())
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    with files.use(str(paths[0])) as held:
        for path in paths:
            with files.use(str(path)) as fd:
                assert os.pread(fd, 9, 0) == path.name.encode()
        files.forget(str(paths[0]))
        paths[0].unlink()
        assert os.pread(held, 9, 0) == b"0"
    if before:
        assert len(os.listdir("/proc/self/fd")) <= before + 2
    files.close()
    with pytest.raises(OSError):
        os.fstat(held)
