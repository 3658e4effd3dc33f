"""The client's side of the protocol, without a socket."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from itertools import pairwise
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qb.clients.protocol import client_errors as errors
from qb.clients.protocol.client_errors import PublishFailed, PublishUncertain, RequestRefused, refusal
from qb.clients.protocol.conversation import (
    FIRST_REQUEST,
    BytesToSend,
    Conversation,
    Event,
    Goodbye,
    PublishesSettled,
    PushedFrame,
    RequestAnswered,
    TurnedAway,
    Welcome,
    answer_of,
)
from qb.clients.protocol.publish_frames import PORTION, PublishForm, as_bytes, portions
from qb.clients.protocol.publish_tally import PublishTally
from qb.clients.protocol.receipts import Offsets, Receipt, StoredRun
from qb.clients.protocol.unacked_publishes import RefusedPublishes, StoredPublishes, UnackedBatch, UnackedPublishes
from qb.core.wire.errors import Code, PeerMisbehaved
from qb.core.wire.frames import PROBE, MessageType, decode_frame, encode_frame, frame_length
from qb.core.wire.runs.publish_table import as_publishes
from qb.doors.binary import replies

OFFER = {"features": "redirect,publish_runs", "compression": "zstd,lz4"}
FORM = PublishForm("orders")


def ack(number: int, **properties: object) -> bytes:
    texts = {"status": "success"} | {name: str(value) for name, value in properties.items()}
    return encode_frame(MessageType.ACK, number, 1_700_000_000_000, texts)


def stored(number: int, count: int = 1, offset: int = 0, partition: int = 0, **more: object) -> bytes:
    return ack(number, count=count, offset=offset, partition=partition, durability="fsynced", **more)


def refused(number: int, code: str, count: int = 1) -> bytes:
    return ack(number, status="error", code=code, error="because", count=count)


def events(conversation: Conversation, data: bytes) -> list[Event]:
    conversation.receive(data)
    found = []
    while (event := conversation.next_event()) is not None:
        found.append(event)
    return found


def welcomed(conversation: Conversation, producer_id: int = 7) -> Conversation:
    hello = decode_frame(conversation.open())
    answer = ack(hello.sequence_number, server="qb/1", max_message_size=1000, producer_id=producer_id)
    assert events(conversation, answer) == [Welcome("qb/1")]
    return conversation


def split(data: bytes) -> list[tuple[int, bytes]]:
    """Return (number, body) of each frame."""
    found, position = [], 0
    while position < len(data):
        frame = decode_frame(data, position)
        found.append((frame.sequence_number, frame.body))
        position += frame_length(data, position)
    return found


# The answer that a publisher waits for


def in_general(conversation: Conversation, data: bytes) -> object:
    """What the conversation makes of these bytes without its short way for such answers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Conversation, "_next_stored", lambda self: None)
        return heard(conversation, data)


def heard(conversation: Conversation, data: bytes) -> object:
    try:
        return [
            repr(event) if not isinstance(event, PublishesSettled) else settled(event)
            for event in events(conversation, data)
        ]
    except PeerMisbehaved as error:
        return str(error)


def settled(event: PublishesSettled) -> list[object]:
    return [(batch.first, batch.count, batch.left, repr(batch.answers)) for batch in event.batches]


@given(st.integers(0, 12), st.integers(0, 12), st.integers(0, 2**64), st.booleans(), st.data())
def test_an_answer_that_something_is_stored_is_read_the_same_in_one_go(number, count, offset, duplicate, data):
    answer = bytearray(replies.stored(number, count, offset, "t-1", 3, "fsynced", 99, duplicate))
    if data.draw(st.booleans()):
        answer[data.draw(st.integers(0, len(answer) - 1))] ^= data.draw(st.integers(1, 255))
    sent = bytes(answer) + stored(11, offset=4)
    found = []
    for listen in (heard, in_general):
        conversation = welcomed(Conversation())
        for size in (3, 1, 4, 4):
            conversation.publish(FORM, [b"x"] * size)
        found.append(listen(conversation, sent))
    assert found[0] == found[1]


# Opening


def test_the_first_hello_asks_for_a_new_producer_and_later_ones_continue_as_it() -> None:
    conversation = Conversation("me")
    first = decode_frame(conversation.open())
    assert first.type == MessageType.HELLO
    assert first.properties == {"protocol": "1", **OFFER, "client_id": "me", "producer_id": "new"}
    welcomed(conversation, producer_id=42)
    assert decode_frame(conversation.open()).properties["producer_id"] == "42"
    assert conversation.max_message_size == 1000


def test_the_secret_that_came_with_a_producer_id_is_sent_with_it() -> None:
    conversation = Conversation()
    hello = decode_frame(conversation.open())
    about = {"server": "qb/1", "max_message_size": 1000, "producer_id": 42, "producer_secret": "s3"}
    events(conversation, ack(hello.sequence_number, **about))
    assert decode_frame(conversation.open()).properties["producer_secret"] == "s3"


def test_publishes_of_a_producer_that_the_broker_replaced_are_uncertain() -> None:
    conversation = welcomed(Conversation(), producer_id=7)
    batch = conversation.publish(FORM, [b"a"])
    assert conversation.lost() == []
    hello = decode_frame(conversation.open())
    answer = ack(hello.sequence_number, server="qb/1", max_message_size=1000, producer_id=8)
    assert events(conversation, answer) == [Welcome("qb/1", [batch])]
    assert conversation.unanswered() == []
    with pytest.raises(PublishUncertain, match="may or may not be stored"):
        batch.receipt("orders")


def test_a_producer_whose_secret_is_refused_is_not_asked_for_again() -> None:
    conversation = welcomed(Conversation())
    batch = conversation.publish(FORM, [b"a"])
    assert conversation.lost() == []
    hello = decode_frame(conversation.open())
    events(conversation, refused(hello.sequence_number, "PRODUCER_FENCED"))
    assert conversation.lost() == [batch]
    assert decode_frame(conversation.open()).properties == {
        "protocol": "1",
        **OFFER,
        "producer_id": "new",
    }


def test_without_idempotence_no_producer_id_is_asked_for() -> None:
    assert decode_frame(Conversation(idempotent=False).open()).properties == {
        "protocol": "1",
        **OFFER,
    }


def test_a_refused_hello_turns_the_client_away() -> None:
    conversation = Conversation()
    number = decode_frame(conversation.open()).sequence_number
    [event] = events(conversation, refused(number, "BAD_REQUEST"))
    assert isinstance(event, TurnedAway)
    assert isinstance(event.error, errors.BadRequest)


def test_a_refusal_of_nothing_in_particular_turns_the_client_away() -> None:
    conversation = Conversation()
    conversation.open()
    [event] = events(conversation, refused(0, "TOO_MANY_CONNECTIONS"))
    assert isinstance(event, TurnedAway)
    assert isinstance(event.error, errors.TooManyConnections)


# How bytes arrive


REPLIES = b"".join(
    [
        stored(1, count=2, offset=10),
        encode_frame(MessageType.HEARTBEAT, PROBE),
        ack(FIRST_REQUEST + 5),
        encode_frame(MessageType.HEARTBEAT, 0),
        encode_frame(MessageType.DELIVER, 3, properties={"subscription_id": "s"}, body=b"xyz"),
        refused(3, "DISK_FULL"),
        encode_frame(MessageType.GOODBYE, properties={"reason": "upgrade"}),
    ]
)


def read_in(pieces: list[bytes]) -> list[Event]:
    conversation = welcomed(Conversation())
    conversation.publish(FORM, [b"a", b"b"], "first")
    conversation.publish(FORM, [b"c"], "second")
    return [event for piece in pieces for event in events(conversation, piece)]


def described(found: list[Event]) -> list[object]:
    return [
        [batch.waiter for batch in event.batches] if isinstance(event, PublishesSettled) else event for event in found
    ]


def test_each_kind_of_frame_becomes_its_event() -> None:
    settled, owed, answered, pushed, other, goodbye = read_in([REPLIES])
    assert described([settled, other]) == [["first"], ["second"]]
    assert owed == BytesToSend(encode_frame(MessageType.HEARTBEAT, PROBE))
    assert isinstance(answered, RequestAnswered)
    assert answered.number == FIRST_REQUEST + 5
    assert isinstance(pushed, PushedFrame)
    assert pushed.frame.body == b"xyz"
    assert goodbye == Goodbye("upgrade")


def test_events_are_the_same_when_bytes_come_one_by_one() -> None:
    one_by_one = [REPLIES[i : i + 1] for i in range(len(REPLIES))]
    assert described(read_in(one_by_one)) == described(read_in([REPLIES]))


@given(cuts=st.lists(st.integers(0, len(REPLIES)), max_size=6))
def test_events_do_not_depend_on_how_tcp_cuts_the_bytes(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(REPLIES)]
    pieces = [REPLIES[a:b] for a, b in pairwise(edges)]
    assert described(read_in(pieces)) == described(read_in([REPLIES]))


def read_into_room(steps: list[int]) -> list[Event]:
    """Read the replies as a link does: into the room for a long frame if there is one."""
    conversation = welcomed(Conversation())
    conversation.publish(FORM, [b"a", b"b"], "first")
    conversation.publish(FORM, [b"c"], "second")
    found, at = list[Event](), 0
    for step in [*steps, *[len(REPLIES)] * 20]:
        room, data = conversation.room(), REPLIES[at : at + step]
        if room is not None:
            data = data[: len(room)]
            room[: len(data)] = data
            conversation.filled(len(data))
            found += events(conversation, b"")
        else:
            found += events(conversation, data)
        at += len(data)
    return found


@given(cuts=st.lists(st.integers(0, len(REPLIES)), max_size=6), steps=st.lists(st.integers(1, 90), max_size=9))
def test_long_frames_are_the_same_events(cuts: list[int], steps: list[int]) -> None:
    as_short_ones = described(read_in([REPLIES]))
    pieces = [REPLIES[a:b] for a, b in pairwise([0, *sorted(cuts), len(REPLIES)])]
    with mock.patch("qb.clients.protocol.conversation.LONG_FRAME", 40):
        assert described(read_in(pieces)) == as_short_ones
        assert described(read_into_room(steps)) == as_short_ones


def stored_ack(number: int, count: int = 1) -> bytes:
    """Return an ack as our brokers write it."""
    about = {"status": "success", "topic": "orders", "partition": "0", "offset": "5", "durability": "fsynced"}
    return encode_frame(MessageType.ACK, number, 99, about | {"count": str(count)})


@given(st.integers(0, 400))
def test_acks_that_are_taken_at_once_and_what_is_left_for_later_are_all_that_has_come(cut: int) -> None:
    conversation = welcomed(Conversation())
    batches = [conversation.publish(FORM, bodies) for bodies in ([b"a"], [b"b", b"c"], [b"d"])]
    data = stored_ack(1) + stored_ack(2, 2) + refused(4, Code.DISK_FULL)
    taken = list[UnackedBatch]()
    found = list[Event]()
    for piece in (data[:cut], data[cut:]):
        complete, left = conversation.take_acks(piece)
        taken += complete
        found += events(conversation, left)
    later = [batch for event in found if isinstance(event, PublishesSettled) for batch in event.batches]
    assert taken + later == batches
    assert conversation.unread == 0


def test_acks_behind_something_that_is_unread_wait_for_their_turn() -> None:
    conversation = welcomed(Conversation())
    conversation.publish(FORM, [b"a"])
    pushed = encode_frame(MessageType.DELIVER, properties={"subscription_id": "s"})
    assert conversation.take_acks(pushed) == ([], pushed)
    conversation.receive(pushed[:9])
    assert conversation.take_acks(pushed[9:] + stored_ack(1)) == ([], pushed[9:] + stored_ack(1))
    first, second = events(conversation, pushed[9:] + stored_ack(1))
    assert (type(first), type(second)) == (PushedFrame, PublishesSettled)


def test_only_the_body_of_a_long_answer_is_lent() -> None:
    replies = [
        encode_frame(kind, FIRST_REQUEST + 5, body=b'{"a":1}') for kind in (MessageType.ACK, MessageType.DELIVER)
    ]
    conversation = welcomed(Conversation())
    with mock.patch("qb.clients.protocol.conversation.LONG_FRAME", 20):
        found = [event for reply in replies for half in (reply[:9], reply[9:]) for event in events(conversation, half)]
    answered, pushed = found
    assert isinstance(answered, RequestAnswered)
    assert isinstance(answered.frame.body, memoryview)
    assert isinstance(pushed, PushedFrame)
    assert isinstance(pushed.frame.body, bytes)
    assert answer_of(answered.frame._replace(properties={"status": "success"})) == {"a": 1}


def test_trailing_bytes_wait_for_the_rest_of_their_frame() -> None:
    conversation = welcomed(Conversation())
    [event] = events(conversation, encode_frame(MessageType.GOODBYE) + ack(FIRST_REQUEST + 5)[:20])
    assert isinstance(event, Goodbye)
    [event] = events(conversation, ack(FIRST_REQUEST + 5)[20:])
    assert isinstance(event, RequestAnswered)


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n" + b"x" * 40,
        bytes(32),
        stored(1, offset=0).replace(b"offset=0", b"offset=x"),
        stored(1, count=1).replace(b"count=1", b"count=-"),
    ],
    ids=["another protocol", "length 0", "offset is no number", "count is no number"],
)
def test_a_peer_that_is_no_broker_is_found_out(data: bytes) -> None:
    conversation = welcomed(Conversation())
    conversation.publish(FORM, [b"a"])
    with pytest.raises(PeerMisbehaved):
        events(conversation, data)


@given(data=st.binary(max_size=200))
def test_arbitrary_bytes_raise_nothing_but_peer_misbehaved(data: bytes) -> None:
    conversation = welcomed(Conversation())
    conversation.publish(FORM, [b"a"])
    try:
        events(conversation, data)
    except PeerMisbehaved:
        pass


def test_a_new_connection_forgets_half_a_frame_of_the_old_one() -> None:
    conversation = welcomed(Conversation())
    events(conversation, ack(FIRST_REQUEST + 5)[:20])
    welcomed(conversation)


# Publishing


def test_publishes_are_numbered_from_one_and_requests_from_the_upper_half() -> None:
    conversation = welcomed(Conversation())
    assert split(conversation.publish(FORM, [b"a", b"b"]).data) == [(1, b"a"), (2, b"b")]
    number, data = conversation.request("describe_topic", {"topic": "t", "left_out": None})
    assert number >= FIRST_REQUEST
    frame = decode_frame(data)
    assert (frame.type, frame.properties, frame.body) == (17, {"method": "describe_topic"}, b'{"topic": "t"}')
    assert split(conversation.publish(FORM, [b"c"]).data) == [(3, b"c")]


def test_a_form_makes_the_frame_that_the_definition_makes() -> None:
    form = PublishForm("orders", 3, "k", {"colour": "grün"}, timestamp_ms=99)
    properties = {"topic": "orders", "partition": "3", "key": "k", "colour": "grün"}
    assert form.frames(5, [b"body"]) == encode_frame(MessageType.PUBLISH, 5, 99, properties, b"body")


@pytest.mark.parametrize("more", [{}, {"note": "from a newer broker"}], ids=["as the broker writes it", "with more"])
@pytest.mark.parametrize("unverified", [False, True])
def test_a_receipt_says_whether_a_duplicate_could_be_compared(more: dict[str, str], unverified: bool) -> None:
    conversation = welcomed(Conversation())
    batch = conversation.publish(FORM, [b"a"])
    about = {"status": "success", "topic": "orders", "partition": "2", "offset": "50", "durability": "fsynced"}
    again = {"count": "1", "duplicate": "true"} | ({"unverified": "true"} if unverified else {})
    events(conversation, encode_frame(MessageType.ACK, 1, 1_700_000_000_000, about | again | more))
    assert batch.receipt("orders") == Receipt("orders", 2, 50, 1_700_000_000_000, "fsynced", True, unverified)


def test_one_ack_settles_the_batches_of_several_callers() -> None:
    conversation = welcomed(Conversation())
    one = conversation.publish(FORM, [b"a"], "one")
    two = conversation.publish(FORM, [b"b", b"c"], "two")
    three = conversation.publish(FORM, [b"d", b"e"], "three")
    [event] = events(conversation, stored(1, count=4, offset=50, partition=2))
    assert event == PublishesSettled([one, two])
    assert one.receipt("orders") == Receipt("orders", 2, 50, 1_700_000_000_000, "fsynced")
    assert two.stored_runs(0) == [StoredRun(0, 2, 2, 51)]
    assert (three.left, three.first_unanswered) == (1, 1)


def test_what_is_not_answered_is_sent_again_byte_for_byte_and_in_order() -> None:
    conversation = welcomed(Conversation())
    first = conversation.publish(FORM, [b"a", b"bb", b"ccc"])
    second = conversation.publish(FORM, [b"dddd"])
    events(conversation, stored(1, count=2))
    assert conversation.lost() == []
    welcomed(conversation)
    again = conversation.unanswered()
    assert b"".join(again) == first.data[-len(FORM.frames(3, [b"ccc"])) :] + second.data
    assert split(b"".join(again)) == [(3, b"ccc"), (4, b"dddd")]


MIXED = [b"x" * (number % 7) for number in range(200)]


def takes_runs(conversation: Conversation, **more: object) -> Conversation:
    """Connect with a broker that takes PUBLISH_RUN."""
    hello = decode_frame(conversation.open())
    about = {"max_message_size": 1 << 20, "producer_id": 7, "features": "publish_runs"} | more
    events(conversation, ack(hello.sequence_number, server="qb/1", **about))
    return conversation


def test_many_bodies_of_different_lengths_are_sent_with_a_table_if_the_broker_says_that_it_takes_one() -> None:
    plain = welcomed(Conversation()).publish(FORM, MIXED)
    assert split(plain.data) == list(enumerate(MIXED, 1))
    conversation = takes_runs(Conversation())
    batch = conversation.publish(FORM, MIXED)
    assert decode_frame(batch.data).type == MessageType.PUBLISH_RUN
    assert conversation.to_send(batch) == batch.data
    assert as_publishes(batch.data) == plain.data
    assert split(takes_runs(Conversation(), max_message_size=1_000).publish(FORM, MIXED).data)[0] == (1, b"")


def test_a_run_with_a_table_is_sent_again_as_frames_to_a_broker_that_takes_no_table() -> None:
    conversation = takes_runs(Conversation())
    batch = conversation.publish(FORM, MIXED)
    conversation.lost()
    assert split(b"".join(welcomed(conversation).unanswered())) == list(enumerate(MIXED, 1))
    assert split(conversation.to_send(batch)) == list(enumerate(MIXED, 1))
    conversation.lost()
    assert takes_runs(conversation).unanswered() == [batch.data]


def test_of_a_run_with_a_table_only_what_is_not_answered_is_sent_again() -> None:
    conversation = takes_runs(Conversation())
    batch = conversation.publish(FORM, MIXED)
    events(conversation, stored(11, count=180) + refused(2, "STORAGE"))
    conversation.lost()
    again = b"".join(takes_runs(conversation).unanswered())
    assert split(again) == [(n, MIXED[n - 1]) for n in [1, *range(3, 11), *range(191, 201)]]
    events(conversation, stored(1) + stored(3, count=8) + stored(191, count=10))
    assert batch.left == 0


def test_a_refused_publish_is_not_sent_again_with_its_neighbours() -> None:
    conversation = welcomed(Conversation())
    conversation.publish(FORM, [b"a", b"b", b"c", b"d"])
    events(conversation, refused(2, "DISK_FULL") + stored(4))
    conversation.lost()
    welcomed(conversation)
    assert split(b"".join(conversation.unanswered())) == [(1, b"a"), (3, b"c")]


def test_an_answer_repeated_after_a_reconnect_changes_nothing() -> None:
    conversation = welcomed(Conversation())
    batch = conversation.publish(FORM, [b"a", b"b", b"c"])
    events(conversation, stored(2, offset=8))
    conversation.lost()
    welcomed(conversation)
    [event] = events(conversation, stored(1, count=3, offset=7, duplicate="true"))
    assert event == PublishesSettled([batch])
    assert Offsets(batch.stored_runs(0)) == [7, 8, 9]
    assert events(conversation, stored(1, count=3, offset=7)) == []


def test_publishes_without_a_producer_are_uncertain_when_the_connection_is_lost() -> None:
    conversation = Conversation(idempotent=False)
    conversation.open()
    batch = conversation.publish(FORM, [b"a"])
    assert conversation.lost() == [batch]
    assert conversation.unanswered() == []
    with pytest.raises(PublishUncertain, match="may or may not be stored"):
        batch.receipt("orders")


def test_a_fenced_producer_is_never_continued() -> None:
    conversation = welcomed(Conversation())
    first, second = conversation.publish(FORM, [b"a"]), conversation.publish(FORM, [b"b"])
    events(conversation, refused(1, "PRODUCER_FENCED"))
    assert conversation.lost() == [second]
    with pytest.raises(errors.ProducerFenced):
        first.receipt("orders")
    with pytest.raises(PublishUncertain):
        second.receipt("orders")
    assert decode_frame(conversation.open()).properties["producer_id"] == "new"


def test_a_publish_refused_because_of_a_shutdown_waits_for_the_next_broker() -> None:
    conversation = welcomed(Conversation())
    batch = conversation.publish(FORM, [b"a"])
    [event] = events(conversation, refused(1, "SHUTTING_DOWN"))
    assert isinstance(event, Goodbye)
    assert batch.left == 1
    assert split(conversation.unanswered()[0]) == [(1, b"a")]


def test_the_window_counts_from_the_oldest_unanswered_number() -> None:
    conversation = welcomed(Conversation(window_numbers=4))
    for _ in range(4):
        assert conversation.has_room
        conversation.publish(FORM, [b"a"])
    assert not conversation.has_room
    events(conversation, stored(2, count=3))
    assert not conversation.has_room
    events(conversation, stored(1))
    assert conversation.has_room


def test_the_window_counts_bytes() -> None:
    conversation = welcomed(Conversation(window_bytes=1000))
    batch = conversation.publish(FORM, [b"x" * 2000])
    assert not conversation.has_room
    conversation.abandon(batch)
    assert conversation.has_room


def test_an_abandoned_batch_is_neither_sent_again_nor_missed() -> None:
    conversation = welcomed(Conversation())
    one, two = conversation.publish(FORM, [b"a"]), conversation.publish(FORM, [b"b"])
    conversation.abandon(one)
    conversation.abandon(one)
    assert [split(piece) for piece in conversation.unanswered()] == [[(2, b"b")]]
    [event] = events(conversation, stored(1, count=2))
    assert event == PublishesSettled([two])


@given(data=st.data(), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_every_number_is_answered_once_however_acks_are_cut_ordered_and_repeated(
    data: st.DataObject, sizes: list[int]
) -> None:
    conversation = welcomed(Conversation())
    batches = [conversation.publish(FORM, [b"x"] * size) for size in sizes]
    total = sum(sizes)
    starts = sorted({1, *data.draw(st.lists(st.integers(1, total)))})
    runs = [(a, b - a) for a, b in zip(starts, [*starts[1:], total + 1], strict=True)]
    repeated = runs + data.draw(st.lists(st.sampled_from(runs), max_size=5))
    settled = []
    for number, count in data.draw(st.permutations(repeated)):
        for event in events(conversation, stored(number, count=count, offset=1000 + number)):
            assert isinstance(event, PublishesSettled)
            settled += event.batches
    assert sorted(batch.first for batch in settled) == [batch.first for batch in batches]
    tally = PublishTally()
    for batch in batches:
        tally.add(batch)
    tally.collect()
    assert tally.offsets() == range(1001, 1001 + total)
    assert conversation.unanswered() == []


# A row of publishes


def test_the_first_failure_by_index_is_the_one_that_is_raised() -> None:
    tally = PublishTally()
    one, two = UnackedBatch(1, 3, b""), UnackedBatch(4, 2, b"")
    tally.add(one)
    tally.add(two)
    two.answer(RefusedPublishes(4, 2, refusal("DISK_FULL", "no room")))
    one.answer(StoredPublishes(1, 1, 0, 70, 0, "fsynced", False))
    one.answer(RefusedPublishes(2, 1, refusal("LOG_POISONED", "fsync failed")))
    one.answer(StoredPublishes(3, 1, 0, 71, 0, "fsynced", False))
    tally.collect()
    with pytest.raises(PublishFailed, match="fsync failed") as caught:
        tally.offsets()
    assert caught.value.index == 1
    assert caught.value.stored == [70, 71]
    assert isinstance(caught.value.__cause__, errors.LogPoisoned)


def test_what_is_still_pending_at_the_end_is_uncertain() -> None:
    tally = PublishTally()
    batch = UnackedBatch(1, 3, b"")
    tally.add(batch)
    batch.answer(StoredPublishes(1, 2, 0, 5, 0, "fsynced", False))
    with pytest.raises(PublishUncertain) as caught:
        tally.offsets()
    assert (caught.value.index, list(caught.value.stored)) == (2, [5, 6])


def test_bodies_of_a_list_make_portions_of_about_one_size_whatever_their_lengths() -> None:
    bodies = [b"x" * (20 if number < 30_000 else 4_000) for number in range(31_000)]
    found = list(portions(bodies, FORM.overhead, 1 << 20))
    assert [body for portion in found for body in portion] == bodies
    sizes = [sum(map(len, portion)) + FORM.overhead * len(portion) for portion in found]
    assert all(PORTION / 8 < size < 4 * PORTION for size in sizes[:-1])


def test_portions_hold_every_body_once_and_are_worth_a_system_call() -> None:
    bodies = [bytes([i % 256]) * (i % 3000) for i in range(500)]
    found = list(portions(iter(bodies), FORM.overhead, 1 << 20))
    assert [body for portion in found for body in portion] == bodies
    assert all(sum(map(len, portion)) < PORTION + 3000 for portion in found)
    assert all(sum(map(len, portion)) + FORM.overhead * len(portion) >= PORTION for portion in found[:-1])


@pytest.mark.parametrize(
    ("bad", "error"), [("text", TypeError), (7, TypeError), (b"x" * 11, errors.MessageTooLarge)], ids=str
)
def test_bodies_before_a_bad_one_are_handed_out_first(bad: object, error: type[Exception]) -> None:
    found = portions([b"a", b"b", bad, b"c"], FORM.overhead, 10)  # type: ignore[list-item]
    assert next(found) == [b"a", b"b"]
    with pytest.raises(error):
        next(found)


# Checks that need no broker


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: PublishForm(""), errors.BadRequest, "needs a topic"),
        (lambda: PublishForm("t", properties={"partition": "1"}), errors.BadRequest, "reserved"),
        (lambda: PublishForm("t", properties={"publisher_id": "1"}), errors.BadRequest, "reserved"),
        (lambda: PublishForm("t", properties={"a=b": "1"}), errors.BadRequest, "'a=b'"),
        (lambda: PublishForm("t", properties={"": "1"}), errors.BadRequest, "empty"),
        (lambda: PublishForm("t", properties={"a": "x\0y"}), errors.BadRequest, "NUL"),
        (lambda: PublishForm("t", properties={"a": "\ud800"}), errors.BadRequest, "Unicode"),
        (lambda: PublishForm("t", properties={"a": 1}), TypeError, "property 'a' must be a str, not int"),  # type: ignore[dict-item]
        (lambda: PublishForm("t", properties={"a": "x" * 65536}), errors.MessageTooLarge, "64 KiB"),
        (lambda: PublishForm("t", partition="1"), TypeError, "partition must be an int"),  # type: ignore[arg-type]
        (lambda: PublishForm("t", key=b"k"), TypeError, "key must be a str"),  # type: ignore[arg-type]
        (lambda: PublishForm(7), TypeError, "topic must be a str"),  # type: ignore[arg-type]
        (lambda: PublishForm("t", timestamp_ms=-1), errors.BadRequest, "timestamp -1 is not from 0"),
        (lambda: as_bytes("text"), TypeError, "publish_text"),  # type: ignore[arg-type]
    ],
)
def test_what_the_format_cannot_carry_is_refused_here(
    make: Callable[[], object], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        make()


def test_a_memoryview_of_numbers_is_taken_as_its_bytes() -> None:
    assert as_bytes(memoryview(bytearray(b"12345678")).cast("I")) == b"12345678"


# Errors and receipts


@pytest.mark.parametrize("code", Code)
def test_a_refusal_keeps_the_brokers_code_and_text(code: Code) -> None:
    error = refusal(code, "words")
    assert (error.code, error.text, str(error)) == (code, "words", "words")
    assert isinstance(error, RequestRefused)
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), copy.code, str(copy)) == (type(error), code, "words")


def test_an_unknown_code_stays_a_plain_refusal() -> None:
    assert type(refusal("FROM_THE_FUTURE", "x")) is RequestRefused


def test_a_publish_failure_survives_pickling() -> None:
    copy = pickle.loads(pickle.dumps(PublishFailed("words", 3, [1, 2])))
    assert (str(copy), copy.index, copy.stored) == ("words", 3, [1, 2])


def test_a_reply_is_its_json_or_raises() -> None:
    assert answer_of(decode_frame(encode_frame(2, 1, properties={"status": "success"}, body=b"[1]"))) == [1]
    with pytest.raises(errors.UnknownTopic, match="because"):
        answer_of(decode_frame(refused(1, "UNKNOWN_TOPIC")))
    with pytest.raises(PeerMisbehaved):
        answer_of(decode_frame(encode_frame(2, 1, properties={"status": "success"}, body=b"{")))


def test_a_receipt_is_true_and_knows_its_time() -> None:
    receipt = Receipt("t", 0, 0, 1_700_000_000_123, "fsynced")
    assert receipt
    assert receipt.time.isoformat() == "2023-11-14T22:13:20.123000+00:00"


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 99), st.integers(1, 5)), max_size=8), st.data())
def test_offsets_behave_like_the_list_that_they_stand_for(
    shapes: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    runs, expected = [], []
    for partition, offset, count in shapes:
        runs.append(StoredRun(len(expected), count, partition, offset))
        expected += range(offset, offset + count)
    offsets = Offsets(runs)
    assert offsets == expected
    assert list(offsets) == expected
    assert len(offsets) == len(expected)
    cut = data.draw(st.slices(len(expected)))
    assert offsets[cut] == expected[cut]
    if expected:
        index = data.draw(st.integers(-len(expected), len(expected) - 1))
        assert offsets[index] == expected[index]
    with pytest.raises(IndexError):
        offsets[len(expected)]


def test_neighbouring_runs_become_one() -> None:
    assert Offsets([StoredRun(0, 2, 0, 5), StoredRun(2, 3, 0, 7)]).runs == (StoredRun(0, 5, 0, 5),)
    assert len(Offsets([StoredRun(0, 2, 0, 5), StoredRun(2, 3, 1, 7)]).runs) == 2
    assert len(Offsets([StoredRun(0, 2, 0, 5), StoredRun(3, 3, 0, 7)]).runs) == 2


def test_no_more_batches_are_in_flight_than_the_broker_can_distinguish() -> None:
    window = UnackedPublishes(1000, 1000, max_batches=3)
    for number in range(1, 4):
        assert window.has_room(number)
        window.add(UnackedBatch(number, 1, b"x"))
    assert not window.has_room(4)
    window.answer(StoredPublishes(2, 1, 0, 0, 0, "fsynced", False))
    assert window.has_room(4)
