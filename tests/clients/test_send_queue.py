"""The decisions of a producer, without I/O: batches, pieces, retries, and their order."""

from __future__ import annotations

from threading import Lock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qb import BadRequest, DiskFull, MessageTooLarge, PublishUncertain, QBError, UnknownTopic
from qb.clients.producing.batch_routing import pieces_of
from qb.clients.producing.buffered_messages import BufferedMessages
from qb.clients.producing.message_notes import MessageNotes
from qb.clients.producing.producer_options import ProducerOptions, checked_producer_options
from qb.clients.producing.send_batch import SendBatch, SendPiece
from qb.clients.producing.send_queue import SendQueue
from qb.clients.protocol.conversation import Conversation
from qb.clients.protocol.partition_spread import partition_of
from qb.clients.protocol.unacked_publishes import RefusedPublishes, StoredPublishes

NOTES = MessageNotes("t")
LONG_AGO, SOON, LATER = 0.0, 1.0, 100.0
FULL = DiskFull("DISK_FULL", "the disk is full")


def batch_of(*messages: tuple[bytes, str | None]) -> SendBatch:
    """Return a closed batch of bodies and keys."""
    batch = SendBatch("t", 1, LATER, Lock())
    for body, key in messages:
        batch.bodies.append(body)
        batch.size += len(body)
        if key is not None:
            batch.note(NOTES.of(None, key, None, 0))
    batch.close()
    return batch


class Harness:
    """A queue whose pieces are numbered by a conversation."""

    def __init__(self, **options: object) -> None:
        self.queue = SendQueue(ProducerOptions(**options))  # type: ignore[arg-type]
        self.conversation = Conversation()

    def send(self, batch: SendBatch, count: int = 1, turn: int = 0) -> list[SendPiece]:
        """Cut a batch and send all of it; returns the pieces, which are in flight."""
        self.queue.ready.append(batch)
        assert self.queue.next_step(LONG_AGO) is batch
        self.queue.cut(pieces_of(batch, NOTES.plain, count, turn), 1000)
        return self.send_all(LONG_AGO)

    def send_all(self, now: float) -> list[SendPiece]:
        sent = []
        while isinstance(piece := self.queue.next_step(now), SendPiece):
            piece.unacked = self.conversation.publish(piece.form, piece.bodies, piece)
            self.queue.sent(piece, LATER)
            sent.append(piece)
        return sent

    def store(self, piece: SendPiece, offset: int = 0) -> None:
        unacked = piece.unacked
        assert unacked
        stored = StoredPublishes(unacked.first, unacked.count, piece.partition or 0, offset, 5, "fsynced", False)
        unacked.answer(stored)
        self.queue.answer(piece)

    def refuse(self, piece: SendPiece, error: QBError = FULL) -> None:
        unacked = piece.unacked
        assert unacked
        unacked.answer(RefusedPublishes(unacked.first, unacked.count, error))
        self.queue.answer(piece)


# Routing


def test_a_topic_with_one_partition_gets_a_batch_as_one_piece_in_the_order_of_arrival() -> None:
    batch = batch_of((b"a", None), (b"b", "k"), (b"c", None))
    (piece,) = pieces_of(batch, NOTES.plain, 1, 0)
    assert (piece.partition, list(piece.indexes), list(piece.bodies)) == (None, [0, 1, 2], [b"a", b"b", b"c"])
    assert b"key=k" in piece.form.frames(1, piece.bodies)


@given(st.lists(st.sampled_from([None, "a", "b", "c", "d"]), min_size=1, max_size=40), st.integers(2, 5))
def test_each_key_goes_to_its_partition_in_order_and_the_others_to_the_one_whose_turn_it_is(
    keys: list[str | None], count: int
) -> None:
    batch = batch_of(*[(b"%d" % index, key) for index, key in enumerate(keys)])
    pieces = pieces_of(batch, NOTES.plain, count, turn=1)
    where = {index: piece.partition for piece in pieces for index in piece.indexes}
    assert where == {index: 1 if key is None else partition_of(key, count) for index, key in enumerate(keys)}
    for piece in pieces:
        assert list(piece.indexes) == sorted(piece.indexes)
        assert list(piece.bodies) == [b"%d" % index for index in piece.indexes]
        assert b"partition=%d\0" % (piece.partition or 0) in piece.form.frames(1, piece.bodies)


def test_a_key_moves_when_the_topic_has_more_partitions() -> None:
    note = NOTES.of(None, "customer-7", None, 0)
    assert [note.routed(count, 0)[0] for count in (2, 3, 7)] == [partition_of("customer-7", n) for n in (2, 3, 7)]


# Receipts


def test_each_message_of_several_pieces_gets_the_offset_in_its_partition() -> None:
    harness, batch = Harness(), batch_of((b"0", "a"), (b"1", "d"), (b"2", "a"), (b"3", "d"))
    one, two = harness.send(batch, count=2)
    assert {one.partition, two.partition} == {0, 1}
    harness.store(two, offset=70)
    assert not harness.queue.answered
    harness.store(one, offset=30)
    assert list(harness.queue.answered) == [batch]
    batch.finish()
    found = {index: (batch.receipt(index).partition, batch.receipt(index).offset) for index in range(4)}
    expected = dict(zip(one.indexes, [(one.partition, 30), (one.partition, 31)], strict=True))
    assert found == expected | dict(zip(two.indexes, [(two.partition, 70), (two.partition, 71)], strict=True))


def test_a_message_that_is_refused_alone_fails_alone() -> None:
    harness, batch = Harness(), batch_of((b"0", None), (b"1", None), (b"2", None))
    (piece,) = harness.send(batch)
    assert piece.unacked
    piece.unacked.answer(StoredPublishes(1, 1, 0, 10, 5, "fsynced", False))
    piece.unacked.answer(RefusedPublishes(2, 1, BadRequest("BAD_REQUEST", "no")))
    piece.unacked.answer(StoredPublishes(3, 1, 0, 11, 5, "fsynced", True))
    harness.queue.answer(piece)
    batch.finish()
    assert [batch.receipt(0).offset, batch.receipt(2).offset] == [10, 11]
    assert batch.receipt(2).duplicate
    assert not batch.reported
    with pytest.raises(BadRequest):
        batch.receipt(1)
    assert batch.reported
    assert batch.failed == 1


def test_bodies_that_are_too_long_for_the_broker_fail_and_the_others_are_sent_in_order() -> None:
    harness = Harness()
    batch = batch_of((b"0", None), (b"x" * 1001, None), (b"2", None), (b"3", None))
    pieces = harness.send(batch)
    assert [list(piece.bodies) for piece in pieces] == [[b"0"], [b"2", b"3"]]
    for piece, offset in zip(pieces, (0, 1), strict=True):
        harness.store(piece, offset)
    assert [batch.receipt(index).offset for index in (0, 2, 3)] == [0, 1, 2]
    with pytest.raises(MessageTooLarge):
        batch.receipt(1)


# Retries


def test_what_a_full_disk_refused_is_sent_again_first_when_nothing_is_in_flight() -> None:
    harness = Harness(retry_backoff=0.5)
    (first,) = harness.send(batch_of((b"0", None), (b"1", None)))
    (second,) = harness.send(batch_of((b"2", None)))
    harness.refuse(first)
    harness.queue.ready.append(batch_of((b"3", None)))
    assert harness.queue.next_step(SOON) is None, "the second is in flight"
    harness.refuse(second)
    assert harness.queue.next_step(SOON) is None, "it backs off"
    assert harness.queue.wait(SOON) == 0.5
    assert [list(piece.bodies) for piece in harness.send_all(SOON + 0.5)] == [[b"0", b"1"], [b"2"]]
    assert isinstance(harness.queue.in_hand, SendBatch), "and then the next batch"


def test_what_was_refused_fails_if_a_later_message_of_its_partition_was_stored_meanwhile() -> None:
    harness = Harness(retry_backoff=0.0)
    batch, later = batch_of((b"0", "a"), (b"1", "d")), batch_of((b"2", "a"))
    assert partition_of("a", 2) != partition_of("d", 2)
    of_a, of_b = harness.send(batch, count=2)
    (after,) = harness.send(later, count=2)
    harness.refuse(of_a)
    harness.refuse(of_b)
    harness.store(after)
    assert [list(piece.bodies) for piece in harness.send_all(SOON)] == [[b"1"]], "that of the other partition"
    assert batch.failed == 1
    with pytest.raises(DiskFull):
        batch.receipt(0)


def test_a_refusal_is_final_after_so_many_retries_and_others_at_once() -> None:
    harness, batch = Harness(retries=2, retry_backoff=0.0), batch_of((b"0", None))
    (piece,) = harness.send(batch)
    for _ in range(2):
        harness.refuse(piece)
        (piece,) = harness.send_all(SOON)
    harness.refuse(piece)
    assert list(harness.queue.answered) == [batch]
    other = batch_of((b"0", None))
    (piece,) = harness.send(other)
    harness.refuse(piece, UnknownTopic("UNKNOWN_TOPIC", "no"))
    assert isinstance(other.error, UnknownTopic)
    assert harness.queue.is_idle


def test_a_piece_that_is_not_answered_until_its_deadline_is_uncertain() -> None:
    harness, batch = Harness(), batch_of((b"0", None))
    (piece,) = harness.send(batch)
    assert harness.queue.next_step(LATER - 1) is None
    assert harness.queue.wait(LATER - 1) == 1
    assert harness.queue.next_step(LATER) is piece
    harness.queue.answer(piece)
    assert isinstance(batch.error, PublishUncertain)


def test_without_acks_a_message_counts_as_sent_at_once_and_its_receipt_says_so() -> None:
    harness, batch = Harness(acks="none"), batch_of((b"0", None), (b"1", None))
    (piece,) = harness.send(batch)
    assert list(harness.queue.answered) == [batch]
    assert [batch.receipt(index)[1:5] for index in (0, 1)] == [(-1, -1, 0, "none")] * 2
    assert piece.unacked
    piece.unacked.answer(RefusedPublishes(1, 2, FULL))
    assert harness.queue.answer(piece) is FULL, "which only the log reports"


def test_what_is_given_up_fails_once_wherever_it_is() -> None:
    harness = Harness(retry_backoff=9.0)
    refused, waiting, cut, in_hand = (batch_of((b"%d" % number, None)) for number in range(4))
    (piece,) = harness.send(refused)
    harness.refuse(piece)
    harness.queue.next_step(SOON)
    harness.queue.ready.append(waiting)
    harness.queue.cut(pieces_of(cut, NOTES.plain, 1, 0), 1000)
    harness.queue.in_hand = in_hand
    harness.queue.give_up(FULL)
    assert {id(batch) for batch in harness.queue.answered} == {id(each) for each in (refused, waiting, cut, in_hand)}
    assert [batch.failed for batch in harness.queue.answered] == [1] * 4
    assert harness.queue.is_idle


# The buffer


def buffer(**options: object) -> BufferedMessages:
    return BufferedMessages("t", ProducerOptions(**options), Lock())  # type: ignore[arg-type]


def test_a_batch_is_due_after_the_linger_of_its_first_message() -> None:
    buffered = buffer(linger=0.005)
    buffered.begin_batch(10.0)
    buffered.close_if_due(10.004)
    assert not buffered.queue.ready
    assert buffered.wait(10.004) == pytest.approx(0.001)
    buffered.close_if_due(10.005)
    assert len(buffered.queue.ready) == 1


def test_room_is_free_again_when_a_batch_is_finished() -> None:
    buffered = buffer(max_buffered_bytes=100)
    batch = buffered.begin_batch(0.0)
    batch.bodies.append(b"x")
    batch.size = 150
    assert buffered.size == 150
    buffered.close_batch()
    assert not buffered.has_room
    assert not buffered.is_finished(1)
    batch.settle(range(1), FULL)
    buffered.finish(batch)
    assert (buffered.has_room, buffered.size, buffered.is_finished(1)) == (True, 0, True)
    assert isinstance(buffered.unreported_failure().__cause__, DiskFull)  # type: ignore[union-attr]
    assert buffered.unreported_failure() is None


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, not 0"),
        ({"linger_ms": -1}, "linger_ms must be at least 0, not -1"),
        ({"acks": "some"}, "acks must be one of 'all', 'leader', 'none', not 'some'"),
        ({"when_full": "drop"}, "when_full must be one of 'block', 'raise', not 'drop'"),
        ({"compression": "gzip"}, "compression must be one of 'zstd', 'lz4' or None, not 'gzip'"),
    ],
)
def test_options_that_make_no_sense_are_named(changed: dict[str, object], says: str) -> None:
    given = {"batch_size": 1, "batch_bytes": 1, "linger_ms": 0, "acks": "all", "compression": None, "retries": 0}
    given |= {"retry_backoff_ms": 0, "max_buffered_bytes": 1, "when_full": "block"}
    with pytest.raises(ValueError, match=says):
        checked_producer_options(**(given | changed))  # type: ignore[arg-type]
