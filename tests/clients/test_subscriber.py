"""One stay in a subscription on the client's side: plain calls, no sockets, no clock."""

from __future__ import annotations

import gc
import json
from math import inf
from typing import Any
from weakref import ref

import pytest

from qb.clients.consuming.desired_membership import TICK, DesiredMembership, JoinPlan, plan
from qb.clients.consuming.handling import handle, reason_of
from qb.clients.consuming.inbox import FLUSH, MAX_ENTRIES, SOON, HandlingOptions, Inbox, JoinTerms
from qb.clients.protocol.client_errors import SubscriptionBusy, SubscriptionRemoved, UnknownSubscription
from qb.clients.protocol.conversation import Conversation
from qb.clients.protocol.message import DeliveredFrames, Message
from qb.core.wire.errors import PeerMisbehaved
from qb.core.wire.frames import Frame, MessageType, decode_frame, encode_frame


class Settler:
    """Settles by hand in the inbox that it is given."""

    inbox: Inbox

    def ack(self, message: Message) -> None:
        self.inbox.ack(message)

    def nack(self, message: Message, delay: float | None, reason: str) -> None:
        self.inbox.nack(message, delay, reason)

    def extend(self, message: Message, seconds: float) -> None:
        self.inbox.extend(message, seconds)


def stored(offset: int, key: str = "") -> bytes:
    properties = {"topic": "t", "key": key, "colour": "red"} if key else {"topic": "t", "colour": "red"}
    return encode_frame(MessageType.DATA, offset, 1_700_000_000_000 + offset, properties, b"%d" % offset)


def deliver_frame(
    offsets: Any,
    *,
    attempt: int = 1,
    partition: int = 0,
    settled: int = 0,
    keys: Any = None,
    seals: bool = False,
    suspects: bool = False,
) -> Frame:
    offsets = list(offsets)
    keys = keys or [""] * len(offsets)
    frames = [stored(offset, key) for offset, key in zip(offsets, keys, strict=True)]
    if seals:
        seal = encode_frame(MessageType.SEAL, 0, 0, {"count": "1"}, b"crc!")
        frames = [part for frame in frames for part in (frame, seal)]
    about = {"subscription_id": "s", "topic": "t", "partition": str(partition)}
    about |= {"count": str(len(offsets)), "attempt": str(attempt), "settled": str(settled)}
    about |= {"suspects": "true"} if suspects else {}
    return Frame(MessageType.DELIVER, 0, 0, about, b"".join(frames))


class Stay:
    """An inbox, with what a worker and a wire would do to it."""

    def __init__(self, window: int = 1000, keyed: bool = False, **manner: Any) -> None:
        self.settler = Settler()
        self.inbox = self.settler.inbox = Inbox(JoinTerms(window, 30.0, keyed), HandlingOptions(**manner))
        self.number = 100

    def deliver(self, offsets: Any, **about: Any) -> None:
        self.inbox.deliver(DeliveredFrames(deliver_frame(offsets, **about), self.settler))

    def take(self) -> Any:
        portion = self.inbox.take()
        assert portion is not None
        return portion

    def take_all(self) -> list[int]:
        """Handle everything that can be handled, and return its offsets."""
        taken: list[int] = []
        while (portion := self.inbox.take()) is not None:
            assert handle(portion, lambda message: taken.append(message.offset), False) is None
            self.inbox.returned(portion)
        return taken

    def finish(self, portion: Any, seconds: float = inf) -> None:
        portion.done = len(portion.messages)
        self.inbox.returned(portion, seconds)

    def settle(self) -> Any:
        """Send what there is to send, and return it."""
        body = self.inbox.settle()
        self.number += 1
        self.inbox.sent(self.number)
        return json.loads(body) if body else {}


def offsets(portion: Any) -> list[int]:
    return [message.offset for message in portion.messages]


def acked(words: Any) -> list[int]:
    """Return the acked offsets of a SETTLE, however they were cut into runs."""
    runs = [range(first, first + count * step, step) for _, first, count, step in words["acks"]]
    return sorted(offset for run in runs for offset in run)


# Messages


class Keeper(Settler):
    """A program that keeps what its handler is given, and the subscription that the handler belongs to."""

    def __init__(self) -> None:
        self.kept: list[Message] = []
        self.membership = DesiredMembership(plan("s", self.kept.append, None, "manual", 1, None), self)
        self.inbox = self.membership.inbox = Inbox(JoinTerms(1000, 30.0, False), HandlingOptions(manual=True))


def test_messages_that_a_program_keeps_do_not_keep_the_program_in_memory() -> None:
    keeper = Keeper()
    keeper.membership.delivered(deliver_frame(range(3)))
    while (portion := keeper.inbox.take()) is not None:
        keeper.kept += portion.messages
    keeper.kept[0].ack()
    assert [message.offset for message in keeper.kept] == [0, 1, 2]
    assert keeper.inbox.unsent == 1
    last, watched = keeper.kept[2], ref(keeper)
    del keeper
    gc.collect()
    assert watched() is None, "the garbage collector does not walk messages"
    last.ack()  # of a subscription that is gone: ignored
    assert last.body == b"2"
    assert last.topic == "t"


def test_a_message_has_all_that_was_published_and_where_it_is() -> None:
    message = DeliveredFrames(deliver_frame([7], attempt=3, partition=2, keys=["k"]), Settler()).read(9)[0]
    assert (message.body, message.text(), message.key) == (b"7", "7", "k")
    assert message.properties == {"colour": "red"}
    assert (message.topic, message.partition, message.offset, message.attempt) == ("t", 2, 7, 3)
    assert (message.subscription_id, message.timestamp) == ("s", 1_700_000_000_007)
    assert message.time.year == 2023
    assert repr(message) == "<Message t/2@7, 1 bytes, attempt 3>"


def test_changing_the_properties_of_one_message_changes_no_other() -> None:
    first, second = DeliveredFrames(deliver_frame([1, 2]), Settler()).read(9)
    first.properties["colour"] = "blue"
    assert (first.properties, second.properties) == ({"colour": "red"}, {"colour": "red"})
    assert first.key is None


def test_a_delivery_is_read_in_portions_and_seals_are_skipped() -> None:
    delivery = DeliveredFrames(deliver_frame(range(5), seals=True), Settler())
    assert [message.offset for message in delivery.read(2)] == [0, 1]
    assert not delivery.exhausted
    assert [message.body for message in delivery.read(9)] == [b"2", b"3", b"4"]
    assert delivery.exhausted


@pytest.mark.parametrize("body", [b"\0" * 16, b"\0" * 40, b"\0\0\0\x10" + b"\0" * 40])
def test_bytes_that_are_no_stored_frames_are_noticed(body: bytes) -> None:
    delivery = DeliveredFrames(deliver_frame([1])._replace(body=body), Settler())
    with pytest.raises(PeerMisbehaved):
        delivery.read(9)


def test_a_deliver_that_lacks_a_property_is_noticed() -> None:
    frame = deliver_frame([1])
    del frame.properties["attempt"]
    with pytest.raises(PeerMisbehaved, match="attempt"):
        DeliveredFrames(frame, Settler())


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), 1e9])
def test_a_delay_that_the_broker_would_refuse_is_refused_here(seconds: float) -> None:
    stay = Stay(manual=True)
    stay.deliver([1])
    message = stay.take().messages[0]
    with pytest.raises(ValueError, match="delay"):
        message.nack(delay=seconds)
    with pytest.raises(ValueError, match="seconds"):
        message.extend(seconds)


# Acks of fresh messages


def test_fresh_messages_are_taken_in_portions_and_acked_in_runs() -> None:
    stay = Stay(window=2 * FLUSH)
    stay.deliver(range(FLUSH + 44))
    first = stay.take()
    assert offsets(first) == list(range(FLUSH))
    assert not stay.inbox.urgent
    stay.finish(first)
    assert stay.inbox.full
    assert stay.settle() == {"acks": [[0, 0, FLUSH, 1]]}
    stay.finish(stay.take())
    assert stay.inbox.take() is None
    assert stay.settle() == {"acks": [[0, FLUSH, 44, 1]]}
    assert stay.settle() == {}
    assert stay.inbox.held == 0


def test_one_settle_covers_runs_of_several_deliveries_partitions_and_steps() -> None:
    stay = Stay()
    stay.deliver(range(0, 10, 2))
    stay.deliver(range(10, 16, 2))
    stay.deliver([5, 6, 9], partition=1)
    assert len(stay.take_all()) == 11
    assert stay.settle() == {"acks": [[0, 0, 8, 2], [1, 5, 2, 1], [1, 9, 1, 1]]}


def test_what_is_too_much_for_one_settle_goes_out_in_several_in_order() -> None:
    stay = Stay(window=10_000)
    squares = [number * number for number in range(MAX_ENTRIES * 2)]
    stay.deliver(squares)
    taken = stay.take_all()
    assert len(taken) == len(squares)
    shown = []
    while words := stay.settle():
        assert len(words["acks"]) <= MAX_ENTRIES
        shown += [
            offset for _, first, count, step in words["acks"] for offset in range(first, first + count * step, step)
        ]
    assert shown == squares


def test_a_window_that_has_grown_is_refilled_half_way() -> None:
    stay = Stay(window=10)
    stay.deliver(range(100))
    portion = stay.take()
    assert len(portion.messages) == 50
    portion.done = 49
    stay.inbox.tick(0)
    assert not stay.inbox.full
    stay.finish(portion)
    assert stay.inbox.full


def test_a_small_window_is_refilled_half_way() -> None:
    stay = Stay(window=10)
    stay.deliver(range(10))
    portion = stay.take()
    assert len(portion.messages) == 5
    stay.finish(portion)
    assert stay.inbox.full


def test_half_a_window_is_not_sent_alone_if_the_rest_is_handled_sooner_than_a_settle_takes() -> None:
    stay = Stay(window=10)
    stay.deliver(range(10))
    stay.finish(stay.take(), seconds=SOON / 2)
    assert not stay.inbox.full
    stay.finish(stay.take(), seconds=SOON / 2)
    assert stay.inbox.full
    assert stay.settle() == {"acks": [[0, 0, 10, 1]]}
    stay.deliver(range(10, 20))
    stay.finish(stay.take(), seconds=SOON)
    assert stay.inbox.full


def test_what_a_quick_handler_left_unsent_is_sent_at_a_tick_if_the_next_message_takes_long() -> None:
    stay = Stay(window=10)
    stay.deliver(range(10))
    stay.finish(stay.take(), seconds=0.0)
    assert stay.take()
    assert not stay.inbox.full
    assert stay.inbox.tick(0)
    assert stay.settle() == {"acks": [[0, 0, 5, 1]]}


def test_what_is_done_is_sent_while_the_rest_of_a_portion_is_in_hand() -> None:
    stay = Stay()
    stay.deliver(range(5))
    portion = stay.take()
    assert not stay.inbox.tick(0.0)
    portion.done = 3
    assert stay.inbox.tick(0.02)
    assert stay.settle() == {"acks": [[0, 0, 3, 1]]}
    stay.finish(portion)
    assert stay.settle() == {"acks": [[0, 3, 2, 1]]}


def test_a_stopped_stay_takes_nothing_more_and_sends_what_is_done() -> None:
    stay = Stay()
    stay.deliver(range(5))
    portion = stay.take()
    seen: list[int] = []

    def handler(message: Message) -> None:
        seen.append(message.offset)
        if message.offset == 1:
            stay.inbox.stop()

    assert handle(portion, handler, False) is None
    stay.inbox.returned(portion)
    assert seen == [0, 1]
    assert stay.inbox.take() is None
    assert stay.settle() == {"acks": [[0, 0, 2, 1]]}


def test_nothing_is_sent_after_the_connection_was_lost() -> None:
    stay = Stay()
    stay.deliver(range(5))
    portion = stay.take()
    stay.inbox.close()
    stay.finish(portion)
    assert stay.settle() == {}
    assert stay.inbox.take() is None


def test_a_stopped_stay_starts_no_batch() -> None:
    stay = Stay(batches=True)
    stay.deliver(range(5))
    portion = stay.take()
    stay.inbox.stop()
    assert handle(portion, lambda messages: pytest.fail("called"), True) is None
    stay.inbox.returned(portion)
    assert stay.settle() == {}


# Failures


def test_a_handler_that_raises_nacks_its_message_alone() -> None:
    stay = Stay()
    stay.deliver(range(4))
    portion = stay.take()

    def handler(message: Message) -> None:
        if message.offset == 1:
            raise ValueError("no good")

    error = handle(portion, handler, False)
    assert error is not None
    assert stay.inbox.raised(portion, reason_of(error))
    assert handle(portion, handler, False) is None
    stay.inbox.returned(portion)
    words = stay.settle()
    assert acked(words) == [0, 2, 3]
    assert words["nacks"] == [[0, 1, None, "ValueError: no good"]]
    assert stay.inbox.held == 0


def test_a_batch_handler_gets_lists_and_its_exception_nacks_them_all() -> None:
    stay = Stay(batches=True)
    stay.deliver(range(3))
    portion = stay.take()
    error = handle(portion, lambda messages: 1 / (len(messages) - 3), True)
    assert error is not None
    assert not stay.inbox.raised(portion, "bad batch")
    assert stay.settle() == {"nacks": [[0, offset, None, "bad batch"] for offset in range(3)]}
    stay.deliver([0], attempt=2)
    stay.deliver([1, 2], attempt=2)
    alone = stay.take()
    assert offsets(alone) == [0], "redelivered messages come in batches of one"
    stay.finish(alone)
    assert offsets(stay.take()) == [1]


def test_a_handler_that_returns_a_coroutine_fails_with_a_reason() -> None:
    stay = Stay()
    stay.deliver([1])

    async def forgotten() -> None: ...

    error = handle(stay.take(), lambda message: forgotten(), False)
    assert isinstance(error, TypeError)
    assert "async def" in str(error)


class Unshowable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (KeyError("k"), "KeyError: 'k'"),
        (SystemExit(), "SystemExit"),
        (Unshowable(), "Unshowable: its text cannot be shown"),
    ],
)
def test_the_reason_is_the_exception_in_a_line(error: BaseException, reason: str) -> None:
    assert reason_of(error) == reason


def test_a_reason_is_cut_and_made_fit_for_json() -> None:
    stay = Stay()
    stay.deliver([1])
    stay.inbox.raised(stay.take(), "\udc80" + "x" * 1000)
    assert stay.settle()["nacks"] == [[0, 1, None, "?" + "x" * 499]]


# Redelivered messages are handled in the open


def test_a_redelivered_message_is_named_before_and_acked_after_before_the_next_one_starts() -> None:
    stay = Stay()
    stay.deliver([0, 1])
    stay.deliver([2, 3], attempt=2)
    stay.deliver([4, 5])
    stay.finish(stay.take())
    third = stay.take()
    assert offsets(third) == [2]
    assert stay.inbox.urgent
    assert stay.settle() == {"acks": [[0, 0, 2, 1]], "started": [[0, 2]]}
    stay.finish(third)
    fourth = stay.take()
    assert stay.settle() == {"acks": [[0, 2, 1, 1]], "started": [[0, 3]]}
    stay.inbox.raised(fourth, "bad")
    fresh = stay.take()
    assert stay.inbox.urgent
    assert stay.settle() == {"nacks": [[0, 3, None, "bad"]]}
    assert offsets(fresh) == [4, 5]
    assert not stay.inbox.urgent


def test_everything_in_hand_beside_a_redelivered_message_is_named_too() -> None:
    stay = Stay(concurrency=3)
    stay.deliver([0, 1, 2])
    stay.deliver([3], attempt=2)
    stay.deliver([4, 5])
    fresh = [stay.take() for _ in range(3)]
    assert stay.settle() == {}
    stay.finish(fresh[0])
    redelivered = stay.take()
    assert stay.settle() == {"acks": [[0, 0, 1, 1]], "started": [[0, 1], [0, 2], [0, 3]]}
    stay.finish(fresh[1])
    assert stay.inbox.urgent
    beside = stay.take()
    assert stay.settle() == {"acks": [[0, 1, 1, 1]], "started": [[0, 4]]}
    for portion in (fresh[2], redelivered, beside):
        stay.finish(portion)
    stay.take()
    assert stay.settle() == {"acks": [[0, 2, 3, 1]]}


# Suspects are handled one at a time


def test_suspects_are_handled_one_at_a_time_whatever_the_concurrency() -> None:
    stay = Stay(concurrency=4)
    stay.deliver([0, 1, 2], attempt=2, suspects=True)
    for offset in range(3):
        portion = stay.take()
        assert offsets(portion) == [offset]
        assert stay.inbox.take() is None, "nothing starts beside it"
        assert stay.inbox.urgent
        assert stay.settle()["started"] == [[0, offset]], "it has one name only"
        stay.finish(portion)
        assert stay.inbox.urgent


def test_other_redeliveries_keep_all_threads_busy() -> None:
    stay = Stay(concurrency=4)
    stay.deliver([0, 1], attempt=2)
    stay.deliver([2, 3], attempt=3)
    assert [offsets(stay.take()) for _ in range(4)] == [[0], [1], [2], [3]]


def test_a_suspect_waits_for_the_handlers_that_are_running_and_nothing_overtakes_it() -> None:
    stay = Stay(concurrency=4)
    stay.deliver([0, 1])
    first, second = stay.take(), stay.take()
    stay.deliver([7], attempt=2, suspects=True)
    stay.deliver([2, 3])
    assert stay.inbox.take() is None
    stay.finish(first)
    assert stay.inbox.take() is None
    assert stay.inbox.call_back() == 0
    stay.finish(second)
    suspect = stay.take()
    assert offsets(suspect) == [7]
    assert stay.settle() == {"acks": [[0, 0, 2, 1]], "started": [[0, 7]]}
    assert stay.inbox.take() is None
    stay.finish(suspect)
    assert stay.inbox.call_back() == 3, "as many as went away empty-handed"
    assert stay.inbox.call_back() == 0
    assert [offsets(stay.take()), offsets(stay.take())] == [[2], [3]]


def test_no_callback_is_made_for_nothing() -> None:
    stay = Stay(concurrency=4)
    stay.deliver([0, 1], attempt=2, suspects=True)
    portion = stay.take()
    assert stay.inbox.take() is None
    stay.finish(portion)
    assert stay.inbox.call_back() == 0, "the next one is a suspect too"
    stay.finish(stay.take())
    assert stay.inbox.call_back() == 0, "there is nothing left"


def test_a_suspect_that_fails_lets_the_others_go_on() -> None:
    stay = Stay(concurrency=2)
    stay.deliver([0], attempt=2, suspects=True)
    stay.deliver([1])
    assert not stay.inbox.raised(stay.take(), "no")
    assert offsets(stay.take()) == [1]


def test_by_hand_a_suspect_waits_for_handlers_and_not_for_acks() -> None:
    stay = Stay(concurrency=2, manual=True)
    stay.deliver([0])
    stay.deliver([1], attempt=2, suspects=True)
    stay.deliver([2])
    portion = stay.take()
    assert stay.inbox.take() is None
    stay.finish(portion)  # it keeps the message, to ack it with the next ones
    suspect = stay.take()
    assert offsets(suspect) == [1]
    assert stay.inbox.take() is None
    assert not stay.inbox.raised(suspect, "no")
    assert offsets(stay.take()) == [2]


def test_a_suspect_whose_key_is_in_hand_waits_and_is_then_handled_alone() -> None:
    stay = Stay(concurrency=3, manual=True, keyed=True)
    stay.deliver([0], keys=["k"])
    kept = stay.take()
    stay.finish(kept)
    stay.deliver([1], attempt=2, keys=["k"], suspects=True)
    stay.deliver([2])
    other = stay.take()
    assert offsets(other) == [2]
    kept.messages[0].ack()
    assert stay.inbox.take() is None, "the handler of 2 is running"
    stay.finish(other)
    assert offsets(stay.take()) == [1]
    assert stay.inbox.take() is None


# By hand


def test_by_hand_a_message_is_held_until_it_is_settled() -> None:
    stay = Stay(manual=True)
    stay.deliver(range(4))
    messages = []
    for _ in range(4):
        portion = stay.take()
        stay.finish(portion)
        messages += portion.messages
    assert stay.settle() == {}
    assert stay.inbox.held == 4
    messages[2].ack()
    messages[0].nack(delay=2.5, reason="later")
    messages[1].extend(60)
    assert stay.settle() == {
        "acks": [[0, 2, 1, 1]],
        "nacks": [[0, 0, 2.5, "later"]],
        "extend": [[0, 1, 1, 1, 60]],
    }
    messages[2].nack()
    messages[0].ack()
    assert stay.settle() == {}, "a message is settled once"
    assert stay.inbox.held == 2


def test_by_hand_an_exception_nacks_only_what_was_not_settled_before() -> None:
    stay = Stay(manual=True, batches=True)
    stay.deliver(range(3))
    portion = stay.take()
    portion.messages[1].ack()
    stay.inbox.raised(portion, "bad")
    assert stay.settle() == {"acks": [[0, 1, 1, 1]], "nacks": [[0, 0, None, "bad"], [0, 2, None, "bad"]]}


def test_by_hand_messages_beside_a_redelivered_one_that_is_not_settled_are_named() -> None:
    stay = Stay(manual=True)
    stay.deliver([0], attempt=2)
    stay.deliver([1, 2])
    first = stay.take()
    stay.finish(first)
    assert stay.settle() == {"started": [[0, 0]]}
    stay.take()
    assert stay.settle() == {"started": [[0, 1]]}
    first.messages[0].ack()
    assert stay.inbox.urgent


def test_an_ack_of_an_earlier_delivery_does_not_count_for_a_later_one() -> None:
    stay = Stay(manual=True)
    stay.deliver([0])
    early = stay.take().messages[0]
    stay.deliver([0], attempt=2)
    late = stay.take().messages[0]
    stay.settle()
    early.ack()
    assert stay.settle() == {}
    late.ack()
    assert stay.settle() == {"acks": [[0, 0, 1, 1]]}


# Leases


def test_leases_are_renewed_every_third_of_the_deadline_while_anything_is_held() -> None:
    stay = Stay()
    assert not stay.inbox.tick(0.0)
    stay.deliver([0])
    portion = stay.take()
    assert not stay.inbox.tick(1.0)
    assert not stay.inbox.tick(10.9)
    assert stay.inbox.tick(11.0)
    assert stay.settle() == {"extend_all": 30.0}
    assert not stay.inbox.tick(20.0)
    assert stay.inbox.tick(21.0)
    stay.settle()
    stay.finish(portion)
    stay.settle()
    assert not stay.inbox.tick(40.0)


# key_shared


def keyed(**manner: Any) -> Stay:
    return Stay(keyed=True, **manner)


def test_what_follows_a_failed_message_of_its_key_is_dropped_until_the_broker_knew() -> None:
    stay = keyed()
    stay.deliver(range(6), keys=list("ababab"))
    portion = stay.take()
    portion.done = 2
    assert stay.inbox.raised(portion, "bad"), "the third message, of key a"
    assert offsets(portion)[portion.done :] == [3, 5]
    stay.finish(portion)
    stay.deliver([6, 7], keys=list("ab"))
    assert stay.take_all() == [7], "not sent yet"
    assert stay.settle() == {"acks": [[0, 0, 2, 1], [0, 3, 3, 2]], "nacks": [[0, 2, None, "bad"]]}
    stay.deliver([8, 9], keys=list("ab"), settled=stay.number - 1)
    assert stay.take_all() == [9], "the broker had not seen the failure"
    stay.deliver([2], keys=["a"], attempt=2, settled=stay.number)
    stay.deliver([4, 6, 8], keys=list("aaa"), attempt=2, settled=stay.number)
    assert stay.take_all() == [2, 4, 6, 8]
    assert stay.inbox.held == 0


def test_only_later_messages_of_the_same_partition_are_dropped() -> None:
    stay = keyed()
    stay.deliver([5], keys=["a"])
    stay.deliver([3], keys=["a"])
    stay.deliver([9], keys=["a"], partition=1)
    stay.deliver([8], keys=["a"])
    stay.deliver([10])
    stay.inbox.raised(stay.take(), "bad")
    assert stay.take_all() == [3, 9, 10]


def test_messages_of_one_key_are_never_in_hand_together() -> None:
    stay = keyed(concurrency=4)
    stay.deliver(range(6), keys=list("aabbaa"))
    first, second = stay.take(), stay.take()
    assert (offsets(first), offsets(second)) == ([0], [2])
    assert stay.inbox.take() is None
    stay.finish(first)
    third = stay.take()
    assert offsets(third) == [1]
    assert stay.inbox.take() is None
    stay.finish(third)
    stay.finish(second)
    assert {stay.take().messages[0].offset, stay.take().messages[0].offset} == {3, 4}


def test_a_failure_drops_those_that_wait_for_their_key() -> None:
    stay = keyed(concurrency=4)
    stay.deliver(range(4), keys=list("aaba"))
    first, other = stay.take(), stay.take()
    assert stay.inbox.take() is None
    stay.inbox.raised(first, "bad")
    assert stay.inbox.take() is None
    stay.finish(other)
    assert stay.inbox.held == 0
    assert stay.settle() == {"acks": [[0, 2, 1, 1]], "nacks": [[0, 0, None, "bad"]]}


def test_by_hand_the_next_of_a_key_comes_when_the_one_before_is_settled() -> None:
    stay = keyed(manual=True)
    stay.deliver(range(3), keys=list("aaa"))
    first = stay.take()
    stay.finish(first)
    assert stay.inbox.take() is None
    first.messages[0].ack()
    second = stay.take()
    assert offsets(second) == [1]
    second.messages[0].nack()
    assert stay.inbox.take() is None, "the third was dropped"
    assert stay.inbox.held == 0


def test_a_batch_holds_its_keys_together() -> None:
    stay = keyed(concurrency=2, batches=True, window=8)
    stay.deliver(range(8), keys=list("aabbacbd"))
    first = stay.take()
    assert offsets(first) == [0, 1, 2, 3]
    second = stay.take()
    assert offsets(second) == [5, 7]
    stay.finish(first)
    assert sorted([offsets(stay.take()), offsets(stay.take())]) == [[4], [6]]


# Membership


def answer(number: int, **properties: str) -> Frame:
    return Frame(MessageType.ACK, number, 0, {"status": "success"} | properties, b"")


def refused(number: int, code: str) -> Frame:
    return Frame(MessageType.ACK, number, 0, {"status": "error", "code": code, "error": "no"}, b"")


class Joined:
    """A membership and its conversation."""

    def __init__(self, **manner: Any) -> None:
        self.conversation = Conversation()
        self.membership = DesiredMembership(JoinPlan("s", print, HandlingOptions(**manner), 50), Settler())

    def ask(self, now: float = 0.0) -> Frame | None:
        data = self.membership.ask(self.conversation, now)
        return decode_frame(data) if data else None

    def enter(self) -> None:
        asked = self.ask()
        assert asked is not None
        about = {"window": "50", "ack_deadline": "30", "mode": "shared"}
        self.membership.answered(answer(asked.sequence_number, **about), 0.0)
        assert self.membership.inbox is not None


def test_a_join_says_what_it_wants_once_for_each_connection() -> None:
    joined = Joined()
    asked = joined.ask()
    assert asked is not None
    assert (asked.type, asked.properties) == (
        MessageType.SUBSCRIBE,
        {"subscription_id": "s", "announces": "true", "window": "50"},
    )
    assert joined.ask() is None
    joined.membership.lost()
    assert joined.ask() is not None


def test_a_refused_first_join_is_an_error_and_a_refused_later_one_is_tried_again() -> None:
    joined = Joined()
    asked = joined.ask()
    assert asked is not None
    joined.membership.answered(refused(asked.sequence_number, "SUBSCRIPTION_BUSY"), 0.0)
    assert isinstance(joined.membership.error, SubscriptionBusy)
    joined = Joined()
    joined.enter()
    joined.membership.lost()
    asked = joined.ask()
    assert asked is not None
    joined.membership.answered(refused(asked.sequence_number, "SUBSCRIPTION_BUSY"), 100.0)
    assert joined.membership.error is None
    assert not joined.membership.tick(100.0)
    pause = joined.membership.pause(100.0)
    assert pause is not None
    assert joined.membership.tick(100.0 + pause)
    assert joined.ask(100.0 + pause) is not None


def test_a_subscription_that_is_gone_is_an_error_of_its_own_kind() -> None:
    joined = Joined()
    asked = joined.ask()
    assert asked is not None
    joined.membership.answered(refused(asked.sequence_number, "UNKNOWN_SUBSCRIPTION"), 0.0)
    assert isinstance(joined.membership.error, UnknownSubscription)
    joined = Joined()
    joined.enter()
    joined.membership.lost()
    asked = joined.ask()
    assert asked is not None
    joined.membership.answered(refused(asked.sequence_number, "UNKNOWN_SUBSCRIPTION"), 0.0)
    assert isinstance(joined.membership.error, SubscriptionRemoved)
    assert joined.ask(1e9) is None


def test_words_travel_as_settle_frames_with_growing_numbers() -> None:
    joined = Joined()
    joined.enter()
    numbers = []
    for offset in range(2):
        joined.membership.delivered(deliver_frame([offset]))
        inbox = joined.membership.inbox
        assert inbox is not None
        portion = inbox.take()
        assert portion is not None
        portion.done = 1
        inbox.returned(portion)
        frame = decode_frame(joined.membership.settle(joined.conversation))
        assert (frame.type, frame.properties) == (MessageType.SETTLE, {"subscription_id": "s"})
        assert json.loads(frame.body) == {"acks": [[0, offset, 1, 1]]}
        numbers.append(frame.sequence_number)
    assert numbers == sorted(numbers)
    assert joined.membership.settle(joined.conversation) == b""


def test_leaving_is_over_when_the_broker_has_answered_or_the_connection_is_lost() -> None:
    joined = Joined()
    joined.enter()
    joined.membership.stop()
    farewell = decode_frame(joined.membership.leave(joined.conversation))
    assert farewell.type == MessageType.UNSUBSCRIBE
    assert not joined.membership.out
    joined.membership.answered(answer(farewell.sequence_number), 0.0)
    assert joined.membership.out
    assert joined.membership.leave(joined.conversation) == b""
    assert joined.ask() is None, "it does not come back"


def test_leaving_before_the_join_is_answered_takes_it_back() -> None:
    joined = Joined()
    asked = joined.ask()
    assert asked is not None
    joined.membership.stop()
    farewell = decode_frame(joined.membership.leave(joined.conversation))
    joined.membership.answered(answer(asked.sequence_number), 0.0)
    assert joined.membership.inbox is None
    assert not joined.membership.out
    joined.membership.answered(answer(farewell.sequence_number), 0.0)
    assert joined.membership.out


def test_ticks_go_on_while_messages_come_even_if_each_is_handled_at_once() -> None:
    joined = Joined()
    joined.enter()
    inbox = joined.membership.inbox
    assert inbox is not None
    for offset in range(3):
        joined.membership.delivered(deliver_frame([offset]))
        portion = inbox.take()
        assert portion is not None
        portion.done = 1
        inbox.returned(portion)
        assert inbox.held == 0
        joined.membership.tick(0.0)
        assert joined.membership.pause(0.0) == TICK
    joined.membership.tick(0.0)
    assert joined.membership.pause(0.0) is None


def test_ticks_come_only_while_something_is_held() -> None:
    joined = Joined()
    assert joined.membership.pause(0.0) is None
    joined.enter()
    assert joined.membership.pause(0.0) is None
    joined.membership.delivered(deliver_frame([1]))
    assert joined.membership.pause(0.0) == TICK
    joined.membership.lost()
    assert joined.membership.pause(0.0) is None


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({}, TypeError),
        ({"handler": print, "batch_handler": print}, TypeError),
        ({"handler": 5}, TypeError),
        ({"handler": print, "ack": "never"}, ValueError),
        ({"handler": print, "concurrency": 0}, ValueError),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(arguments: dict[str, Any], error: type[Exception]) -> None:
    whole = {"handler": None, "batch_handler": None, "ack": "auto", "concurrency": 1, "window": None} | arguments
    with pytest.raises(error):
        plan("s", **whole)
