"""Pulling messages with both clients, from a real broker."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import trio

from qb import AsyncBrokerClient, BadRequest, BrokerClient, OffsetOutOfRange, UnknownPartition, UnknownTopic
from qb.clients.blocking.read_ahead import MOST
from qb.clients.protocol.connection_phases import Phase
from qb.clients.protocol.conversation import Conversation
from qb.clients.protocol.fetch_requests import BulkFetchRequest, FetchRequest, fetched, portion_in, raw_fetched
from qb.core.wire.errors import PeerMisbehaved
from qb.core.wire.frames import Frame, MessageType, decode_frame, encode_frame
from qb.testing.fault_proxy import FaultProxy
from tests.support.brokers import BrokerProcess

pytestmark = pytest.mark.timeout(30)
PARTITIONS = 2  # of the topic that each test has


def bodies(messages: list) -> list[bytes]:
    return [message.body for message in messages]


def test_a_message_comes_back_with_all_that_was_published(client: BrokerClient, topic: str) -> None:
    client.publish(topic, b"first", 1)
    client.publish(topic, "grüße".encode(), 1, key="k1", timestamp_ms=1_700_000_000_123, source="web", note="a=b")
    _, message = client.fetch(topic, 1)
    assert (message.topic, message.partition, message.offset) == (topic, 1, 1)
    assert (message.text(), message.key, message.timestamp) == ("grüße", "k1", 1_700_000_000_123)
    assert message.properties == {"source": "web", "note": "a=b"}
    assert (message.attempt, message.subscription_id) == (1, None)
    assert message.time == datetime(2023, 11, 14, 22, 13, 20, 123_000, UTC)
    with pytest.raises(RuntimeError, match="only a message of a subscription"):
        message.ack()


def test_several_fetches_on_their_way_bring_stored_batches_and_where_their_frames_start(
    client: BrokerClient, topic: str
) -> None:
    for start in (0, 10, 20):
        client.publish_many(topic, [b"%d" % number for number in range(start, start + 10)], 0)
    answers = [client.begin_fetch(BulkFetchRequest(topic, 0, offset, 1)) for offset in (0, 13, 29, 30)]
    found = []
    for answer in answers:
        got = answer()
        starts = [int.from_bytes(got.starts[at : at + 4], "big") for at in range(0, len(got.starts), 4)]
        frames = [decode_frame(got.frames, (start - starts[0]) % 2**32) for start in starts]
        assert [frame.sequence_number for frame in frames] == [*range(got.offset, got.next_offset)]
        found += [frame.body for frame in frames]
    assert found == [b"%d" % number for number in range(30)]
    lost = client.begin_fetch(BulkFetchRequest(topic, 5, 0, 1))
    with pytest.raises(UnknownPartition):
        lost()


class LosesAnswers(FaultProxy):
    """Ends connections in place of passing on what the broker answers, so many times."""

    def __init__(self, target: int) -> None:
        super().__init__()
        self.target, self.left = target, 0

    def _waits(self, frames: bytes) -> bool:
        self.left -= 1
        return self.left < 0


def test_a_fetch_whose_answer_was_lost_is_asked_for_again(
    shared: BrokerProcess, client: BrokerClient, topic: str
) -> None:
    client.publish_many(topic, [b"0", b"1"], 0)
    proxy = LosesAnswers(shared.port)
    with closing(proxy), closing(BrokerClient(port=proxy.port)) as other:
        other.connect()
        proxy.left = 1
        assert bodies(other.fetch(topic, 0)) == [b"0", b"1"]
        began = other.begin_fetch(BulkFetchRequest(topic, 0, 0, 1))
        assert began().next_offset == 2
        proxy.left = 1
        began = other.begin_fetch(BulkFetchRequest(topic, 0, 0, 1))
        assert began().next_offset == 2


async def test_a_fetch_of_an_async_client_whose_answer_was_lost_is_asked_for_again(
    shared: BrokerProcess, client: BrokerClient, topic: str
) -> None:
    client.publish_many(topic, [b"0", b"1"], 0)
    with closing(LosesAnswers(shared.port)) as proxy:
        async with AsyncBrokerClient(port=proxy.port) as other:
            proxy.left = 1
            assert bodies(await other.fetch(topic, 0)) == [b"0", b"1"]
            await other.close()
            assert bodies(await other.fetch(topic, 0)) == [b"0", b"1"]  # connects anew


def test_an_answer_that_is_shorter_than_its_index_is_refused() -> None:
    about = {"status": "success", "offset": "0", "count": "3"}
    with pytest.raises(PeerMisbehaved, match="shorter than its index"):
        raw_fetched(Frame(MessageType.ACK, 1, 0, about, bytes(11)))


async def test_several_topics_are_described_at_once(client: BrokerClient, shared: BrokerProcess, topic: str) -> None:
    client.create_topic(f"{topic}-2")
    client.publish(topic, b"x", 1)
    described = client.describe_topics([f"{topic}-2", topic])
    assert described == [client.describe_topic(f"{topic}-2"), client.describe_topic(topic)]
    assert [log["next_offset"] for log in described[1]["logs"]] == [0, 1]
    async with AsyncBrokerClient(port=shared.port) as other:
        assert await other.describe_topics([topic]) == described[1:]
    with pytest.raises(UnknownTopic, match="nowhere"):
        client.describe_topics([topic, "nowhere"])


def test_a_reader_that_goes_on_sees_what_came_after_the_fetch_that_was_sent_ahead(
    client: BrokerClient, topic: str
) -> None:
    seen: list[bytes] = []
    offset = 0
    for number in range(20):  # at the end again and again: an answer that came ahead is empty by then
        client.publish(topic, b"%d" % number, 0)
        messages = client.fetch(topic, 0, offset)
        seen += bodies(messages)
        offset = messages.next_offset
    assert seen == [b"%d" % number for number in range(20)]


def test_a_fetch_sent_ahead_is_only_used_for_what_was_asked(client: BrokerClient, topic: str) -> None:
    client.publish_many(topic, [b"%d" % number for number in range(100)], 0)
    for size in (10, 3, 40):
        at = 0
        for _ in range(2):
            at = client.fetch(topic, 0, at, max_messages=size).next_offset
        assert bodies(client.fetch(topic, 0, at, max_messages=1)) == [b"%d" % at]
        assert bodies(client.fetch(topic, 0, 2, max_messages=size))[0] == b"2"
        assert bodies(client.fetch(topic, 1)) == []


def test_a_fetch_sent_ahead_that_is_lost_with_its_broker_is_asked_for_again(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path)
    try:
        with BrokerClient(port=broker.port) as client:
            client.create_topic("t")
            client.publish_many("t", [b"%d" % number for number in range(100)])
            at = 0
            for _ in range(3):
                at = client.fetch("t", 0, at, max_messages=10).next_offset
            broker.kill()
            broker.start()
            assert bodies(client.fetch("t", 0, at, max_messages=10)) == [b"%d" % n for n in range(30, 40)]
    finally:
        broker.kill()


def test_a_fetch_does_not_wait_for_the_one_that_it_sends_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broker = BrokerProcess(tmp_path)
    try:
        with BrokerClient(port=broker.port) as client:
            client.create_topic("t")
            client.publish_many("t", [b"%d" % number for number in range(100)])
            at = client.fetch("t", 0, 0, max_messages=10).next_offset
            answer = client._link.answer

            def answer_and_die(*arguments: Any) -> Frame:
                found = answer(*arguments)
                broker.kill()
                client._link._connection.phase = Phase.GREETING  # as it is as soon as the link's thread has noticed
                return found

            monkeypatch.setattr(client._link, "answer", answer_and_die)
            assert bodies(client.fetch("t", 0, at, max_messages=10)) == [b"%d" % n for n in range(10, 20)]
    finally:
        broker.kill()


def test_more_partitions_than_are_read_ahead_leave_nothing_behind(client: BrokerClient, topic: str) -> None:
    client.create_topic(f"{topic}-wide", partitions=MOST + 4)
    for partition in range(MOST + 4):
        client.publish_many(f"{topic}-wide", [b"%d" % n for n in range(9)], partition)
        at = 0
        for _ in range(2):
            at = client.fetch(f"{topic}-wide", partition, at, max_messages=3).next_offset
    assert len(client._link._connection.calls) <= len(client._read_ahead._ahead) == MOST
    assert bodies(client.fetch(f"{topic}-wide", 0, 6, max_messages=3)) == [b"6", b"7", b"8"]


def test_threads_that_read_the_same_partition_do_not_get_each_others_messages(client: BrokerClient, topic: str) -> None:
    client.publish_many(topic, [b"%d" % number for number in range(2000)], 0)
    found: dict[int, list[bytes]] = {}

    def read(portion: int) -> None:
        at, seen = 0, []
        while messages := client.fetch(topic, 0, at, max_messages=portion):
            seen += bodies(messages)
            at = messages.next_offset
        found[portion] = seen

    threads = [threading.Thread(target=read, args=(portion,)) for portion in (7, 50, 51)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(found[portion] == [b"%d" % number for number in range(2000)] for portion in (7, 50, 51))


def test_fetched_messages_behave_like_a_list(client: BrokerClient, topic: str) -> None:
    client.publish_many(topic, [b"0", b"1", b"2"], 0)
    fetched = client.fetch(topic, 0)
    first, *_ = fetched
    assert (len(fetched), first, fetched[-1].body, bodies(fetched[1:])) == (3, fetched[0], b"2", [b"1", b"2"])
    assert [] + fetched == fetched + [] == list(fetched) == fetched
    assert fetched + fetched == [*fetched, *fetched]
    assert not client.fetch(topic, 1)
    with pytest.raises(IndexError):
        fetched[3]


def test_a_partition_is_read_portion_by_portion(client: BrokerClient, topic: str) -> None:
    client.publish_many(topic, [b"%d" % n for n in range(2_500)], partition=0)
    found, portion = [], client.fetch(topic, 0, -2, max_messages=700)
    while portion:
        found += bodies(portion)
        portion = client.fetch(topic, 0, portion.next_offset, max_messages=700)
    assert found == [b"%d" % n for n in range(2_500)]
    assert portion.next_offset == 2_500


def test_minus_one_is_the_end_and_past_it_is_empty(client: BrokerClient, topic: str) -> None:
    client.publish_many(topic, [b"x"] * 3, partition=0)
    assert (client.fetch(topic, 0, -1), client.fetch(topic, 0, -1).next_offset) == ([], 3)
    assert client.fetch(topic, 0, 1_000) == []


def test_the_bytes_that_are_wanted_bound_the_answer_but_for_the_first_message(client: BrokerClient, topic: str) -> None:
    client.publish_many(topic, [bytes(5_000)] * 4, partition=0)
    assert len(client.fetch(topic, 0, 0, max_bytes=12_000)) == 2
    assert len(client.fetch(topic, 0, 0, max_bytes=1)) == 1


def test_what_cannot_be_fetched_is_a_typed_error(client: BrokerClient, topic: str) -> None:
    with pytest.raises(UnknownTopic):
        client.fetch("nowhere")
    with pytest.raises(UnknownPartition):
        client.fetch(topic, 2)
    with pytest.raises(BadRequest):
        client.fetch(topic, 0, -3)


def test_before_the_first_kept_offset_the_error_names_what_is_kept(start_broker: Callable[..., BrokerProcess]) -> None:
    broker = start_broker(segment_bytes=4096, retention_bytes=1, retention_interval=0.01)
    with BrokerClient(port=broker.port) as client:
        client.create_topic("t")
        client.publish_many("t", [bytes(3_000)])
        while client.offsets("t").first == 0:
            client.publish("t", bytes(3_000))
        with pytest.raises(OffsetOutOfRange) as caught:
            client.fetch("t", 0, 0)
        first, end = client.offsets("t")
        assert 0 < caught.value.first <= first
        assert caught.value.end == end
        assert str(caught.value.first) in str(caught.value)


def test_a_fetch_that_waits_holds_up_no_other_call_and_ends_with_the_first_message(
    client: BrokerClient, topic: str
) -> None:
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.extend(bodies(client.fetch(topic, 0, 0, max_wait=60))))
    thread.start()
    client.ping()
    client.publish(topic, b"at last", 0)
    thread.join()
    assert found == [b"at last"]


def test_a_fetch_may_wait_longer_than_a_request(shared: BrokerProcess, topic: str) -> None:
    with BrokerClient(port=shared.port, request_timeout=0.5) as client:
        assert client.fetch(topic, 0, 0, max_wait=0.8) == []


def test_offsets_are_found_by_time(client: BrokerClient, topic: str) -> None:
    first = client.publish(topic, b"one", 0)
    while client.publish(topic, b"later", 0).timestamp == first.timestamp:
        pass
    (first_offset, end), last = client.offsets(topic), client.fetch(topic, 0, 0)[-1]
    assert (first_offset, end) == (0, last.offset + 1)
    assert client.offset_for_time(topic, 0, first.timestamp) == 0
    assert client.offset_for_time(topic, 0, first.timestamp + 1) == last.offset
    assert client.offset_for_time(topic, 0, datetime(2100, 1, 1, tzinfo=UTC)) == end


def test_groups_are_listed_described_reset_and_deleted(client: BrokerClient, topic: str) -> None:
    client.publish_many(topic, [b"x"] * 5, partition=1)
    client.commit_offsets("tools", [(topic, 1, 2)])
    assert [group["group"] for group in client.list_groups()] == ["tools"]
    (_, one) = client.reset_group("tools", topic, "latest")
    assert (one["partition"], one["offset"]) == (1, 5)
    assert client.reset_group("tools", topic, 3, partition=1)[1]["offset"] == 3
    assert [row["lag"] for row in client.describe_group("tools")["partitions"]] == [0, 2]
    client.delete_group("tools")
    assert client.committed_offsets("tools") == []


def test_bytes_that_are_no_stored_frames_are_noticed() -> None:
    whole = encode_frame(MessageType.DATA, 7, 1, {"topic": "t"}, b"body")
    about = {"status": "success", "offset": "7", "count": "1"}
    index = bytes(4)
    found = fetched(portion_in(Frame(MessageType.ACK, 1, 0, about, index + whole), FetchRequest("t", 0, 7)))
    assert (found.next_offset, [(message.offset, message.body) for message in found]) == (8, [(7, b"body")])
    for broken in (index + whole[:-1], b"\0\0\0\1" + whole, index + bytes(40), index, b"\xff" * 4 + whole, b"\0"):
        with pytest.raises(PeerMisbehaved):
            fetched(portion_in(Frame(MessageType.ACK, 1, 0, about, broken), FetchRequest("t", 0, 7)))
    with pytest.raises(PeerMisbehaved, match="count"):
        portion_in(Frame(MessageType.ACK, 1, 0, {"status": "success", "offset": "7"}, whole), FetchRequest("t", 0, 7))


def test_a_consistent_fetch_that_a_broker_did_not_understand_is_no_answer() -> None:
    about = {"status": "success", "offset": "7", "count": "0"}
    wanted = FetchRequest("t", 0, 7, consistent=True)
    assert wanted.properties()["consistent"] == "1"
    assert "consistent" not in FetchRequest("t", 0, 7).properties()
    with pytest.raises(PeerMisbehaved, match="does not know consistent reads"):
        portion_in(Frame(MessageType.ACK, 1, 0, about, b""), wanted)
    assert portion_in(Frame(MessageType.ACK, 1, 0, about | {"consistent": "1"}, b""), wanted).count == 0


def test_a_consistent_fetch_has_what_was_stored_before_it_and_nothing_that_was_asked_for_ahead(
    client: BrokerClient, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.publish_many(topic, [b"0", b"1", b"2"], 0)
    for offset in (0, 1):
        client.fetch(topic, 0, offset, max_messages=1)  # the next one is on its way now
    monkeypatch.setattr(client._read_ahead, "take", lambda *wanted: pytest.fail("asked for before"))
    assert bodies(client.fetch(topic, 0, 2, max_messages=1, consistent=True)) == [b"2"]
    assert client.offsets(topic, consistent=True).next == 3
    client.commit_offsets("readers", [(topic, 0, 2)])
    assert [each.offset for each in client.committed_offsets("readers", consistent=True)] == [2]


def test_a_fetch_says_all_that_it_wants() -> None:
    _, frame = Conversation().compose(MessageType.FETCH, FetchRequest("t", 3, 9, 10, 11, 0.5, 12).properties())
    for part in (b"topic=t", b"partition=3", b"offset=9", b"max_messages=10", b"max_bytes=11", b"max_wait=0.5"):
        assert part in frame


async def test_the_trio_client_pulls_the_same_messages(shared: BrokerProcess, topic: str) -> None:
    async with AsyncBrokerClient(port=shared.port) as client:
        await client.publish_many(topic, [b"%d" % n for n in range(1_000)], partition=1)
        portion = await client.fetch(topic, 1, 10, max_messages=5)
        assert bodies(portion) == [b"10", b"11", b"12", b"13", b"14"]
        assert portion.next_offset == 15
        assert await client.offsets(topic, 1) == (0, 1_000)
        assert await client.offset_for_time(topic, 1, 0) == 0
        with pytest.raises(UnknownTopic):
            await client.fetch("nowhere")


async def test_a_trio_fetch_that_waits_holds_up_no_other_call_and_can_be_cancelled(
    shared: BrokerProcess, topic: str
) -> None:
    async with AsyncBrokerClient(port=shared.port) as client, trio.open_nursery() as nursery:
        found: list[bytes] = []

        async def wait_for_message() -> None:
            found.extend(bodies(await client.fetch(topic, 0, 0, max_wait=60)))
            nursery.cancel_scope.cancel()

        nursery.start_soon(wait_for_message)
        nursery.start_soon(client.fetch, topic, 1, 0, 500, 1 << 20, 60.0)
        await client.ping()
        await client.publish(topic, b"at last", 0)
    assert found == [b"at last"]
