"""After a clean stop every log ends where it was left, or it is damaged; after a kill its last batch may be torn."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
import trio

from qb.core.wire.errors import LogPoisoned
from qb.storage.clean_stop import NAME, BadProof, LogEnd, read_proof, write_proof
from qb.storage.engine import Topic
from qb.storage.verification import verify
from tests.support.disk import patch_sync
from tests.support.stores import as_killed, everything, logs, open_engine, opened, running, store

BODIES = [b"one", b"two", b"three"]


async def _fill(directory: Path) -> None:
    async with opened(directory, segment_bytes=178) as engine:
        await engine.create_topic(Topic(topic=".other", partitions=2))
        for body in BODIES:
            await store(engine.log("t", 0), body)


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """The place of a data directory that was stopped; its log has a closed segment and a newest one."""
    trio.run(_fill, tmp_path / "whole")
    assert len(logs(tmp_path / "whole")) == 2
    return tmp_path / "whole"


def status(directory: Path) -> tuple[str, str | None]:
    engine = open_engine(directory)
    engine.close()
    assert engine.log(".other", 0).state().status == "ok", "the others are served"
    state = engine.log("t", 0).state()
    return state.status, state.reason


def test_a_proof_is_read_as_it_was_written_and_any_flip_of_it_is_found(tmp_path: Path) -> None:
    assert read_proof(tmp_path) is None
    ends = {"a": LogEnd(1, 2), "topics/t/0": LogEnd(2**40, 2**32 - 1)}
    write_proof(tmp_path, ends)
    assert read_proof(tmp_path) == ends
    whole = (tmp_path / NAME).read_bytes()
    for bit in range(len(whole) * 8):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        (tmp_path / NAME).write_bytes(flipped)
        with pytest.raises(BadProof, match="is damaged"):
            read_proof(tmp_path)


def test_every_log_is_in_the_proof(stopped: Path) -> None:
    proof = read_proof(stopped / "data")
    assert proof is not None
    newest = logs(stopped)[-1]
    assert proof["topics/t/0"] == LogEnd(newest.stat().st_size, 3)
    assert {key for key in proof if key.startswith("topics/")} == {
        "topics/t/0",
        "topics/%2Eother/0",
        "topics/%2Eother/1",
    }
    assert len(proof) == 4


def test_after_a_clean_stop_a_flip_of_any_byte_of_the_newest_segment_is_damage_and_is_left_alone(
    stopped: Path, tmp_path: Path
) -> None:
    whole = logs(stopped)[-1].read_bytes()
    for at in range(len(whole)):
        spoilt = tmp_path / "spoilt"
        shutil.rmtree(spoilt, ignore_errors=True)
        shutil.copytree(stopped, spoilt)
        newest = logs(spoilt)[-1]
        newest.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        flipped = newest.read_bytes()
        assert any(finding.file.startswith(str(newest.parent)) for finding in verify(spoilt / "data").findings), at
        assert status(spoilt)[0] == "damaged", at
        assert newest.read_bytes() == flipped


def test_after_a_clean_stop_a_log_that_ends_elsewhere_is_damaged(stopped: Path, tmp_path: Path) -> None:
    whole = logs(stopped)[-1].read_bytes()
    for size in [*range(0, len(whole), 5), len(whole) - 1, len(whole) + 5]:
        spoilt = tmp_path / "spoilt"
        shutil.rmtree(spoilt, ignore_errors=True)
        shutil.copytree(stopped, spoilt)
        logs(spoilt)[-1].write_bytes((whole + b"?????")[:size])
        assert verify(spoilt / "data").findings
        assert status(spoilt)[0] == "damaged"


def test_after_a_clean_stop_a_newest_segment_that_is_gone_is_noticed(stopped: Path) -> None:
    newest = logs(stopped)[-1]
    newest.unlink()
    newest.with_suffix(".idx").unlink()
    assert verify(stopped / "data").findings
    kind, reason = status(stopped)
    assert kind == "damaged"
    assert reason is not None
    assert "but the last clean stop left it with 3, as clean-stop proves" in reason


def test_after_a_kill_the_last_batch_alone_is_cut_and_reported(stopped: Path) -> None:
    as_killed(stopped / "data")
    newest = logs(stopped)[-1]
    newest.write_bytes(newest.read_bytes()[:-1])
    (note,) = [note for note in verify(stopped / "data").notes if note.file == str(newest)]
    assert "if it was acked, it is lost" in note.what
    engine = open_engine(stopped)
    engine.close()
    assert any("if it was acked, it is lost" in note for note in engine.recovery.notes)
    assert engine.log("t", 0).end_offset == 2


async def test_a_start_after_a_clean_stop_goes_on_and_a_kill_then_is_a_kill(stopped: Path, tmp_path: Path) -> None:
    async with running(open_engine(stopped)) as engine:
        assert engine.recovery.notes == ()
        await store(engine.log("t", 0), b"four")
        shutil.copytree(stopped, tmp_path / "killed")
    async with running(open_engine(tmp_path / "killed")) as engine:
        assert await everything(engine.log("t", 0)) == [*BODIES, b"four"]


async def test_a_topic_that_is_made_anew_is_not_measured_by_its_namesake(stopped: Path) -> None:
    async with running(open_engine(stopped)) as engine:
        await engine.delete_topic("t")
        await engine.create_topic(Topic(topic="t"))
        await store(engine.log("t", 0), b"new")
        assert engine.log("t", 0).state().status == "ok"
    assert status(stopped) == ("ok", None)


async def test_a_poisoned_log_is_not_in_the_proof(stopped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(open_engine(stopped)) as engine:
        with monkeypatch.context() as patch:

            def sync(fd: int) -> None:
                raise OSError(errno.EIO, "Input/output error")

            patch_sync(patch, sync)
            with pytest.raises(LogPoisoned):
                await store(engine.log("t", 0), b"refused")
    proof = read_proof(stopped / "data")
    assert proof is not None
    assert "topics/t/0" not in proof
    assert "topics/%2Eother/0" in proof
    assert status(stopped) == ("ok", None)


async def test_a_log_that_is_not_synced_for_every_ack_is_synced_before_it_is_proved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, real = [], os.fdatasync

    def sync(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd)

    async with opened(tmp_path, fsync_on_write=False) as engine:
        await store(engine.log("t", 0), b"x")
        monkeypatch.setattr(os, "fdatasync", sync)
    assert synced.index(str(logs(tmp_path)[0])) < synced.index(str(tmp_path / "data" / f"{NAME}.new"))
    async with opened(tmp_path) as engine:
        assert await everything(engine.log("t", 0)) == [b"x"]
