"""The simulated disk keeps what was synced, and nothing else for sure."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from random import Random

import pytest

from tests.simulation.disk import Fault, SimulatedDisk

RUNS = 200


def after_power_cut(prepare: Callable[[SimulatedDisk], None]) -> set[frozenset[tuple[str, bytes]]]:
    """Return what files there can be after a power cut, of many chances."""
    found = set()
    for seed in range(RUNS):
        disk = SimulatedDisk("/d", Random(seed))
        prepare(disk)
        disk.lose_power()
        found.add(frozenset(disk.files().items()))
    return found


def write(disk: SimulatedDisk, path: str, data: bytes, *, sync: bool = True, name: bool = True) -> int:
    """Make a file; `sync` its bytes, and its `name`."""
    fd = disk.open(path, os.O_RDWR | os.O_CREAT)
    disk.pwrite(fd, data, 0)
    if sync:
        disk.fsync(fd)
    if name:
        disk.fsync(disk.open("/d", os.O_RDONLY))
    return fd


def test_what_was_synced_is_always_there() -> None:
    assert after_power_cut(lambda disk: write(disk, "/d/a", b"abc")) == {frozenset({("/d/a", b"abc")})}


def test_a_file_whose_directory_was_not_synced_may_have_no_name() -> None:
    found = after_power_cut(lambda disk: write(disk, "/d/a", b"abc", name=False))
    assert found == {frozenset(), frozenset({("/d/a", b"abc")})}


def test_of_a_write_that_was_not_synced_nothing_a_part_or_all_is_there() -> None:
    found = after_power_cut(lambda disk: write(disk, "/d/a", b"abc", sync=False))
    assert {content for files in found for _, content in files} == {b"", b"a", b"ab", b"abc"}


def test_a_write_that_syncs_itself_stays_though_others_go() -> None:
    def prepare(disk: SimulatedDisk) -> None:
        fd = write(disk, "/d/a", b"")
        disk.pwrite(fd, b"lost", 0)
        disk.pwrite(fd, b"kept", 4, durably=True)

    contents = {content for files in after_power_cut(prepare) for _, content in files}
    assert {content[4:] for content in contents} == {b"kept"}
    assert b"\0\0\0\0kept" in contents


def test_a_rename_is_whole_or_not_there() -> None:
    def prepare(disk: SimulatedDisk) -> None:
        write(disk, "/d/new", b"two")
        write(disk, "/d/old", b"one")
        disk.rename("/d/new", "/d/old")

    assert after_power_cut(prepare) == {
        frozenset({("/d/old", b"one"), ("/d/new", b"two")}),
        frozenset({("/d/old", b"two")}),
    }


def test_after_a_sync_that_failed_a_later_one_proves_nothing() -> None:
    def prepare(disk: SimulatedDisk) -> None:
        fd = write(disk, "/d/a", b"")
        disk.pwrite(fd, b"abc", 0)
        disk.faults.append(Fault("fsync", errno.EIO))
        with pytest.raises(OSError, match="Input/output"):
            disk.fsync(fd)
        disk.fsync(fd)

    assert {content for files in after_power_cut(prepare) for _, content in files} == {b"", b"abc"}


def test_a_full_disk_takes_what_there_is_room_for() -> None:
    disk = SimulatedDisk("/d", Random(0), capacity=4)
    fd = disk.open("/d/a", os.O_RDWR | os.O_CREAT)
    assert disk.pwrite(fd, b"abcdef", 0) == 4
    with pytest.raises(OSError, match="No space"):
        disk.pwrite(fd, b"more", 4)
    assert disk.pwrite(fd, b"over", 0) == 4


def test_a_lock_lasts_as_long_as_its_process() -> None:
    disk = SimulatedDisk("/d", Random(0))
    write(disk, "/d/lock", b"")
    disk.flock(disk.open("/d/lock", os.O_RDWR))
    with pytest.raises(BlockingIOError):
        disk.flock(disk.open("/d/lock", os.O_RDWR))
    disk.end_process()
    disk.flock(disk.open("/d/lock", os.O_RDWR))
