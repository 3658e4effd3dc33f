"""One damage to one data directory, chosen by a seed."""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random
from typing import NamedTuple


class Damage(NamedTuple):
    """What was done."""

    kind: str
    file: str  # in the data directory
    what: str  # in words

    def __str__(self) -> str:
        return f"{self.file}: {self.what}"


def files_of(root: Path) -> list[Path]:
    """Return every file, in the same order each time."""
    return sorted(path for path in root.rglob("*") if path.is_file())


def damage(root: Path, random: Random) -> Damage:
    """Do one damage: to a file's bytes, one time out of five to names, one to the metadata and its copy."""
    files = files_of(root)
    if (chosen := random.random()) < 0.2:
        return random.choice(NAMES)(root, files, random)
    if chosen > 0.8:
        return random.choice((same_place, two_spots))(root, files, random)
    path = random.choice([path for path in files if path.stat().st_size])
    kind = random.choice(list(BYTES))
    data = path.read_bytes()
    while True:
        changed, what = BYTES[kind](data, random)
        if changed != data:
            break
    path.write_bytes(changed)
    return Damage(kind, path.relative_to(root).as_posix(), what)


# Bytes


def _place(data: bytes, random: Random) -> int:
    """Return where: half the time within what was written, which zeros of room that is kept ready may follow."""
    written = len(data.rstrip(b"\0")) or len(data)
    return random.randrange(written if random.random() < 0.8 else len(data))


def _range(data: bytes, random: Random) -> tuple[int, int]:
    start = _place(data, random)
    length = random.choice([1, random.randrange(1, 64), random.randrange(1, len(data) + 1), 512, 4096])
    return start, min(len(data), start + length)


def flip(data: bytes, random: Random) -> tuple[bytes, str]:
    """Flip one bit."""
    at, bit = _place(data, random), random.randrange(8)
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :], f"bit {bit} of byte {at} flipped"


def zero(data: bytes, random: Random) -> tuple[bytes, str]:
    """Fill a range with zeros."""
    start, end = _range(data, random)
    return data[:start] + bytes(end - start) + data[end:], f"bytes {start} to {end} zeroed"


def truncate(data: bytes, random: Random) -> tuple[bytes, str]:
    """Cut the end off."""
    at = _place(data, random)
    return data[:at], f"cut at byte {at}"


def delete(data: bytes, random: Random) -> tuple[bytes, str]:
    """Take a range out."""
    start, end = _range(data, random)
    return data[:start] + data[end:], f"bytes {start} to {end} deleted"


def overwrite(data: bytes, random: Random) -> tuple[bytes, str]:
    """Write chance over a range."""
    start, end = _range(data, random)
    return data[:start] + random.randbytes(end - start) + data[end:], f"bytes {start} to {end} overwritten"


def duplicate(data: bytes, random: Random) -> tuple[bytes, str]:
    """Write a range once more behind itself."""
    start, end = _range(data, random)
    return data[:end] + data[start:], f"bytes {start} to {end} doubled"


BYTES = {
    "flip": flip,
    "zero": zero,
    "truncate": truncate,
    "delete": delete,
    "overwrite": overwrite,
    "double": duplicate,
}


# Both copies of the metadata


def same_place(root: Path, files: list[Path], random: Random) -> Damage:
    """Damage the metadata and its copy at the same place."""
    return _pair(root, "same place", [random.choice(list(BYTES))] * 2, [random.random()] * 2)


def two_spots(root: Path, files: list[Path], random: Random) -> Damage:
    """Damage the metadata at one place and its copy at another."""
    kinds = random.choices(list(BYTES), k=2)
    return _pair(root, "two spots", kinds, [random.random(), random.random()])


def _pair(root: Path, name: str, kinds: list[str], seeds: list[float]) -> Damage:
    """Damage both files; equal kinds and seeds give the same bytes."""
    whats = []
    for directory, kind, seed in zip(("metadata", "metadata-copy"), kinds, seeds, strict=True):
        (path,) = (root / directory).glob("*.log")
        data = path.read_bytes()
        chance = Random(seed)
        while True:
            changed, what = BYTES[kind](data, chance)
            if changed != data:
                break
        path.write_bytes(changed)
        whats.append(f"{directory} {what}")
    return Damage(name, "metadata", "; ".join(whats))


# Names


def remove(root: Path, files: list[Path], random: Random) -> Damage:
    """Remove a file."""
    path = random.choice(files)
    path.unlink()
    return Damage("remove", path.relative_to(root).as_posix(), "removed")


def swap(root: Path, files: list[Path], random: Random) -> Damage:
    """Swap two files of a kind."""
    path = random.choice([path for path in files if path.suffix])
    other = random.choice([each for each in files if each.suffix == path.suffix and each != path])
    one, two = path.read_bytes(), other.read_bytes()
    path.write_bytes(two)
    other.write_bytes(one)
    return Damage("swap", path.relative_to(root).as_posix(), f"swapped with {other.relative_to(root).as_posix()}")


def empty(root: Path, files: list[Path], random: Random) -> Damage:
    """Leave nothing in a file."""
    path = random.choice([path for path in files if path.stat().st_size])
    path.write_bytes(b"")
    return Damage("empty", path.relative_to(root).as_posix(), "emptied")


def copy(root: Path, files: list[Path], random: Random) -> Damage:
    """Put a file of a kind in the place of another."""
    path = random.choice([path for path in files if path.suffix])
    others = [each for each in files if each.suffix == path.suffix and each.read_bytes() != path.read_bytes()]
    other = random.choice(others)
    shutil.copyfile(other, path)
    return Damage("copy", path.relative_to(root).as_posix(), f"replaced by {other.relative_to(root).as_posix()}")


def rename(root: Path, files: list[Path], random: Random) -> Damage:
    """Give a numbered file another number."""
    path = random.choice([path for path in files if path.name[:20].isdigit()])
    number = random.choice([0, int(path.name[:20]) + 1, random.randrange(10**6)])
    target = path.with_name(f"{number:020}{path.suffix}")
    if target == path:
        target = path.with_name(f"{number + 7:020}{path.suffix}")
    path.replace(target)
    return Damage("rename", path.relative_to(root).as_posix(), f"renamed to {target.name}")


def remove_directory(root: Path, files: list[Path], random: Random) -> Damage:
    """Remove a directory with all that is in it."""
    path = random.choice(sorted({path.parent for path in files} - {root}))
    shutil.rmtree(path)
    return Damage("rmdir", path.relative_to(root).as_posix(), "removed with its files")


def add(root: Path, files: list[Path], random: Random) -> Damage:
    """Put a file there that does not belong."""
    directory = random.choice(sorted({path.parent for path in files}))
    name = random.choice(
        ["notes.txt", f"{random.randrange(1000):020}.log.bak", "core", f"{5:020}.idx", "x.log", "y.new"]
    )
    target = directory / name
    existed = target.exists()
    target.write_bytes(random.randbytes(100))
    file = target.relative_to(root).as_posix()
    return Damage("add", file, "replaced by chance" if existed else "added")


NAMES = [remove, remove, swap, empty, copy, rename, remove_directory, add]
