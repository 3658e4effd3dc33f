"""Machines on this machine: network namespaces joined by a bridge, and small disks in files. Linux, and root.

A program runs itself inside isolated(): a network and mounts of its own, which end with its last process.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

ISOLATED = "CAMPAIGN_ISOLATED"  # in the environment of a program that runs inside isolated()
_NETWORK = "10.99.0"
_HERE = f"{_NETWORK}.254"  # this process


def run(*command: str | Path) -> None:
    """Run a command. Raises OSError with what it said."""
    done = subprocess.run([str(each) for each in command], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(map(str, command))}: {done.stderr.strip()}")


def isolated(command: Sequence[str]) -> list[str]:
    """Return a command that runs this one with a network and mounts of its own."""
    return ["unshare", "--net", "--mount", "--", "env", f"{ISOLATED}=1", *command]


def can_isolate() -> str:
    """Return why there can be no namespaces of our own; empty if there can."""
    missing = [each for each in ("unshare", "nsenter", "ip") if shutil.which(each) is None]
    if missing:
        return f"{', '.join(missing)} not found"
    done = subprocess.run(isolated(["ip", "link", "add", "qb-test", "type", "bridge"]), capture_output=True, text=True)
    return done.stderr.strip() or ("" if done.returncode == 0 else "unshare fails")


def can_mount() -> str:
    """Return why there can be no disks in files; empty if there can."""
    missing = [each for each in ("mkfs.ext4", "mount", "umount") if shutil.which(each) is None]
    if missing:
        return f"{', '.join(missing)} not found"
    return "" if Path("/dev/loop-control").exists() else "no loop devices"


class Machines:
    """Network namespaces with an address each. `here` is this process."""

    def __init__(self, names: Sequence[str]) -> None:
        """Make them. Raises OSError."""
        self.addresses = {"here": _HERE} | {name: f"{_NETWORK}.{number}" for number, name in enumerate(names, 1)}
        self._cuts: list[tuple[str, str]] = []
        Path("/run/netns").mkdir(exist_ok=True)
        run("mount", "-t", "tmpfs", "qb-test", "/run/netns")
        run("ip", "link", "set", "lo", "up")
        run("ip", "link", "add", "qb-bridge", "type", "bridge")
        run("ip", "address", "add", f"{_HERE}/24", "dev", "qb-bridge")
        run("ip", "link", "set", "qb-bridge", "up")
        for number, name in enumerate(names, 1):
            self._add(f"qb{number}", name)

    def _add(self, link: str, name: str) -> None:
        run("ip", "netns", "add", name)
        run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
        run("ip", "link", "set", link, "master", "qb-bridge", "up")
        run("ip", "-n", name, "address", "add", f"{self.addresses[name]}/24", "dev", "eth0")
        for each in ("lo", "eth0"):
            run("ip", "-n", name, "link", "set", each, "up")

    def prefix(self, name: str) -> list[str]:
        """Return what comes before a command that runs there; it keeps its process id."""
        return ["nsenter", f"--net=/run/netns/{name}", "--"]

    def cut(self, sender: str, receiver: str) -> None:
        """Lose every packet that one sends to the other."""
        self._route("add", sender, receiver)
        self._cuts.append((sender, receiver))

    def heal(self) -> None:
        """Let all packets arrive again."""
        while self._cuts:
            self._route("del", *self._cuts.pop())

    def _route(self, what: str, sender: str, receiver: str) -> None:
        where = [] if sender == "here" else ["-n", sender]
        run("ip", *where, "route", what, "blackhole", f"{self.addresses[receiver]}/32")


class ImageDisk:
    """A small file system in a file: it can be full, and it can be put back to what it was at a power cut."""

    def __init__(self, directory: Path, megabytes: int) -> None:
        """Make it, and mount it at a directory. Raises OSError."""
        self.directory = directory
        self._image, self._copy = directory.with_suffix(".image"), directory.with_suffix(".copy")
        directory.mkdir(parents=True)
        with self._image.open("wb") as image:
            image.truncate(megabytes << 20)
        run("mkfs.ext4", "-q", "-F", "-m", "0", self._image)
        self._mount()

    def _mount(self) -> None:
        run("mount", "-o", "loop", self._image, self.directory)

    @property
    def free_bytes(self) -> int:
        found = os.statvfs(self.directory)
        return found.f_bavail * found.f_frsize

    def fill(self) -> None:
        """Leave no room."""
        filler = os.open(self.directory / "filler", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        size = 1 << 20
        while size:
            try:
                os.write(filler, bytes(size))
            except OSError:
                size //= 2
        os.close(filler)

    def free(self) -> None:
        """Give the room back."""
        (self.directory / "filler").unlink(missing_ok=True)

    def note_power_cut(self) -> None:
        """Keep what is on the disk now and not only in memory; the processes that write to it must be stopped.

        The kernel may write meanwhile, so it is copied until two readings agree.
        """
        for _ in range(20):
            run("cp", "--sparse=always", self._image, self._copy)
            if _has_the_data_of(self._copy, self._image):
                return
        raise OSError(f"{self._image} did not hold still")

    def cut_power(self) -> None:
        """Have what note_power_cut() kept, and nothing since; the processes that wrote to it must have ended."""
        run("umount", self.directory)
        self._copy.replace(self._image)
        self._mount()

    def unmount(self) -> None:
        """Take it away, at the latest when it is not used any more."""
        run("umount", "--lazy", self.directory)


def _has_the_data_of(copy: Path, image: Path) -> bool:
    """Say whether a file has what another one holds, whose holes are not read: nearly all of it is holes."""
    with copy.open("rb") as copied, image.open("rb") as original:
        return all(os.pread(copied.fileno(), len(data), at) == data for at, data in _data_in(original.fileno()))


def _data_in(fd: int) -> Iterator[tuple[int, bytes]]:
    at, size = 0, os.fstat(fd).st_size
    while at < size:
        try:
            at = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:
            return  # only a hole is left
        stop = os.lseek(fd, at, os.SEEK_HOLE)
        while at < stop:
            data = os.pread(fd, min(1 << 20, stop - at), at)
            yield at, data
            at += len(data)
