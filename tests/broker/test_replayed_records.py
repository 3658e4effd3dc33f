"""What is remembered of producers and transactions is derived from records alone: another machine derives the same."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from qb.core.settings import ServerSettings
from qb.core.transactions.remembered_transactions import RememberedTransactions
from qb.storage.engine import ProducerRange
from qb.storage.local_engine import LocalEngine
from qb.storage.log import producer_ranges
from qb.storage.maintenance import drop_expired, drop_segments
from qb.storage.metadata.metadata_records import Entries, apply_changes, decode_changes, decode_record, length_of
from qb.storage.stages.transaction_records import CommittedTransaction, TransactionRecord
from tests.support.stores import HOUR, NOON, Clock, metadata_log, opened, store

SETTINGS = ServerSettings(transaction_memory_hours=1, max_remembered_transactions=4)
YEARS = 10 * 365 * 24 * HOUR


def finished(name: str, committed_ms: int) -> TransactionRecord:
    receipt = CommittedTransaction(transaction=name, number=None, timestamp=committed_ms)
    return TransactionRecord(transaction=name, number=None, receipt=receipt)


def replayed(data_dir: Path) -> Entries:
    """The state that the records of the metadata give, applied one after another."""
    data, at, entries = metadata_log(data_dir).read_bytes(), 0, {}
    while at < len(data) and (length := int.from_bytes(data[at : at + 4])):
        assert length == length_of(data[at : at + 24])
        apply_changes(entries, list(decode_changes(decode_record(data[at : at + length]).body)))
        at += length
    return entries


def memory_of(engine: LocalEngine) -> dict[str, Any]:
    """What an engine and a broker on it remember of transactions and of producers."""
    remembered = RememberedTransactions(engine.metadata, SETTINGS)
    names = [f"t{number}" for number in range(6)]
    return {name: remembered.get(name) for name in names} | {"ranges": list(engine.log("t", 0).ranges())}


@pytest.mark.parametrize("later", [-YEARS, YEARS])
async def test_a_copy_of_the_records_gives_the_same_memory_by_any_clock(tmp_path: Path, later: int) -> None:
    async with opened(tmp_path / "here", segment_bytes=200) as engine:
        remembered = RememberedTransactions(engine.metadata, SETTINGS)
        await remembered.write([finished(f"t{number}", NOON + number) for number in range(4)])
        await remembered.forget_old(NOON + HOUR + 2)  # t0 and t1
        await remembered.write([finished("t4", NOON + HOUR)])
        for number in range(5):
            await store(engine.log("t", 0), b"x" * 50, producer_id=7, first_number=number)
        here = memory_of(engine)
        shutil.copytree(tmp_path / "here" / "data", tmp_path / "there" / "data")
        state = {key: (entry.value, entry.version) for key, entry in engine.metadata.under("").items()}
    assert [name for name in here if here[name]] == ["t2", "t3", "t4", "ranges"]
    async with opened(tmp_path / "there", Clock(NOON + later)) as engine:
        assert memory_of(engine) == here
        assert {key: (each.value, each.version) for key, each in engine.metadata.under("").items()} == state


RUNS = [(chance.randrange(1, 7), chance.randrange(1, 4)) for chance in [Random(1)] for _ in range(60)]


async def memory_after(
    directory: Path, clock: Clock, segment_bytes: int, restart_every: int, drop_every: int
) -> list[ProducerRange]:
    """What a log remembers of producers after the same batches, wherever its segments begin and end."""
    numbers = Counter[int]()
    for start in range(0, len(RUNS), restart_every):
        async with opened(directory, clock, segment_bytes=segment_bytes) as engine:
            log = engine.log("t", 0)
            for at, (producer, count) in enumerate(RUNS[start : start + restart_every], start):
                numbers[producer] += at % 3 == 0  # a number that is left out begins a range
                await store(log, *[b"x" * 20] * count, producer_id=producer, first_number=numbers[producer])
                numbers[producer] += count
                clock.now += HOUR
                if at % drop_every == drop_every - 1:
                    await drop_expired(log, clock.now, 2, 0, drop_segments)
            first, ranges = log.first_offset, list(log.ranges())
    assert (first > 0) == (segment_bytes < 1_000), "retention has dropped something where there was something to drop"
    return ranges


@pytest.mark.parametrize(
    ("segment_bytes", "restart_every", "drop_every"), [(1, 60, 1), (150, 60, 5), (150, 7, 4), (1, 11, 3), (10**6, 9, 2)]
)
async def test_what_is_remembered_of_producers_depends_on_no_segment_restart_retention_or_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, segment_bytes: int, restart_every: int, drop_every: int
) -> None:
    for limit, small in (("MAX_PRODUCERS", 4), ("WINDOW", 20), ("MAX_RANGES", 9)):
        monkeypatch.setattr(producer_ranges, limit, small)
    plain = await memory_after(tmp_path / "plain", Clock(NOON), 10**6, len(RUNS), len(RUNS))
    assert any(not each.count for each in plain), "something was dropped, and that is remembered"
    later = Clock(NOON + YEARS)
    assert await memory_after(tmp_path / "other", later, segment_bytes, restart_every, drop_every) == plain


async def test_forgetting_is_a_record_that_another_machine_replays(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        remembered = RememberedTransactions(engine.metadata, SETTINGS)
        await remembered.write([finished(f"t{number}", NOON + number) for number in range(4)])
        assert len([key for key in replayed(tmp_path / "data") if key.startswith("transaction/")]) == 4
        await remembered.make_room(2)
        left = {key for key in replayed(tmp_path / "data") if key.startswith("transaction/")}
        assert left == set(engine.metadata.under("transaction/")) == {"transaction/t2", "transaction/t3"}
        await remembered.forget_old(NOON + 2 * HOUR)
        assert not [key for key in replayed(tmp_path / "data") if key.startswith("transaction/")]
