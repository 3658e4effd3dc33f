"""Transactions through BrokerClient: the pure parts, then a scripted broker, then a real one that is killed."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from queue import Queue
from typing import Any
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qb import (
    BadName,
    BadRequest,
    BrokerClient,
    BrokerUnavailable,
    ConnectionLost,
    DiskFull,
    Message,
    MessageTooLarge,
    OutOfSequence,
    QBError,
    RequestTimedOut,
    Stage,
    UnknownPartition,
    UnknownStage,
    UnknownTopic,
)
from qb.cli.main import main
from qb.clients.protocol.conversation import FIRST_REQUEST, WINDOW_BYTES, Conversation, Goodbye, PublishesSettled
from qb.clients.protocol.partition_spread import SinglePartition, TopicRoutes
from qb.clients.protocol.publish_frames import PublishForm
from qb.clients.protocol.staged_messages import DRAFT_BYTES, STAGE_BYTES, STAGE_HEAD, TransactionDraft, cut
from qb.core.wire.frames import Frame, MessageType, decode_frame, encode_frame, frame_length
from tests.support.brokers import BrokerProcess
from tests.support.scripted_broker import Plan, ScriptedBroker
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(50)


def numbered(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


def data_frames(topic: str, bodies: list[bytes]) -> bytes:
    return PublishForm(topic).frames(0, bodies, MessageType.DATA)


def frames_in(data: bytes | memoryview) -> Iterator[Frame]:
    at, data = 0, bytes(data)
    while at < len(data):
        yield decode_frame(data, at)
        at += frame_length(data, at)


# Pure: what is gathered, how it is cut, what the conversation keeps


@given(st.lists(st.integers(0, 30_000), min_size=1, max_size=40), st.integers(30_000, 90_000))
def test_bundles_are_whole_frames_in_order_and_never_too_long(sizes: list[int], max_message_size: int) -> None:
    frames = data_frames("t", [bytes(size) for size in sizes])
    bundles = cut(frames, len(sizes), max_message_size)
    limit = max_message_size + 65_568 - STAGE_HEAD
    assert b"".join(bundle.frames for bundle in bundles) == frames
    for bundle in bundles:
        assert len(list(frames_in(bundle.frames))) == bundle.count
        assert len(bundle.frames) <= limit
    for one, two in pairwise(bundles):
        assert len(one.frames) + frame_length(two.frames) > limit


def test_what_fits_into_one_stage_frame_is_neither_copied_nor_looked_at() -> None:
    anything = bytearray(STAGE_BYTES)
    [bundle] = cut(anything, 7, 1 << 24)
    assert (bundle.frames.obj, bundle.count) == (anything, 7)
    assert cut(b"", 0, 1 << 24) == []


def test_a_long_message_travels_alone_up_to_the_brokers_limit() -> None:
    frames = data_frames("t", [b"small", bytes(3_000_000), b"small"])
    assert [bundle.count for bundle in cut(frames, 3, 1 << 24)] == [1, 1, 1]
    with pytest.raises(MessageTooLarge, match="of 3000040 bytes, properties included, is over this broker's limit of"):
        cut(frames, 3, 2_000_000)


def test_what_is_no_row_of_whole_frames_is_refused_before_it_is_sent() -> None:
    frames = data_frames("t", [bytes(1_000)] * 2_000)
    for wrong in (frames[:-1], frames + b"\0\0", frames + bytes(40)):
        with pytest.raises(BadRequest, match="no whole frame at byte"):
            cut(wrong, 2_000, 1 << 24)
    with pytest.raises(BadRequest, match="there are 2000 frames, not 1999"):
        cut(frames, 1_999, 1 << 24)


def test_a_draft_gives_out_a_partition_when_it_is_worth_a_frame_and_keeps_its_order() -> None:
    draft, form = TransactionDraft(), PublishForm("t", key="k", timestamp_ms=5)
    full = []
    for number in range(300):
        full += draft.add("t", SinglePartition(form, number % 2).pieces([b"%d" % number + bytes(10_000)]))
    assert [portion.partition for portion in full] == [0, 1]
    full += draft.take_all()
    assert list(draft.take_all()) == []
    for partition in (0, 1):
        mine = [portion for portion in full if portion.partition == partition]
        assert all(len(portion.frames) <= STAGE_BYTES for portion in mine)
        found = [frame for portion in mine for frame in frames_in(portion.frames)]
        assert sum(portion.count for portion in mine) == len(found) == 150
        assert [int(frame.body.rstrip(b"\0")) for frame in found] == list(range(partition, 300, 2))
        assert {(frame.type, frame.timestamp) for frame in found} == {(MessageType.DATA, 5)}
        assert found[0].properties == {"topic": "t", "key": "k"}


def test_a_draft_over_many_partitions_is_bounded() -> None:
    draft, form, kept, most = TransactionDraft(), PublishForm("t"), 0, 0
    for number in range(400):
        given = sum(
            len(portion.frames) for portion in draft.add("t", SinglePartition(form, number).pieces([bytes(100_000)]))
        )
        kept += 100_000 + form.overhead - given
        most = max(most, kept)
    assert 7_000_000 < most <= DRAFT_BYTES


def test_one_message_goes_where_the_broker_would_put_it() -> None:
    routes = TopicRoutes()
    assert [routes.choose("t", None, None, 3) for _ in range(4)] == [0, 1, 2, 0]
    assert routes.choose("t", None, "k7", 5) == crc32(b"k7") % 5
    assert routes.choose("t", 2, "k7", 5) == 2
    for partition in (5, -1):
        with pytest.raises(UnknownPartition, match=f"topic 't' has no partition {partition}; it has 0 to 4"):
            routes.choose("t", partition, None, 5)


def a_conversation(**settings: Any) -> Conversation:
    conversation = Conversation(**settings)
    conversation.open()
    welcome = {"status": "success", "max_message_size": "1000", "producer_id": "7"}
    conversation.receive(encode_frame(MessageType.ACK, FIRST_REQUEST, properties=welcome))
    conversation.next_event()
    return conversation


def test_what_is_staged_is_kept_until_it_is_answered_and_sent_again_behind_the_publishes() -> None:
    conversation = a_conversation()
    first = conversation.stage({"stage": "s", "first": "0"}, b"abc")
    second = conversation.stage({"stage": "s", "first": "1"}, memoryview(b"abc"))
    publish = conversation.publish(PublishForm("t"), [b"x"])
    assert conversation.lost() == []
    assert conversation.unanswered() == [publish.data, first.data, second.data]
    held = {"status": "success", "messages": "1"}
    conversation.receive(encode_frame(MessageType.ACK, first.first, properties=held))
    assert conversation.next_event() == PublishesSettled([first])
    assert first.answers[0].messages == 1  # type: ignore[union-attr]
    assert conversation.unanswered() == [publish.data, second.data]
    conversation.abandon(second)
    assert conversation.unanswered() == [publish.data]


def test_staging_is_bounded_and_what_was_on_its_way_at_the_end_says_so() -> None:
    conversation = a_conversation(window_bytes=1_000, idempotent=False)
    batch = conversation.stage({"stage": "s", "first": "0"}, bytes(1_000))
    assert not conversation.has_room
    assert conversation.lost() == []  # not even a client without idempotence gives it up: it cannot be staged twice
    assert conversation.give_up("closed") == [batch]
    assert isinstance(batch.answers[0].error, ConnectionLost)  # type: ignore[union-attr]
    assert conversation.has_room


def test_a_broker_that_shuts_down_leaves_what_it_did_not_stage_to_the_next() -> None:
    conversation = a_conversation()
    batch = conversation.stage({"stage": "s", "first": "0"}, b"abc")
    refusal = {"status": "error", "code": "SHUTTING_DOWN", "error": "bye"}
    conversation.receive(encode_frame(MessageType.ACK, batch.first, properties=refusal))
    assert conversation.next_event() == Goodbye("bye")
    assert conversation.unanswered() == [batch.data]


# Against a scripted broker

RECEIPT = {"transaction": "t-1", "number": None, "replayed": False, "messages": 2, "timestamp": 1_700_000_000_123}
RECEIPT |= {"durability": "fsynced", "partitions": [], "from_the_future": 1}
RUN = {"topic": "orders", "partition": 1, "first_offset": 5, "last_offset": 8, "messages": 2}


def scripted(*plans: Plan, **settings: Any) -> ScriptedBroker:
    broker = ScriptedBroker(*plans, **settings)
    broker.answers["begin_transaction"] = {"committed": False, "stage": "s1"}
    broker.answers["commit_transaction"] = RECEIPT | {"partitions": [RUN]}
    broker.answers["abort_transaction"] = {"aborted": 1, "committed": False}
    broker.answers["describe_topic"] = {"topic": "orders", "partitions": 2}
    return broker


def stage_frames(broker: ScriptedBroker) -> list[Frame]:
    return [frame for frame in broker.frames if frame.type == MessageType.STAGE]


def requests(broker: ScriptedBroker) -> list[tuple[str, Any]]:
    found = [frame for frame in broker.frames if frame.type == MessageType.REQUEST]
    return [(frame.properties["method"], json.loads(frame.body)) for frame in found]


def test_a_block_begins_stages_and_commits() -> None:
    with scripted() as broker, BrokerClient(port=broker.port) as client:
        started = time.time_ns() // 1_000_000
        with client.transaction("t-1", number=4) as tx:
            assert (tx.replayed, tx.receipt) == (False, None)
            tx.publish("orders", bytearray(b"a"), key="k", timestamp_ms=5, colour="red")
            tx.publish("orders", b"b", partition=1)
            assert tx.publish_many("orders", [b"c", b"d"], keys=["k", None]) == 2
        assert requests(broker) == [
            ("begin_transaction", {"transaction": "t-1", "number": 4}),
            ("describe_topic", {"topic": "orders"}),
            ("commit_transaction", {"transaction": "t-1", "number": 4, "stages": [{"stage": "s1", "messages": 4}]}),
        ]
        one, two = stage_frames(broker)
        assert one.properties == {"stage": "s1", "topic": "orders", "partition": "1", "first": "0"}
        assert two.properties == {"stage": "s1", "topic": "orders", "partition": "0", "first": "3"}
        stored = {frame.body: frame for stage in (one, two) for frame in frames_in(stage.body)}
        assert stored[b"a"][2:4] == (5, {"topic": "orders", "key": "k", "colour": "red"})
        assert started <= stored[b"b"].timestamp <= time.time_ns() // 1_000_000
        assert tx.receipt is not None
        assert tx.receipt[:4] == ("t-1", None, False, 2)
        assert tx.receipt.partitions == (tuple(RUN.values()),)
        assert tx.receipt.partitions[0].last_offset == 8
        assert tx.receipt.time.year == 2023
        with pytest.raises(RuntimeError, match="inside its block"):
            tx.publish("orders", b"late")


def test_a_replayed_block_checks_its_arguments_and_sends_nothing() -> None:
    with scripted(max_message_size=1_000) as broker, BrokerClient(port=broker.port) as client:
        broker.answers["begin_transaction"] = {"committed": True, "stage": None}
        broker.answers["commit_transaction"] = RECEIPT | {"replayed": True}
        with client.transaction("t-1") as tx:
            assert tx.replayed
            tx.publish("orders", b"a", partition=700)
            assert tx.publish_many("orders", iter(numbered(3)), keys=["a", "b", "c"]) == 3
            with pytest.raises(TypeError, match="bytes, not str"):
                tx.publish("orders", "text")  # type: ignore[arg-type]
            with pytest.raises(BadRequest, match="reserved"):
                tx.publish("orders", b"", client_id="me")
            with pytest.raises(MessageTooLarge):
                tx.publish_many("orders", [bytes(1_001)])
        assert tx.receipt is not None
        assert tx.receipt.replayed
        assert [method for method, _ in requests(broker)] == ["begin_transaction", "commit_transaction"]
        assert requests(broker)[-1][1]["stages"] == []
        assert stage_frames(broker) == []


def test_a_body_may_be_as_long_as_in_any_publish() -> None:
    with scripted(max_message_size=1_000) as broker, BrokerClient(port=broker.port) as client:
        with client.transaction("t-1") as tx:
            tx.publish("orders", bytes(1_000), partition=0, colour="x" * 60_000)
            with pytest.raises(MessageTooLarge):
                tx.publish("orders", bytes(1_001), partition=0)
        assert [len(frame.body) for stage in stage_frames(broker) for frame in frames_in(stage.body)] == [1_000]


def test_an_exception_in_the_block_aborts_its_own_stage_and_goes_on() -> None:
    with scripted() as broker, BrokerClient(port=broker.port) as client:
        with pytest.raises(LookupError, match="mine"), client.transaction("t-1") as tx:
            tx.publish("orders", b"a")
            raise LookupError("mine")
        assert tx.receipt is None
        assert [method for method, _ in requests(broker)] == [
            "begin_transaction",
            "describe_topic",
            "abort_transaction",
        ]
        assert requests(broker)[-1][1] == {"transaction": "t-1", "stages": ["s1"]}


def test_what_was_not_answered_is_sent_again_with_the_same_first() -> None:
    plans = Plan(lose_stages_after=3), Plan(lose_stages_after=2)
    with scripted(*plans) as broker, BrokerClient(port=broker.port) as client:
        stage = client.begin_transaction("t-1")
        assert isinstance(stage, Stage)
        for number in range(5):
            stage.add("orders", 0, memoryview(data_frames("orders", [b"%d" % number] * 10)), 10)
        assert (stage.stage_id, stage.messages, stage.finish()) == ("s1", 50, 50)
        assert broker.staged == 50
        firsts = [int(frame.properties["first"]) for frame in stage_frames(broker)]
        assert sorted(set(firsts)) == [0, 10, 20, 30, 40]
        assert firsts.count(0) == 3
        assert broker.connections == 3


def test_a_refusal_comes_out_first_and_every_later_call_says_the_same() -> None:
    with scripted() as broker, BrokerClient(port=broker.port) as client:
        broker.refuse_stages[10] = "DISK_FULL"
        stage = client.begin_transaction("t-1")
        assert stage is not None
        with pytest.raises(DiskFull):
            for _ in range(4):  # those behind the refused one leave a gap, which is not the news
                stage.add("orders", 0, data_frames("orders", [b"x"] * 10), 10)
            stage.finish()
        for call in (stage.finish, lambda: stage.add("orders", 0, data_frames("orders", [b"x"]), 1)):
            with pytest.raises(DiskFull):
                call()
        assert stage.messages in (20, 30, 40)


def test_a_block_whose_stage_was_spoilt_commits_nothing_even_if_the_program_did_not_notice() -> None:
    with scripted() as broker, BrokerClient(port=broker.port) as client:
        broker.refuse_stages[0] = "UNKNOWN_STAGE"
        with pytest.raises(UnknownStage, match="refused"), client.transaction("t-1") as tx:
            tx.publish("orders", b"x")
        methods = [method for method, _ in requests(broker)]
        assert "commit_transaction" not in methods
        assert methods[-1] == "abort_transaction"


def test_a_block_in_which_many_bodies_were_added_by_half_cannot_be_committed() -> None:
    def bodies() -> Iterator[bytes]:
        yield b"a"
        raise LookupError

    with scripted() as broker, BrokerClient(port=broker.port) as client:
        with pytest.raises(QBError, match="was interrupted"), client.transaction("t-1") as tx:
            tx.publish("orders", b"a")
            with pytest.raises(LookupError):
                tx.publish_many("orders", bodies())
        assert "commit_transaction" not in [method for method, _ in requests(broker)]
        with client.transaction("t-1") as tx:  # while one bad message is just not in it
            tx.publish("orders", b"a")
            with pytest.raises(TypeError):
                tx.publish("orders", None)  # type: ignore[arg-type]
        assert tx.receipt is not None


def test_a_wrong_count_is_found_out() -> None:
    with scripted() as broker, BrokerClient(port=broker.port) as client:
        stage = client.begin_transaction("t-1")
        assert stage is not None
        stage.add("orders", 0, data_frames("orders", [b"x"] * 3), 4)
        assert stage.finish() == 3
        stage.add("orders", 0, data_frames("orders", [b"x"]), 1)
        with pytest.raises(OutOfSequence):
            stage.finish()


def test_staging_waits_while_megabytes_are_unanswered_and_gives_up_in_time() -> None:
    deaf = Plan(lose_stages_after=1_000)
    with scripted(deaf) as broker, BrokerClient(port=broker.port, request_timeout=3.0) as client:
        stage = client.begin_transaction("t-1")
        assert stage is not None
        megabyte = data_frames("orders", [bytes(1_000)] * 900)
        with pytest.raises(RequestTimedOut):
            for _ in range(40):
                stage.add("orders", 0, megabyte, 900)
        assert 0 <= stage.messages / 900 * len(megabyte) - WINDOW_BYTES < 2 * len(megabyte)
        assert client.ping() > 0  # what was given up takes no room
        with pytest.raises(RequestTimedOut):
            stage.finish()


@pytest.mark.parametrize("method", ["begin_transaction", "commit_transaction", "abort_transaction"])
def test_a_lost_answer_is_asked_for_again(method: str) -> None:
    plans = [Plan(lose_answer_to=method)] * 2
    with scripted(*plans) as broker, BrokerClient(port=broker.port) as client:
        assert client.begin_transaction("t-1") is not None
        assert client.commit_transaction("t-1", [("s1", 0)]).messages == 2
        assert client.abort_transaction("t-1", stages=["s1"]) == 1
        assert [name for name, _ in requests(broker)].count(method) == 3


def test_a_commit_without_an_answer_in_time_is_not_called_unsent() -> None:
    plan = Plan(lose_answer_to="commit_transaction")
    with scripted(plan) as broker, BrokerClient(port=broker.port, request_timeout=0.5) as client:
        assert client.begin_transaction("t-1") is not None
        broker.stop_listening()
        with pytest.raises(ConnectionLost):
            client.commit_transaction("t-1", [("s1", 0)])
        with pytest.raises(BrokerUnavailable):  # of this one, nothing was sent
            client.commit_transaction("t-1", [("s1", 0)])


def test_a_client_that_is_disconnected_does_not_come_back_by_itself() -> None:
    with scripted(Plan(silent=True)) as broker, BrokerClient(port=broker.port) as client:
        failures: list[BaseException] = []

        def commit() -> None:
            try:
                client.commit_transaction("t-1", [])
            except ConnectionLost as error:
                failures.append(error)

        thread = threading.Thread(target=commit)
        thread.start()
        broker.wait_for(lambda: broker.ignored == 1)
        client.disconnect()
        thread.join()
        assert len(failures) == 1
        assert broker.connections == 1


# Against a real broker

PARTITIONS = [(topic, partition) for topic in ("debits", "credits") for partition in range(4)]


@pytest.fixture
def client(shared: BrokerProcess) -> Iterator[BrokerClient]:
    """A client of a broker that has the topics of PARTITIONS, empty."""
    with BrokerClient(port=shared.port) as client:
        make_topics(client)
        yield client
        for topic in ("debits", "credits"):
            client.delete_topic(topic)


def make_topics(client: BrokerClient) -> None:
    for topic in ("debits", "credits"):
        client.create_topic(topic, partitions=4)


def stored(client: BrokerClient, topic: str, partition: int) -> list[Message]:
    found, offset = list[Message](), 0
    while portion := client.fetch(topic, partition, offset, max_messages=100_000, max_bytes=16 << 20):
        found, offset = found + portion, portion.next_offset
    return found


def all_bodies(client: BrokerClient) -> list[bytes]:
    return sorted(message.body for place in PARTITIONS for message in stored(client, *place))


def ends(client: BrokerClient) -> list[int]:
    return [client.offsets(*place).next for place in PARTITIONS]


def test_nothing_is_seen_before_the_end_of_the_block_and_everything_after_it(client: BrokerClient) -> None:
    seen: Queue[Message] = Queue()
    with client.create_and_subscribe("watch", "debits", seen.put):
        with client.transaction("whole") as tx:
            for topic, partition in PARTITIONS:
                tx.publish(topic, b"%d" % partition, partition, key="k", colour="red")
                tx.publish_many(topic, [bytes(100_000)] * 12, partition)  # over 1 MB: some of it is staged now
            assert ends(client) == [0] * 8
            wait_until(lambda: client.list_transactions()["stages"][0]["messages"] > 0)  # counts what the disk has
            assert seen.empty()
        assert ends(client) == [13] * 8
        pushed = [seen.get(timeout=20) for _ in range(4 * 13)]
    assert {(message.partition, message.offset) for message in pushed} == {(p, o) for p in range(4) for o in range(13)}
    for topic, partition in PARTITIONS:
        first = stored(client, topic, partition)[0]
        assert (first.body, first.key, first.properties) == (b"%d" % partition, "k", {"colour": "red"})
    assert tx.receipt is not None
    assert (tx.receipt.messages, tx.receipt.replayed, tx.receipt.durability) == (8 * 13, False, "fsynced")
    assert {(share.topic, share.partition) for share in tx.receipt.partitions} == set(PARTITIONS)
    assert {(share.first_offset, share.last_offset, share.messages) for share in tx.receipt.partitions} == {(0, 12, 13)}
    assert client.list_transactions()["stages"] == []
    client.delete_subscription("watch")


def test_no_reader_ever_sees_a_part(client: BrokerClient, shared: BrokerProcess) -> None:
    """Two messages a transaction in each partition; what is read later is never behind what was read before."""
    rounds, broken = 30, list[object]()
    pushed, done = threading.Semaphore(0), threading.Event()

    def check(message: Message) -> None:  # a subscriber that gets a message can fetch its whole transaction
        number = int(message.body)
        if any(end < 2 * number for end in ends(reader)):
            broken.append(("pushed", message, ends(reader)))
        pushed.release()

    def watch() -> None:
        while not done.is_set():
            first, *others = ends(reader)
            again = reader.offsets(*PARTITIONS[0]).next
            if first % 2 or again % 2 or not all(first <= end <= again and end % 2 == 0 for end in others):
                broken.append(("fetched", first, others, again))

    with BrokerClient(port=shared.port) as reader, BrokerClient(port=shared.port) as listener:
        watcher = threading.Thread(target=watch)
        watcher.start()
        with listener.create_and_subscribe("parts", "credits", check):
            for number in range(1, rounds + 1):
                with client.transaction("parts", number) as tx:
                    for topic, partition in PARTITIONS:
                        tx.publish_many(topic, [b"%d" % number] * 2, partition)
            for _ in range(rounds * 8):
                assert pushed.acquire(timeout=20)
        done.set()
        watcher.join()
        assert broken == []
        assert ends(reader) == [2 * rounds] * 8
    client.delete_subscription("parts")


def test_a_second_run_of_the_same_block_adds_nothing(client: BrokerClient) -> None:
    receipts = []
    for run in range(3):
        with client.transaction("again") as tx:
            assert tx.replayed == (run > 0)
            tx.publish("debits", b"once", key="k")
        receipts.append(tx.receipt)
    assert all_bodies(client) == [b"once"]
    assert [receipt.replayed for receipt in receipts if receipt] == [False, True, True]
    assert {receipt[3:] for receipt in receipts if receipt} == {receipts[0][3:]}  # type: ignore[index]


def test_of_numbered_transactions_every_smaller_number_counts_as_committed(client: BrokerClient) -> None:
    for number in (3, 1, 3, 4, 2):
        with client.transaction("query", number) as tx:
            tx.publish("debits", b"%d" % number)
    assert all_bodies(client) == [b"3", b"4"]
    assert client.begin_transaction("query", 4) is None
    with pytest.raises(BadRequest, match="number"):
        client.begin_transaction("query")


def test_messages_without_partition_are_spread_as_by_any_publish(client: BrokerClient) -> None:
    keys = [f"k{number % 13}" for number in range(200)]
    with client.transaction("spread") as tx:
        tx.publish_many("debits", numbered(200), keys=keys)
        for number in range(8):
            tx.publish("credits", b"%d" % number)
    for partition in range(4):
        assert {crc32((message.key or "").encode()) % 4 for message in stored(client, "debits", partition)} == {
            partition
        }
        assert [message.body for message in stored(client, "credits", partition)] == [
            b"%d" % partition,
            b"%d" % (partition + 4),
        ]
    assert client.publish("debits", b"x", key="k5").partition == crc32(b"k5") % 4


def test_an_exception_publishes_nothing_and_leaves_nothing(client: BrokerClient) -> None:
    with pytest.raises(LookupError), client.transaction("failed") as tx:
        tx.publish_many("debits", [bytes(1_000)] * 5_000)
        raise LookupError
    assert all_bodies(client) == []
    assert client.list_transactions()["stages"] == []
    with client.transaction("failed") as tx:  # it is not committed, so it can be run again
        assert not tx.replayed
        tx.publish("debits", b"now")
    assert all_bodies(client) == [b"now"]


def test_mistakes_are_found_in_the_block_by_the_errors_of_publish(client: BrokerClient) -> None:
    with pytest.raises(BadName), client.transaction("no spaces"):
        raise AssertionError("the block does not even begin")
    with client.transaction("mistakes") as tx:
        with pytest.raises(UnknownTopic, match="create-topic nowhere"):
            tx.publish("nowhere", b"x")
        with pytest.raises(UnknownPartition, match="it has 0 to 3"):
            tx.publish("debits", b"x", partition=4)
        with pytest.raises(MessageTooLarge):
            tx.publish("debits", bytes((16 << 20) + 1))
        client.add_partitions("debits", 5)
        tx.publish("debits", b"y", partition=4)
        tx.publish("debits", bytes(16 << 20), partition=0)
    assert [len(message.body) for message in stored(client, "debits", 4)] == [1]
    assert [len(message.body) for message in stored(client, "debits", 0)] == [16 << 20]


def test_a_commit_that_is_refused_raises_why(client: BrokerClient) -> None:
    client.create_topic("gone")
    with pytest.raises(UnknownTopic, match="gone"), client.transaction("refused") as tx:
        tx.publish("debits", b"x")
        tx.publish("gone", b"x")
        client.delete_topic("gone")
    assert all_bodies(client) == []
    assert client.list_transactions()["stages"] == []
    stage = client.begin_transaction("refused")
    assert stage is not None
    stage.add("debits", 0, data_frames("debits", [b"a", b"b"]), 2)
    with pytest.raises(UnknownStage, match="2 messages"):
        client.commit_transaction("refused", [(stage.stage_id, stage.finish() + 1)])
    assert client.commit_transaction("refused", [(stage.stage_id, 2)]).messages == 2


def test_late_writes_to_a_stage_that_was_ended_are_refused(client: BrokerClient) -> None:
    dead, left, good = [client.begin_transaction("attempts", 1) for _ in range(3)]
    assert dead
    assert left
    assert good
    for stage in (dead, left, good):
        stage.add("debits", 0, data_frames("debits", [stage.stage_id.encode()]), 1)
        assert stage.finish() == 1
    assert client.abort_transaction("attempts", 1, [dead.stage_id]) == 1
    assert client.commit_transaction("attempts", [(good.stage_id, 1)], 1).messages == 1
    for stage in (dead, left):
        with pytest.raises(UnknownStage, match="begin again"):
            stage.add("debits", 0, data_frames("debits", [b"late"]), 1)
            stage.finish()
    assert all_bodies(client) == [good.stage_id.encode()]
    assert client.abort_transaction("attempts", 1) == 0  # and it undoes nothing
    assert all_bodies(client) == [good.stage_id.encode()]


def test_a_big_transaction_is_staged_in_many_frames_by_several_threads_and_clients(
    client: BrokerClient, shared: BrokerProcess
) -> None:
    stages: list[tuple[str, int]] = []

    def work(name: bytes, mine: BrokerClient) -> None:
        stage = mine.begin_transaction("big")
        assert stage is not None
        for number in range(40):
            bodies = [b"%s %d %d " % (name, number, each) + bytes(400) for each in range(250)]
            stage.add(*PARTITIONS[number % 8], memoryview(data_frames(PARTITIONS[number % 8][0], bodies)), 250)
        huge = data_frames("debits", [b"%s huge %d " % (name, each) + bytes(100_000) for each in range(30)])
        stage.add("debits", 2, huge, 30)
        stages.append((stage.stage_id, stage.finish()))

    with BrokerClient(port=shared.port) as other:
        tasks = [(b"one", client), (b"two", client), (b"three", other)]
        workers = [threading.Thread(target=work, args=task) for task in tasks]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert ends(client) == [0] * 8
    receipt = client.commit_transaction("big", stages)
    assert receipt.messages == sum(count for _, count in stages) == 3 * (40 * 250 + 30)
    bodies = all_bodies(client)
    assert len(bodies) == len(set(bodies)) == receipt.messages


def test_the_command_line_shows_what_is_staged(
    client: BrokerClient, shared: BrokerProcess, capfd: pytest.CaptureFixture[str]
) -> None:
    def shown(*argv: str) -> str:
        assert main(["--port", str(shared.port), "list-transactions", *argv]) == 0
        return capfd.readouterr().out

    assert shown().startswith("nothing is staged; ")
    stage = client.begin_transaction("watched", 7)
    assert stage is not None
    stage.add("debits", 0, data_frames("debits", [b"a", b"b"]), 2)
    stage.finish()
    [row] = json.loads(shown("--json"))["stages"]
    assert (row["stage"], row["transaction"], row["number"], row["messages"]) == (stage.stage_id, "watched", 7, 2)
    assert ["stage", "transaction", "number", "messages", "bytes", "idle"] in [
        line.split() for line in shown().splitlines()
    ]
    assert client.abort_transaction("watched", 7) == 1


@pytest.mark.kill
def test_a_broker_killed_while_staging_loses_and_repeats_nothing(start_broker: Callable[..., BrokerProcess]) -> None:
    broker = start_broker()
    with BrokerClient(port=broker.port) as client:
        make_topics(client)

        def bodies() -> Iterator[bytes]:
            for number in range(12_000):
                if number in (5_000, 9_000):  # megabytes are on their way
                    broker.restart()
                yield b"%d " % number + bytes(1_000)

        with client.transaction("killed") as tx:
            tx.publish("credits", b"first")
            assert tx.publish_many("debits", bodies()) == 12_000
            assert ends(client) == [0] * 8
        assert tx.receipt is not None
        assert (tx.receipt.messages, tx.receipt.replayed) == (12_001, False)
        found = [int(message.body.split()[0]) for p in range(4) for message in stored(client, "debits", p)]
        assert sorted(found) == list(range(12_000))
        assert len(all_bodies(client)) == 12_001
        broker.restart()
        assert len(all_bodies(client)) == 12_001


@pytest.mark.kill
def test_a_broker_killed_during_the_commit_commits_once(start_broker: Callable[..., BrokerProcess]) -> None:
    broker = start_broker()
    with BrokerClient(port=broker.port) as client:
        make_topics(client)
        for attempt, pause in enumerate((0.0, 0.004, 0.008, 0.016, 0.032)):  # any moment will do
            stage = client.begin_transaction("killed", attempt)
            assert stage is not None
            for topic, partition in PARTITIONS:
                bodies = [b"%d %d " % (attempt, number) + bytes(400) for number in range(500)]
                stage.add(topic, partition, data_frames(topic, bodies), 500)
            stages = [(stage.stage_id, stage.finish())]
            killer = threading.Timer(pause, broker.restart)
            killer.start()
            assert client.commit_transaction("killed", stages, attempt).messages == 4_000
            killer.join()
            for place in PARTITIONS:
                found = [message.body for message in stored(client, *place)]
                assert len(found) == len(set(found)) == 500 * (attempt + 1)


@pytest.mark.kill
def test_a_stage_that_is_not_used_expires(start_broker: Callable[..., BrokerProcess]) -> None:
    broker = start_broker(transaction_timeout=0.2)
    with BrokerClient(port=broker.port) as client:
        make_topics(client)
        with pytest.raises(UnknownStage, match="begin again"), client.transaction("slow") as tx:
            for _ in range(3):
                tx.publish_many("debits", [bytes(1000)] * 900, partition=0)  # together more than one frame carries
            wait_until(lambda: not client.list_transactions()["stages"])
        assert all_bodies(client) == []
