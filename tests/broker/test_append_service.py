"""The one way to append: where a message goes, who may write where, and that there is no other way."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path
from zlib import crc32

import pytest

from qb.core.broker.append_service import AppendService
from qb.core.broker.outgoing_messages import BadBatchMessage, OutgoingMessage, StoredReceipt
from qb.core.broker.storage_use import StorageUse
from qb.core.rights.known_users import KnownUsers
from qb.core.settings import ServerSettings
from qb.core.wire.errors import BadName, BadRequest, LogPoisoned, MessageTooLarge, UnknownPartition, UnknownTopic
from qb.core.wire.frames import decode_frame
from qb.core.wire.message_rules import LATEST_MS
from qb.storage.engine import AppendRun, Topic
from tests.support.brokers import ROOT
from tests.support.stores import opened


def service(engine, **settings):
    async def create(name, made_by):
        await engine.create_topic(Topic(topic=name))

    return AppendService(engine, ServerSettings(**settings), create, StorageUse(engine, KnownUsers()))


def receivers_of_append(path: Path) -> set[str]:
    """Return what `append` is called of with two arguments or more: a list takes one, a log and a stage take more."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    longer = [call.func for call in calls if len(call.args) + len(call.keywords) > 1]
    return {ast.unparse(f.value) for f in longer if isinstance(f, ast.Attribute) and f.attr == "append"}


def test_nothing_but_the_service_appends_to_a_log():
    found = {
        str(path.relative_to(ROOT)): receivers
        for room in ("core", "doors")
        for path in sorted((ROOT / room).rglob("*.py"))
        if (receivers := receivers_of_append(path))
    }
    assert found == {
        "core/broker/append_service.py": {"self", "log"},
        "core/broker/numbered_publishes.py": {"self._appends"},
        "core/transactions/open_stages.py": {"stage"},
        "doors/binary/publish_runs.py": {"self._publishes"},
    }


async def test_a_partition_is_as_wanted_or_by_key_or_by_turn(tmp_path):
    async with opened(tmp_path) as engine:
        await engine.create_topic(Topic(topic="p", partitions=3))
        appends = service(engine)
        log, limit, same_key = appends.route("p", 2, "k")
        assert (log.partition, limit, same_key) == (2, None, False), "all that follow with the same partition"
        log, limit, same_key = appends.route("p", None, "k")
        assert (log.partition, limit, same_key) == (crc32(b"k") % 3, None, True), "all that follow with the same key"
        turns = [appends.route("p", None, None) for _ in range(6)]
        assert [log.partition for log, _, _ in turns] == [0, 1, 2, 0, 1, 2]
        assert {limit for _, limit, _ in turns} == {1}, "the next one is the next partition's turn"
        log, limit, same_key = appends.route("t", None, "k")
        assert (log.partition, limit, same_key) == (0, None, False), "there is only one"
        for partition in (-1, 3):
            with pytest.raises(UnknownPartition):
                appends.route("p", partition, None)


async def test_a_topic_that_is_missing_is_made_only_if_that_is_set(tmp_path):
    async with opened(tmp_path) as engine:
        with pytest.raises(UnknownTopic):
            await service(engine).publish("new", OutgoingMessage(b"x"))
        with pytest.raises(BadName):
            await service(engine, auto_create_topics=True).publish("no/name", OutgoingMessage(b"x"))
        receipt = await service(engine, auto_create_topics=True).publish("new", OutgoingMessage(b"x"))
        assert (receipt.topic, receipt.offset, receipt.durability) == ("new", 0, "fsynced")


async def test_a_run_that_a_log_refuses_is_answered_and_never_raises(tmp_path):
    async with opened(tmp_path) as engine:
        log, answers = engine.log("t", 0), []
        log.refuse(LogPoisoned("no more"))
        run = AppendRun(b"", (0,), 0)

        def done(runs, error, append_ms):
            answers.append((runs, type(error)))
            return lambda: answers.append("sent")

        service(engine).append(log, run, done)
        assert answers == [((run,), LogPoisoned), "sent"]


BAD = {
    "reserved": (OutgoingMessage(b"x", properties={"key": "k"}), BadRequest),
    "too large": (OutgoingMessage(b"x" * 1_001), MessageTooLarge),
    "no such partition": (OutgoingMessage(b"x", partition=1), UnknownPartition),
}


@pytest.mark.parametrize(("bad", "error"), BAD.values(), ids=BAD)
async def test_one_bad_message_keeps_its_batch_from_being_stored(tmp_path, bad, error):
    async with opened(tmp_path) as engine:
        appends = service(engine, max_message_size=1_000)
        with pytest.raises(BadBatchMessage) as refused:
            await appends.publish_many("t", [OutgoingMessage(b"fine"), bad], 1)
        assert (refused.value.index, type(refused.value.error)) == (1, error)
        with pytest.raises(error):
            await appends.publish("t", bad)
        with pytest.raises(BadRequest):
            await appends.publish("t", OutgoingMessage(b"fine"), LATEST_MS + 1)
        assert engine.log("t", 0).next_offset == 0


async def test_a_batch_is_one_run_for_each_partition_and_each_message_has_its_receipt(tmp_path):
    async with opened(tmp_path) as engine:
        await engine.create_topic(Topic(topic="p", partitions=4))
        messages = [OutgoingMessage(b"%d" % n, key=f"k{n % 5}" if n % 2 else None) for n in range(2_500)]
        receipts = await service(engine).publish_many("p", messages, 77)
        assert Counter(type(receipt) for receipt in receipts) == {StoredReceipt: 2_500}
        for message, receipt in zip(messages[::100], receipts[::100], strict=True):
            chunk = await engine.log("p", receipt.partition).read(receipt.offset, 1)
            frame = decode_frame(chunk.data, chunk.positions[0])
            assert (frame.body, frame.properties.get("key"), frame.timestamp) == (message.body, message.key, 77)
