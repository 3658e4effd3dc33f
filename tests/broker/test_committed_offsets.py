"""Committed offsets on the real engine: range-checked, all or none, there again after a reopening."""

from __future__ import annotations

import errno

import pytest
import trio

from qb.core.groups.committed_offsets import CommittedOffset, OffsetCommit, OffsetStore
from qb.core.wire.errors import BadName, Internal, OffsetOutOfRange, UnknownGroup
from qb.storage.metadata.metadata_log import MetadataLog
from qb.storage.metadata.metadata_records import decode_changes
from tests.support.stores import opened


def at(offset, partition=0, topic="t", first=0, end=100):
    return OffsetCommit(topic, partition, offset, first, end)


@pytest.fixture
async def engine(tmp_path):
    async with opened(tmp_path) as engine:
        yield engine


@pytest.fixture
def offsets(engine):
    return OffsetStore(engine.metadata)


async def test_what_was_committed_is_there_and_says_when(offsets):
    assert offsets.committed("g", "t", 0) is None
    await offsets.commit("g", [at(7)], now_ms=1234)
    assert offsets.committed("g", "t", 0) == CommittedOffset(7, 1234)
    await offsets.commit("g", [at(9)], now_ms=1235)
    assert offsets.committed("g", "t", 0) == CommittedOffset(9, 1235)


async def test_going_back_is_allowed(offsets):
    await offsets.commit("g", [at(7)], now_ms=1)
    await offsets.commit("g", [at(0)], now_ms=2)
    assert offsets.committed("g", "t", 0) == CommittedOffset(0, 2)


async def test_groups_topics_and_partitions_do_not_disturb_each_other(offsets):
    await offsets.commit("g", [at(1, 0), at(2, 1), at(3, 10), at(4, 2), at(5, 0, "u")], now_ms=1)
    await offsets.commit("gg", [at(6)], now_ms=2)
    assert [(*each, committed.offset) for each, committed in offsets.of_group("g").items()] == [
        ("t", 0, 1),
        ("t", 1, 2),
        ("t", 2, 4),
        ("t", 10, 3),
        ("u", 0, 5),
    ]
    assert list(offsets.of_group("gg").values()) == [CommittedOffset(6, 2)]
    assert sorted(offsets.groups()) == ["g", "gg"]


@pytest.mark.parametrize("offset", [10, 15, 20])
async def test_from_the_first_kept_offset_to_the_end_all_are_accepted(offsets, offset):
    await offsets.commit("g", [at(offset, first=10, end=20)], now_ms=1)
    assert offsets.committed("g", "t", 0).offset == offset


@pytest.mark.parametrize("offset", [-1, 9, 21])
async def test_one_offset_out_of_range_refuses_the_whole_commit(offsets, offset):
    with pytest.raises(OffsetOutOfRange) as refused:
        await offsets.commit("g", [at(5, 0), at(offset, 1, first=10, end=20)], now_ms=1)
    assert (refused.value.partition, refused.value.first, refused.value.end) == (1, 10, 20)
    assert offsets.of_group("g") == {}
    assert sorted(offsets.groups()) == []


async def test_a_bad_group_name_is_refused(offsets):
    with pytest.raises(BadName):
        await offsets.commit("g/t", [at(1)], now_ms=1)


async def test_the_commits_of_one_request_share_a_transaction(engine, offsets, monkeypatch):
    transactions = []
    commit = MetadataLog.commit

    def counting(log, body, entries):
        transactions.append({key for key, _ in decode_changes(body)})
        return commit(log, body, entries)

    monkeypatch.setattr(MetadataLog, "commit", counting)
    await offsets.commit("g", [at(1, partition) for partition in range(20)], now_ms=1)
    assert transactions == [{f"offset/g/t/{partition}" for partition in range(20)}]


async def test_of_commits_in_flight_at_once_the_later_one_stays(offsets):
    async with trio.open_nursery() as nursery:
        for offset in range(50):
            nursery.start_soon(offsets.commit, "g", [at(offset)], offset)
            await trio.lowlevel.checkpoint()  # it has been given, and is not durable yet
    assert offsets.committed("g", "t", 0).offset == 49


async def test_a_commit_that_returned_is_there_after_a_reopening(tmp_path):
    async with opened(tmp_path) as engine:
        await OffsetStore(engine.metadata).commit("g", [at(7, 0), at(8, 11)], now_ms=5)
    async with opened(tmp_path) as engine:
        offsets = OffsetStore(engine.metadata)
        assert sorted(offsets.groups()) == ["g"]
        assert offsets.of_group("g") == {("t", 0): CommittedOffset(7, 5), ("t", 11): CommittedOffset(8, 5)}


async def test_a_deleted_group_is_gone_for_good_and_others_are_not(tmp_path):
    async with opened(tmp_path) as engine:
        offsets = OffsetStore(engine.metadata)
        await offsets.commit("g", [at(7), at(8, 1)], now_ms=5)
        await offsets.commit("h", [at(9)], now_ms=5)
        await offsets.delete_group("g")
        assert sorted(offsets.groups()) == ["h"]
        assert offsets.committed("g", "t", 0) is None
        with pytest.raises(UnknownGroup):
            await offsets.delete_group("g")
    async with opened(tmp_path) as engine:
        assert list(OffsetStore(engine.metadata).groups()) == ["h"]


async def test_offsets_go_with_their_topic(offsets):
    await offsets.commit("g", [at(7), at(8, 0, "tt")], now_ms=5)
    await offsets.commit("h", [at(9, 3)], now_ms=5)
    await offsets.delete_topic("t")
    assert sorted(offsets.groups()) == ["g"]
    assert list(offsets.of_group("g")) == [("tt", 0)]
    await offsets.delete_topic("t")


async def test_a_start_drops_the_offsets_of_topics_that_are_not_there(tmp_path):
    async with opened(tmp_path) as engine:
        await OffsetStore(engine.metadata).commit("g", [at(7), at(8, 0, "deleted")], now_ms=5)
    async with opened(tmp_path) as engine:
        await OffsetStore(engine.metadata).keep_only(engine.topics())
    async with opened(tmp_path) as engine:
        assert list(OffsetStore(engine.metadata).of_group("g")) == [("t", 0)]


async def test_a_deletion_that_failed_has_deleted_nothing(engine, offsets, monkeypatch):
    def broken(*_):
        raise OSError(errno.EIO, "disk I/O error")

    await offsets.commit("g", [at(7)], now_ms=5)
    with monkeypatch.context() as patch:
        patch.setattr(MetadataLog, "commit", broken)
        with pytest.raises(Internal):
            await offsets.delete_group("g")
    assert offsets.of_group("g") == {("t", 0): CommittedOffset(7, 5)}
    await offsets.delete_group("g")
    assert sorted(offsets.groups()) == []
