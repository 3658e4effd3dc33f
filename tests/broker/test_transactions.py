"""Transactions: seen as a whole or not at all, once, also when a client or the broker dies or a request is repeated."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from pathlib import Path

import msgspec
import pytest
import trio

from qb.core.wire.frames import HEAD, MessageType, encode_frame
from tests.support.disk import patch_sync, patch_write
from tests.support.peers import Peer, TrioPeer
from tests.support.transaction_peers import Staging, all_bodies, begin, bodies, commit, data
from tests.support.waiting import holds_during, until, until_true

T = MessageType
FOUR = [[b"a", b"b"], [b"c"], [b"d"], [b"e", b"f"]]


async def make_topic(peer: TrioPeer, topic: str = "t", partitions: int = 4) -> None:
    await peer.call("create_topic", topic=topic, partitions=partitions)


async def stage_four(peer: TrioPeer, transaction: str = "x", number: int | None = None) -> Staging:
    """Stage messages for four partitions."""
    stage = await begin(peer, transaction, number)
    for partition, messages in enumerate(FOUR):
        assert await stage.send("t", partition, *messages) == str(stage.given)
    return stage


class Disk:
    """Makes the calls on files whose path contains a word wait, or fail."""

    def __init__(self, patch: pytest.MonkeyPatch, word: str) -> None:
        self.reached, self.go, self.error = threading.Event(), threading.Event(), 0
        self._sync, self._word = os.fdatasync, word
        patch_sync(patch, self._fdatasync)

    def _fdatasync(self, fd: int) -> None:
        if self._word in os.readlink(f"/proc/self/fd/{fd}"):
            self.reached.set()
            assert self.go.wait(30)
            if self.error:
                raise OSError(self.error, os.strerror(self.error))
        self._sync(fd)

    async def is_reached(self) -> None:
        assert await trio.to_thread.run_sync(self.reached.wait, 10)


@contextmanager
def full_disk(patch: pytest.MonkeyPatch, word: str) -> Iterator[list[int]]:
    """Refuse writes to files whose path contains a word; yields the refused ones."""
    refused: list[int] = []
    real = os.pwrite

    def pwrite(fd: int, what: bytes, position: int) -> int:
        if word in os.readlink(f"/proc/self/fd/{fd}"):
            refused.append(fd)
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, what, position)

    with patch.context() as inside:
        patch_write(inside, pwrite)
        yield refused


@pytest.fixture
def impatient(monkeypatch):
    """Commits are answered at the first failed try: they are unfinished."""
    monkeypatch.setattr("qb.core.transactions.unfinished_transactions.PATIENCE", 0)


# Whole or nothing


async def test_nothing_is_seen_before_the_commit_and_all_of_it_after(a_broker):
    async with a_broker() as connect:
        peer = await connect()
        await make_topic(peer)
        await peer.publish("t", b"before", partition="3")
        stage = await stage_four(peer)
        assert await all_bodies(peer, "t", 4) == [[], [], [], [b"before"]]
        receipt = await commit(peer, "x", stage)
        assert await all_bodies(peer, "t", 4) == [*FOUR[:3], [b"before", *FOUR[3]]]
        assert receipt["partitions"] == [
            {"topic": "t", "partition": 0, "first_offset": 0, "last_offset": 1, "messages": 2},
            {"topic": "t", "partition": 1, "first_offset": 0, "last_offset": 0, "messages": 1},
            {"topic": "t", "partition": 2, "first_offset": 0, "last_offset": 0, "messages": 1},
            {"topic": "t", "partition": 3, "first_offset": 1, "last_offset": 2, "messages": 2},
        ]
        assert (receipt["replayed"], receipt["messages"], receipt["durability"]) == (False, 6, "fsynced")


async def test_stages_of_several_peers_for_several_topics_become_one_transaction_in_the_order_named(a_broker):
    async with a_broker() as connect:
        peer, other = await connect(), await connect()
        await make_topic(peer, "t", 1)
        await make_topic(peer, "u", 1)
        first, second = await begin(peer, "x"), await begin(other, "x")
        await second.send("t", 0, b"2")
        await first.send("t", 0, b"1")
        await second.send("u", 0, b"3")
        await commit(peer, "x", first, second)
        assert await bodies(peer, "t") == [b"1", b"2"]
        assert await bodies(peer, "u") == [b"3"]


async def test_what_is_committed_keeps_its_properties_timestamp_and_order(a_broker):
    async with a_broker() as connect:
        peer = await connect()
        await make_topic(peer, "t", 1)
        stage = await begin(peer, "x")
        sent = [
            encode_frame(T.DATA, 77, 1000 + n, {"topic": "t", "key": f"k{n}", "ä": "ö"}, b"%d" % n) for n in range(3)
        ]
        properties = {"stage": stage.stage_id, "topic": "t", "partition": "0", "first": "0"}
        assert (await peer.ask(T.STAGE, 1, b"".join(sent), **properties)).properties["messages"] == "3"
        stage.given = 3
        await commit(peer, "x", stage)
        answer = await peer.ask(T.FETCH, 3, topic="t", offset="0")
        at = 0
        for number, frame in enumerate(sent):
            numbered = frame[:8] + number.to_bytes(8, "big") + frame[16:]
            assert answer.body[at : at + len(frame)] == numbered
            at += len(frame)


async def test_publishes_of_others_are_acked_meanwhile_and_seen_together_with_the_transaction(a_broker, monkeypatch):
    async with a_broker() as connect:
        peer, other = await connect(), await connect()
        await make_topic(peer)
        stage = await stage_four(peer)
        disk = Disk(monkeypatch, "/t/2/")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(commit, peer, "x", stage)
            await disk.is_reached()
            acked = await other.publish("t", b"other", partition="0")
            assert acked.properties["status"] == "success"
            assert int(acked.properties["offset"]) == 2
            assert await all_bodies(other, "t", 4) == [[], [], [], []]
            assert (await other.call("list_transactions"))["committing"] == ["x"]
            disk.go.set()
        assert await all_bodies(other, "t", 4) == [[*FOUR[0], b"other"], *FOUR[1:]]


async def test_a_subscriber_is_pushed_nothing_of_a_transaction_until_it_is_whole(a_broker, monkeypatch):
    async with a_broker() as connect:
        peer, subscriber = await connect(), await connect()
        await make_topic(peer)
        await subscriber.ask(T.CREATE_SUBSCRIPTION, subscription_id="s", topic="t")
        await subscriber.ask(T.SUBSCRIBE, subscription_id="s")
        stage = await stage_four(peer)
        disk = Disk(monkeypatch, "/t/3/")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(commit, peer, "x", stage)
            await disk.is_reached()
            await subscriber.send(T.HEARTBEAT, 5)
            assert (await subscriber.receive()).type == T.HEARTBEAT  # nothing was pushed before it
            disk.go.set()
        pushed = [await subscriber.receive() for _ in range(6)]
        assert sorted(frame.body for frame in pushed) == [b"a", b"b", b"c", b"d", b"e", b"f"]


async def test_an_empty_transaction_is_recorded(a_broker):
    async with a_broker() as connect:
        peer = await connect()
        receipt = await commit(peer, "x")
        assert (receipt["messages"], receipt["partitions"], receipt["replayed"]) == (0, [], False)
        assert await peer.call("begin_transaction", transaction="x") == {"committed": True, "stage": None}


async def test_two_transactions_after_one_another_and_after_a_restart_are_both_there_in_order(a_broker):
    for number in (1, 2, 3):
        async with a_broker() as connect:
            peer = await connect()
            if number == 1:
                await make_topic(peer)
            for part in "ab":
                stage = await stage_four(peer, f"{number}{part}")
                assert (await commit(peer, f"{number}{part}", stage))["messages"] == 6
            assert await all_bodies(peer, "t", 4) == [messages * number * 2 for messages in FOUR]


# Once


async def test_a_commit_that_is_repeated_is_answered_as_the_first_and_publishes_nothing(a_broker):
    async with a_broker() as connect:
        peer = await connect()
        await make_topic(peer)
        stage = await stage_four(peer)
        receipt = await commit(peer, "x", stage)
        assert await commit(peer, "x", stage) == receipt | {"replayed": True}
        assert await commit(peer, "x") == receipt | {"replayed": True}
    async with a_broker() as connect:
        peer = await connect()
        assert await commit(peer, "x", stage) == receipt | {"replayed": True}
        assert await all_bodies(peer, "t", 4) == FOUR


async def test_commits_of_the_same_transaction_at_once_publish_it_once(a_broker, monkeypatch):
    async with a_broker() as connect:
        peer, other = await connect(), await connect()
        await make_topic(peer)
        stage, receipts = await stage_four(peer), []
        disk = Disk(monkeypatch, "/t/2/")

        async def ask(who: TrioPeer) -> None:
            receipts.append(await commit(who, "x", stage))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, peer)
            nursery.start_soon(ask, other)
            await disk.is_reached()
            disk.go.set()
        assert sorted(receipt.pop("replayed") for receipt in receipts) == [False, True]
        assert receipts[0] == receipts[1]
        assert await all_bodies(peer, "t", 4) == FOUR


async def test_a_number_covers_every_smaller_one_across_restarts(a_broker):
    async with a_broker() as connect:
        peer = await connect()
        await make_topic(peer)
        old, new = await stage_four(peer, "q", 4), await stage_four(peer, "q", 5)
        receipt = await commit(peer, "q", new, number=5)
        assert receipt["number"] == 5
        assert (await peer.call("list_transactions"))["stages"] == []  # number 4 can never be committed any more
        assert await old.send("t", 0, b"late") == "UNKNOWN_STAGE"
    async with a_broker() as connect:
        peer = await connect()
        for number in (0, 4, 5):
            answer = await peer.call("begin_transaction", transaction="q", number=number)
            assert answer == {"committed": True, "stage": None}
        assert await commit(peer, "q", number=5) == receipt | {"replayed": True}
        earlier = await commit(peer, "q", old, number=4)
        assert (earlier["replayed"], earlier["number"], earlier["messages"]) == (True, 4, 0)
        stage = await stage_four(peer, "q", 6)
        assert (await commit(peer, "q", stage, number=6))["replayed"] is False
        assert await all_bodies(peer, "t", 4) == [messages * 2 for messages in FOUR]


@pytest.mark.parametrize(("used", "asked"), [(None, 1), (1, None)])
async def test_an_id_is_used_with_numbers_or_without_never_both(a_broker, used, asked):
    async with a_broker() as connect:
        peer = await connect()
        assert (await commit(peer, "x", number=used))["replayed"] is False
        for method, more in (
            ("begin_transaction", {}),
            ("commit_transaction", {"stages": []}),
            ("abort_transaction", {}),
        ):
            assert await peer.call(method, transaction="x", number=asked, **more) == "BAD_REQUEST"


@pytest.mark.parametrize(("transaction", "number", "code"), [
    ("", None, "BAD_NAME"), ("a/b", None, "BAD_NAME"), ("x" * 201, None, "BAD_NAME"), ("ä", None, "BAD_NAME"),
    ("x", -1, "BAD_REQUEST"), ("x", 2**63, "BAD_REQUEST"),
])  # fmt: skip
async def test_a_bad_id_or_number_is_refused(a_broker, transaction, number, code):
    async with a_broker() as connect:
        peer = await connect()
        assert await peer.call("begin_transaction", transaction=transaction, number=number) == code
        assert await peer.call("commit_transaction", transaction=transaction, number=number, stages=[]) == code


# Staging


async def test_a_repeat_is_answered_and_not_stored_again_and_a_gap_is_refused(a_broker):
    async with a_broker() as connect:
        peer = await connect()
        await make_topic(peer, "t", 1)
        stage = await begin(peer, "x")
        assert await stage.send("t", 0, b"1", b"2") == "2"
        assert await stage.send("t", 0, b"3") == "3"
        assert await stage.send("t", 0, b"1", b"2", first=0) == "3"
        assert await stage.send("t", 0, b"3", first=2) == "3"
        assert await stage.send("t", 0, b"3", b"4", first=2) == "OUT_OF_SEQUENCE"
        assert await stage.send("t", 0, b"5", first=4) == "OUT_OF_SEQUENCE"
        await commit(peer, "x", stage)
        assert await bodies(peer, "t") == [b"1", b"2", b"3"]


async def test_a_repeat_with_another_message_is_refused_and_the_stage_goes_on(a_broker):
    async with a_broker() as connect:
        peer, other = await connect(), await connect()
        await make_topic(peer, "t", 2)
        stage = await begin(peer, "x")
        assert await stage.send("t", 0, b"1", b"2") == "2"
        taken_over = Staging(other, stage.stage_id)
        assert await taken_over.send("t", 0, b"1", b"B", first=0) == "OUT_OF_SEQUENCE"
        assert await taken_over.send("t", 1, b"1", b"2", first=0) == "OUT_OF_SEQUENCE"
        assert await stage.send("t", 0, b"3") == "3"
        await commit(peer, "x", stage)
        assert await bodies(peer, "t") == [b"1", b"2", b"3"]


async def test_frames_in_flight_are_taken_in_order_and_a_repeat_of_one_waits_for_it(a_broker, monkeypatch):
    async with a_broker() as connect:
        peer, other = await connect(), await connect()
        await make_topic(peer, "t", 1)
        stage = await begin(peer, "x")
        disk = Disk(monkeypatch, "/staged/")
        properties = {"stage": stage.stage_id, "topic": "t", "partition": "0"}
        for number in range(20):
            await peer.send(T.STAGE, number, data("t", b"%d" % number), first=str(number), **properties)
        await disk.is_reached()
        await other.send(T.STAGE, 1, data("t", b"5"), first="5", **properties)
        await other.send(T.HEARTBEAT, 2)
        assert (await other.receive()).type == T.HEARTBEAT
        disk.go.set()
        answers = [await peer.receive() for _ in range(20)]
        assert [answer.sequence_number for answer in answers] == list(range(20))
        assert answers[-1].properties["messages"] == "20"
        assert int((await other.receive()).properties["messages"]) >= 6
        stage.given = 20
        await commit(peer, "x", stage)
        assert await bodies(peer, "t") == [b"%d" % number for number in range(20)]


@pytest.mark.parametrize(("properties", "body", "code"), [
    ({"topic": "none"}, data("none", b"x"), "UNKNOWN_TOPIC"),
    ({"partition": "1"}, data("t", b"x"), "UNKNOWN_PARTITION"),
    ({"partition": "-1"}, data("t", b"x"), "BAD_REQUEST"),
    ({"first": "-1"}, data("t", b"x"), "BAD_REQUEST"),
    ({"first": "many"}, data("t", b"x"), "BAD_REQUEST"),
    ({"stage": "none"}, data("t", b"x"), "UNKNOWN_STAGE"),
    ({"stage": "../../etc/passwd"}, data("t", b"x"), "UNKNOWN_STAGE"),
    ({}, b"", "BAD_REQUEST"),
    ({}, data("u", b"x"), "BAD_REQUEST"),
    ({}, data("t", b"x")[:-1], "BAD_REQUEST"),
    ({}, data("t", b"x") + b"\0", "BAD_REQUEST"),
])  # fmt: skip
async def test_a_frame_that_cannot_be_staged_is_refused_as_a_whole_and_the_connection_lives(
    a_broker, properties, body, code
):
    async with a_broker() as connect:
        peer = await connect()
        await make_topic(peer, "t", 1)
        stage = await begin(peer, "x")
        asked = {"stage": stage.stage_id, "topic": "t", "partition": "0", "first": "0"} | properties
        assert (await peer.ask(T.STAGE, 1, body, **asked)).properties["code"] == code
        assert await stage.send("t", 0, b"good") == "1"


async def test_a_missing_topic_is_made_for_staged_messages_if_the_broker_may(a_broker):
    async with a_broker(auto_create_topics=True) as connect:
        peer = await connect()
        stage = await begin(peer, "x")
        assert await stage.send("new", 0, b"1") == "1"
        await commit(peer, "x", stage)
        assert await bodies(peer, "new") == [b"1"]


async def test_a_message_of_the_largest_size_can_be_staged_and_a_larger_one_cannot(a_broker):
    async with a_broker(max_message_size=1000) as connect:
        peer = await connect()
        await make_topic(peer, "t", 1)
        stage = await begin(peer, "x")
        assert await stage.send("t", 0, b"x" * 1001) == "BAD_REQUEST"
        assert await stage.send("t", 0, b"x" * 1000) == "1"
        await commit(peer, "x", stage)
        assert await bodies(peer, "t") == [b"x" * 1000]


async def test_a_stage_frame_whose_lengths_do_not_add_up_closes_the_connection(a_broker):
    async with a_broker() as connect:
        peer = await connect()
        await peer.stream.send_all(HEAD.pack(40, T.STAGE, 1, 0, 0) + b"\0" * 12)
        assert (await peer.receive()).properties["code"] == "BAD_FRAME"
        assert await peer.receive() is None


async def test_a_publisher_is_not_read_while_its_stage_is_full(a_broker, monkeypatch):
    async with a_broker({"max_pending_bytes": 1000}) as connect:
        peer = await connect()
        await make_topic(peer, "t", 1)
        stage = await begin(peer, "x")
        disk = Disk(monkeypatch, "/staged/")
        for first in range(3):
            properties = {"stage": stage.stage_id, "topic": "t", "partition": "0", "first": str(first)}
            await peer.send(T.STAGE, first, data("t", b"x" * 800), **properties)
        await peer.send(T.HEARTBEAT, 5)
        await disk.is_reached()
        with trio.move_on_after(0.1) as waited:  # the first is being written, the others fill the stage
            await peer.receive()
        assert waited.cancelled_caught
        disk.go.set()
        answers = [await peer.receive() for _ in range(4)]
        assert {answer.sequence_number for answer in answers} == {0, 1, 2, 5}


async def test_staged_messages_survive_a_restart_and_a_commit_of_them_goes_on(a_broker):
    async with a_broker() as connect:
        peer = await connect()
        await make_topic(peer)
        stage = await stage_four(peer)
    async with a_broker() as connect:
        peer = stage.peer = await connect()
        assert await stage.send("t", 0, b"g") == "7"
        assert (await commit(peer, "x", stage))["messages"] == 7
        assert (await bodies(peer, "t", 0)) == [*FOUR[0], b"g"]


# Refused before the decision


async def test_a_commit_that_names_another_number_of_messages_is_refused_and_can_be_repeated(a_broker):
    async with a_broker() as connect:
        peer = await connect()
        await make_topic(peer)
        stage = await stage_four(peer)
        for messages in (5, 7):
            named = [{"stage": stage.stage_id, "messages": messages}]
            assert await peer.call("commit_transaction", transaction="x", stages=named) == "UNKNOWN_STAGE"
        assert await all_bodies(peer, "t", 4) == [[], [], [], []]
        assert (await commit(peer, "x", stage))["replayed"] is False


async def test_a_commit_is_refused_for_stages_that_are_unknown_named_twice_or_of_another_transaction(a_broker):
    async with a_broker() as connect:
        peer = await connect()
        await make_topic(peer)
        stage, other = await stage_four(peer), await begin(peer, "y")
        assert await commit(peer, "x", stage, Staging(peer, "nothing")) == "UNKNOWN_STAGE"
        assert await commit(peer, "x", stage, other) == "UNKNOWN_STAGE"
        assert await commit(peer, "x", stage, stage) == "BAD_REQUEST"
        assert await commit(peer, "x", stage, number=1) == "UNKNOWN_STAGE"
        assert await all_bodies(peer, "t", 4) == [[], [], [], []]
        assert (await commit(peer, "x", stage))["messages"] == 6


async def test_a_topic_deleted_before_the_commit_refuses_it_by_name_until_it_is_back(a_broker):
    async with a_broker() as connect:
        peer = await connect()
        await make_topic(peer)
        await make_topic(peer, "gone", 1)
        stage = await stage_four(peer)
        await stage.send("gone", 0, b"g")
        await peer.call("delete_topic", topic="gone")
        arguments = msgspec.json.encode({"transaction": "x", "stages": [stage.named]})
        answer = await peer.ask(T.REQUEST, 1, arguments, method="commit_transaction")
        assert answer.properties["code"] == "UNKNOWN_TOPIC"
        assert "'gone'" in answer.properties["error"]
        assert await all_bodies(peer, "t", 4) == [[], [], [], []]
        await make_topic(peer, "gone", 1)
        assert (await commit(peer, "x", stage))["messages"] == 7


async def test_a_disk_that_visibly_has_no_room_refuses_the_commit_and_decides_nothing(a_broker, monkeypatch):
    async with a_broker() as connect:
        peer = await connect()
        await make_topic(peer)
        stage = await stage_four(peer)

        async def free() -> int:
            return 1000

        with monkeypatch.context() as patch:
            patch.setattr(connect.broker.engine, "free_bytes", free)
            assert await commit(peer, "x", stage) == "DISK_FULL"
        assert (await peer.call("begin_transaction", transaction="x"))["committed"] is False
        assert (await commit(peer, "x", stage))["replayed"] is False


async def test_a_decision_that_cannot_be_written_down_is_none(a_broker, monkeypatch):
    from qb.core.wire.errors import DiskFull

    async with a_broker() as connect:
        peer = await connect()
        await make_topic(peer)
        stage = await stage_four(peer)

        def put_then(values: object, done: Callable[[DiskFull], None]) -> None:
            done(DiskFull("metadata could not be written"))

        with monkeypatch.context() as patch:
            patch.setattr(connect.broker.engine.metadata, "put_then", put_then)
            assert await commit(peer, "x", stage) == "DISK_FULL"
        assert await peer.publish("t", b"other", partition="0")
        assert await bodies(peer, "t", 0) == [b"other"]  # nothing is held
        assert await stage.send("t", 0, b"more") == "7"
        assert (await commit(peer, "x", stage))["messages"] == 7


# Ending stages


async def test_late_writes_to_a_committed_or_aborted_stage_are_refused(a_broker):
    async with a_broker() as connect:
        peer = await connect()
        await make_topic(peer)
        stage, aborted = await stage_four(peer), await begin(peer, "y")
        await commit(peer, "x", stage)
        assert await peer.call("abort_transaction", transaction="y") == {"aborted": 1, "committed": False}
        assert await stage.send("t", 0, b"late") == "UNKNOWN_STAGE"
        assert await aborted.send("t", 0, b"late") == "UNKNOWN_STAGE"
    async with a_broker() as connect:
        stage.peer = aborted.peer = await connect()
        assert await stage.send("t", 0, b"late") == "UNKNOWN_STAGE"
        assert await aborted.send("t", 0, b"late") == "UNKNOWN_STAGE"
        assert await all_bodies(stage.peer, "t", 4) == FOUR


async def test_an_abort_after_the_commit_undoes_nothing(a_broker):
    async with a_broker() as connect:
        peer = await connect()
        await make_topic(peer)
        stage = await stage_four(peer)
        await commit(peer, "x", stage)
        answer = await peer.call("abort_transaction", transaction="x", stages=[stage.stage_id])
        assert answer == {"aborted": 0, "committed": True}
        assert await all_bodies(peer, "t", 4) == FOUR


async def test_an_abort_ends_the_stages_it_names_or_all_of_that_number(a_broker):
    async with a_broker() as connect:
        peer = await connect()
        stages = [await begin(peer, "q", number) for number in (1, 1, 1, 2)]
        other = await begin(peer, "r", 1)
        named = [stages[0].stage_id, stages[3].stage_id, other.stage_id, "unknown"]
        answer = await peer.call("abort_transaction", transaction="q", number=1, stages=named)
        assert answer == {"aborted": 1, "committed": False}
        answer = await peer.call("abort_transaction", transaction="q", number=1)
        assert answer == {"aborted": 2, "committed": False}
        left = (await peer.call("list_transactions"))["stages"]
        assert {stage["stage"] for stage in left} == {stages[3].stage_id, other.stage_id}


async def test_a_commit_ends_the_stages_that_dead_attempts_left(a_broker, tmp_path):
    async with a_broker() as connect:
        peer = await connect()
        await make_topic(peer)
        dead, stage, other = await stage_four(peer), await stage_four(peer), await begin(peer, "y")
        await commit(peer, "x", stage)
        assert await dead.send("t", 0, b"late") == "UNKNOWN_STAGE"
        assert await all_bodies(peer, "t", 4) == FOUR
        await until(lambda: [path.stem for path in (tmp_path / "data" / "staged").iterdir()] == [other.stage_id])


async def test_an_idle_stage_expires_and_one_in_use_does_not(a_broker):
    async with a_broker(transaction_timeout=1.0) as connect:
        peer = await connect()
        await make_topic(peer, "t", 1)
        idle, used = await begin(peer, "x"), await begin(peer, "x")
        await idle.send("t", 0, b"1")
        sent = count()

        async def only_one_is_left():
            await used.send("t", 0, b"%d" % next(sent))
            return len((await peer.call("list_transactions"))["stages"]) == 1

        await until_true(only_one_is_left)
        assert await idle.send("t", 0, b"2") == "UNKNOWN_STAGE"
        assert [stage["stage"] for stage in (await peer.call("list_transactions"))["stages"]] == [used.stage_id]
        assert (await commit(peer, "x", used))["messages"] == next(sent)


async def test_an_id_without_number_is_forgotten_after_its_time_and_one_with_number_never(a_broker, monkeypatch):
    hour = 3_600_000
    async with a_broker(transaction_timeout=0.1, transaction_memory_hours=2) as connect:
        peer = await connect()
        for transaction, number in (("plain", None), ("numbered", 3)):
            await commit(peer, transaction, number=number)
    now = [0]
    async with a_broker(transaction_timeout=0.1, transaction_memory_hours=2) as connect:
        peer = await connect()
        await commit(peer, "later")
        from qb.core.transactions import transaction_manager as transactions

        real = transactions.now_ms()
        monkeypatch.setattr(transactions, "now_ms", lambda: real + now[0])

        async def committed(number):
            return (await peer.call("list_transactions"))["committed"] == number

        await holds_during(0.1, partial(committed, 3))
        now[0] = 3 * hour
        await until_true(partial(committed, 1))
    async with a_broker() as connect:
        peer = await connect()
        assert (await peer.call("begin_transaction", transaction="plain"))["committed"] is False
        assert (await peer.call("begin_transaction", transaction="numbered", number=3))["committed"] is True


# After the decision


async def test_a_commit_goes_on_when_its_peer_has_gone(a_broker, monkeypatch):
    async with a_broker() as connect:
        peer, other = await connect(), await connect()
        await make_topic(peer)
        stage = await stage_four(peer)
        disk = Disk(monkeypatch, "/t/1/")
        arguments = msgspec.json.encode({"transaction": "x", "stages": [stage.named]})
        await peer.send(T.REQUEST, 1, arguments, method="commit_transaction")
        await disk.is_reached()
        await trio.aclose_forcefully(peer.stream)
        disk.go.set()
        assert (await commit(other, "x", stage))["replayed"] is True
        assert await all_bodies(other, "t", 4) == FOUR


async def test_other_requests_of_the_peer_are_answered_while_its_commit_is_under_way(a_broker, monkeypatch):
    async with a_broker() as connect:
        peer = await connect()
        await make_topic(peer)
        stage = await stage_four(peer)
        disk = Disk(monkeypatch, "/t/1/")
        arguments = msgspec.json.encode({"transaction": "x", "stages": [stage.named]})
        await peer.send(T.REQUEST, 1, arguments, method="commit_transaction")
        await disk.is_reached()
        assert (await peer.ask(T.HEARTBEAT, 2)).type == T.HEARTBEAT
        disk.go.set()
        assert (await peer.receive()).sequence_number == 1


async def test_a_commit_under_way_is_answered_when_the_broker_is_stopped(a_broker, monkeypatch):
    answers = []
    async with a_broker() as connect:
        peer = await connect()
        await make_topic(peer)
        stage = await stage_four(peer)
        disk = Disk(monkeypatch, "/t/1/")
        arguments = msgspec.json.encode({"transaction": "x", "stages": [stage.named]})
        await peer.send(T.REQUEST, 1, arguments, method="commit_transaction")
        await disk.is_reached()
        connect.stop.set()
        disk.go.set()
        while (frame := await peer.receive()) is not None:
            answers.append((frame.type, frame.properties.get("status")))
    assert answers == [(T.ACK, "success"), (T.GOODBYE, None)]


@pytest.mark.parametrize("at_a_time", [4_000_000, 1])
async def test_a_disk_that_fills_up_while_copying_delays_the_transaction_and_loses_nothing(
    a_broker, monkeypatch, at_a_time
):
    monkeypatch.setattr("qb.core.transactions.unfinished_transactions.FIRST_DELAY", 0.01)
    monkeypatch.setattr(
        "qb.core.transactions.stage_copy.READ_BYTES", at_a_time
    )  # with little of it, more waits when the disk is full
    monkeypatch.setattr("qb.core.transactions.stage_copy.IN_FLIGHT_BYTES", at_a_time)
    async with a_broker() as connect:
        peer, other = await connect(), await connect()
        await make_topic(peer)
        stage, receipts = await stage_four(peer), []

        async def ask() -> None:
            receipts.append(await commit(peer, "x", stage))

        async with trio.open_nursery() as nursery:
            with full_disk(monkeypatch, "/t/2/") as refused:
                nursery.start_soon(ask)
                await until(lambda: len(refused) > 2)
                assert await all_bodies(other, "t", 4) == [[], [], [], []]
                assert (await other.publish("t", b"other", partition="0")).properties["status"] == "success"
        assert receipts[0]["messages"] == 6
        assert await all_bodies(other, "t", 4) == [[*FOUR[0], b"other"], *FOUR[1:]]


async def test_a_poisoned_log_leaves_the_transaction_unfinished_and_the_next_start_finishes_it(
    a_broker, monkeypatch, impatient
):
    async with a_broker() as connect:
        peer = await connect()
        await make_topic(peer)
        await make_topic(peer, "u", 1)
        stage, other, free = await stage_four(peer), await begin(peer, "y"), await begin(peer, "z")
        await other.send("t", 0, b"y")
        await free.send("u", 0, b"z")
        with monkeypatch.context() as patch:
            disk = Disk(patch, "/t/2/")
            disk.error = errno.EIO
            disk.go.set()
            assert await commit(peer, "x", stage) == "TRANSACTION_UNFINISHED"
        assert await commit(peer, "x", stage) == "TRANSACTION_UNFINISHED"
        assert (await peer.call("begin_transaction", transaction="x"))["committed"] is True
        assert (await peer.call("abort_transaction", transaction="x")) == {"aborted": 0, "committed": True}
        assert (await peer.publish("t", b"later", partition="0")).properties["status"] == "success"
        assert await all_bodies(peer, "t", 4) == [[], [], [], []]
        assert await commit(peer, "y", other) == "PARTITION_HELD"  # it could not be shown before the first
        assert (await commit(peer, "z", free))["messages"] == 1
    async with a_broker() as connect:
        peer = other.peer = await connect()
        assert await all_bodies(peer, "t", 4) == [[*FOUR[0], b"later"], *FOUR[1:]]
        assert connect.broker.transactions.notes == ["finished transaction 'x': 6 messages became visible"]
        assert (await commit(peer, "x", stage))["replayed"] is True
        assert (await commit(peer, "y", other))["messages"] == 1


async def test_the_next_number_of_an_unfinished_transaction_is_refused_until_it_is_finished(
    a_broker, monkeypatch, impatient
):
    async with a_broker() as connect:
        peer = await connect()
        await make_topic(peer)
        stage, following = await stage_four(peer, "q", 1), await begin(peer, "q", 2)
        with monkeypatch.context() as patch:
            disk = Disk(patch, "/t/2/")
            disk.error = errno.EIO
            disk.go.set()
            assert await commit(peer, "q", stage, number=1) == "TRANSACTION_UNFINISHED"
        assert await commit(peer, "q", following, number=2) == "PARTITION_HELD"
    async with a_broker() as connect:
        following.peer = await connect()
        assert await all_bodies(following.peer, "t", 4) == FOUR
        assert (await commit(following.peer, "q", following, number=2))["replayed"] is False


async def test_a_start_with_a_full_disk_shows_nothing_of_an_unfinished_transaction_until_there_is_room(
    a_broker, monkeypatch, impatient
):
    monkeypatch.setattr("qb.core.transactions.unfinished_transactions.FIRST_DELAY", 0.01)
    async with a_broker() as connect:
        peer = await connect()
        await make_topic(peer)
        await peer.publish("t", b"before", partition="0")
        stage = await stage_four(peer)
        with monkeypatch.context() as patch:
            disk = Disk(patch, "/t/2/")
            disk.error = errno.EIO
            disk.go.set()
            assert await commit(peer, "x", stage) == "TRANSACTION_UNFINISHED"
        await peer.publish("t", b"later", partition="0")
    with full_disk(monkeypatch, "/t/"):
        async with a_broker() as connect:
            peer = await connect()
            assert await all_bodies(peer, "t", 4) == [[b"before"], [], [], []]
            (note,) = connect.broker.transactions.notes
            assert "No space left on device" in note
    async with a_broker() as connect:
        assert await all_bodies(await connect(), "t", 4) == [[b"before", *FOUR[0], b"later"], *FOUR[1:]]


async def test_a_transaction_that_waits_for_room_since_the_start_becomes_visible_when_there_is_room(
    a_broker, monkeypatch, impatient
):
    monkeypatch.setattr("qb.core.transactions.unfinished_transactions.FIRST_DELAY", 0.01)
    async with a_broker() as connect:
        peer = await connect()
        await make_topic(peer)
        stage = await stage_four(peer)
        with monkeypatch.context() as patch:
            disk = Disk(patch, "/t/2/")
            disk.error = errno.EIO
            disk.go.set()
            assert await commit(peer, "x", stage) == "TRANSACTION_UNFINISHED"
    with ExitStack() as full:
        refused = full.enter_context(full_disk(monkeypatch, "/t/"))
        async with a_broker() as connect:
            peer = await connect()
            await until(lambda: len(refused) > 2)
            full.close()
            assert (await commit(peer, "x", stage))["replayed"] is True
            assert await all_bodies(peer, "t", 4) == FOUR


async def test_a_topic_deleted_while_its_messages_are_copied_takes_them_along(a_broker, monkeypatch):
    async with a_broker() as connect:
        peer, other = await connect(), await connect()
        await make_topic(peer)
        await make_topic(peer, "gone", 1)
        stage = await stage_four(peer)
        await stage.send("gone", 0, b"g")
        disk = Disk(monkeypatch, "/t/1/")
        receipts = []

        async def ask() -> None:
            receipts.append(await commit(peer, "x", stage))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await disk.is_reached()
            await other.call("delete_topic", topic="gone")
            disk.go.set()
        assert receipts[0]["messages"] in (6, 7)  # the messages for it may have been stored before it was deleted
        assert await all_bodies(peer, "t", 4) == FOUR


async def test_a_decided_transaction_whose_stage_is_gone_is_never_shown_in_part(
    a_broker, monkeypatch, tmp_path, impatient
):
    async with a_broker() as connect:
        peer = await connect()
        await make_topic(peer)
        stage = await stage_four(peer)
        with monkeypatch.context() as patch:
            disk = Disk(patch, "/t/2/")
            disk.error = errno.EIO
            disk.go.set()
            assert await commit(peer, "x", stage) == "TRANSACTION_UNFINISHED"
    path = tmp_path / "data" / "staged" / f"{stage.stage_id}.log"
    taken_away = path.rename(tmp_path / "taken away")
    async with a_broker() as connect:
        peer = await connect()
        assert await all_bodies(peer, "t", 4) == [[], [], [], []]
        assert await commit(peer, "x", stage) == "TRANSACTION_UNFINISHED"
        (note,) = connect.broker.transactions.notes
        assert stage.stage_id in note
    taken_away.rename(path)
    async with a_broker() as connect:
        assert await all_bodies(await connect(), "t", 4) == FOUR


@pytest.mark.parametrize(("killed", "code"), [(True, "UNKNOWN_STAGE"), (False, "LOG_DAMAGED")])
async def test_a_stage_that_has_lost_messages_never_becomes_a_part_of_a_transaction(a_broker, tmp_path, killed, code):
    async with a_broker() as connect:
        stage = await stage_four_in(connect)
    (path,) = (tmp_path / "data" / "staged").iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    if killed:
        (tmp_path / "data" / "clean-stop").unlink()
    async with a_broker() as connect:
        peer = await connect()
        assert await commit(peer, "x", stage) == code
        assert await all_bodies(peer, "t", 4) == [[], [], [], []]


async def stage_four_in(connect: Callable[[], object]) -> Staging:
    peer = await connect()
    await make_topic(peer)
    return await stage_four(peer)


# Large


@pytest.mark.process
def test_the_memory_of_the_broker_does_not_grow_with_the_transaction(start_broker):
    broker = start_broker(tail_bytes="1MiB")
    frames, rows = 120, 700  # some 100 MB
    with Peer(broker.port) as peer:
        peer.hello()
        peer.create_topic("t", partitions="4")
        stage = peer.call("begin_transaction", transaction="big")["stage"]
        body = data("t", *[b"x" * 1200] * rows)
        for number in range(frames):
            properties = {"stage": stage, "topic": "t", "partition": str(number % 4), "first": str(number * rows)}
            peer.send(T.STAGE, number, body, **properties)
            if number >= 4:  # a few in flight
                assert peer.receive().properties["status"] == "success"
        for _ in range(4):
            assert peer.receive().properties["messages"]
        before = peak_memory(broker.process.pid)
        named = [{"stage": stage, "messages": frames * rows}]
        assert peer.call("commit_transaction", transaction="big", stages=named)["messages"] == frames * rows
        assert peak_memory(broker.process.pid) < before + 60_000_000
        assert before < 120_000_000
        ends = [peer.call("offsets", topic="t", partition=number)["next"] for number in range(4)]
        assert ends == [frames * rows // 4] * 4


def peak_memory(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
