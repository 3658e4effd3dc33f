"""What an owner sends, acks and sends again: every decision with plain calls."""

from __future__ import annotations

import pytest

from qb.replication.journal.append_window import AppendWindow, Commit, FenceAnew, Look, Send, Tenure
from qb.replication.journal.journal_records import HEAD_BYTES, JournalRecord, JournalRecordKind, decode, encode
from qb.replication.journal.journal_store import Answer, Fenced

TENURE = Tenure(epoch=5, writer=99, position=10, valid=10)


class Owner:
    """An append window, what it asked for, and what it committed."""

    def __init__(self, window: int = 4, most_bytes: int = 1000) -> None:
        self.window = AppendWindow(TENURE, window, most_bytes)
        self.outcomes: list[tuple[bytes, object]] = []
        self.data: dict[int, bytes] = {}  # the newest record for each position

    def do(self, actions: list) -> list:
        """Note what is committed, and return the other actions, as positions."""
        shown: list[object] = []
        for action in actions:
            if isinstance(action, Commit):
                action.committed(action.outcome)
            elif isinstance(action, Send):
                self.data[action.position] = action.data
                shown.append(action.position)
            else:
                shown.append(action)
        return shown

    def append(self, *payloads: bytes) -> list:
        actions = []
        for payload in payloads:
            actions += self.window.append(payload, lambda outcome, it=payload: self.outcomes.append((it, outcome)))
        return self.do(actions)

    def answered(self, position: int, answer: Answer) -> list:
        return self.do(self.window.answered(position, answer))

    def found(self, position: int, data: bytes | None) -> list:
        return self.do(self.window.found(position, data))


def record(epoch: int, writer: int = 1) -> bytes:
    return encode(JournalRecord(JournalRecordKind.WHOLE, epoch, writer, 10, b"another's"))


def test_appends_are_sent_at_once_each_behind_the_one_before() -> None:
    owner = Owner()
    assert owner.append(b"a", b"b") == [11, 12]
    assert [decode(data) for data in owner.data.values()] == [
        JournalRecord(JournalRecordKind.WHOLE, 5, 99, 10, b"a"),
        JournalRecord(JournalRecordKind.WHOLE, 5, 99, 11, b"b"),
    ]


def test_no_more_than_the_window_is_in_flight() -> None:
    owner = Owner(window=2)
    assert owner.append(b"a", b"b", b"c") == [11, 12]
    assert owner.answered(12, Answer.STORED) == []  # 11 is still open: 13 would lie beyond a fence at 11
    assert owner.answered(11, Answer.STORED) == [13]


@pytest.mark.parametrize("window", [0, 256])
def test_a_window_that_no_fence_can_cover_is_an_error(window: int) -> None:
    with pytest.raises(AssertionError):
        Owner(window=window)


def test_only_a_prefix_is_committed() -> None:
    owner = Owner()
    owner.append(b"a", b"b", b"c")
    owner.answered(13, Answer.STORED)
    owner.answered(12, Answer.STORED)
    assert owner.outcomes == []
    owner.answered(11, Answer.STORED)
    assert owner.outcomes == [(b"a", 11), (b"b", 12), (b"c", 13)]


def test_an_unknown_outcome_is_sent_again_with_the_same_expectation() -> None:
    owner = Owner()
    owner.append(b"a")
    before = owner.data[11]
    assert owner.answered(11, Answer.UNKNOWN) == [11]
    assert owner.data[11] == before


def test_what_is_behind_an_open_record_is_sent_again_when_that_one_is_stored() -> None:
    owner = Owner()
    owner.append(b"a", b"b", b"c", b"d")
    assert owner.answered(12, Answer.REFUSED) == []
    assert owner.answered(13, Answer.UNKNOWN) == []
    assert owner.answered(14, Answer.STORED) == []
    assert owner.answered(11, Answer.UNKNOWN) == [11]
    assert owner.answered(11, Answer.STORED) == [12, 13]


def test_a_refused_record_that_is_found_there_is_stored() -> None:
    owner = Owner()
    owner.append(b"a")
    assert owner.answered(11, Answer.REFUSED) == [Look(11)]
    assert owner.found(11, owner.data[11]) == []
    assert owner.outcomes == [(b"a", 11)]


def test_a_refused_record_whose_position_is_empty_is_sent_again_however_often() -> None:
    owner = Owner()
    owner.append(b"a")
    for _ in range(20):
        assert owner.answered(11, Answer.REFUSED) == [Look(11)]
        assert owner.found(11, None) == [11]
    owner.answered(11, Answer.STORED)
    assert owner.outcomes == [(b"a", 11)]


def test_retries_of_one_record_pause_longer_and_longer() -> None:
    window = AppendWindow(TENURE, 4, 1000)
    window.append(b"a", lambda outcome: None)
    pauses = [send.pause for _ in range(9) for send in window.answered(11, Answer.UNKNOWN) if isinstance(send, Send)]
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (0.0, 1.0)


def test_a_record_of_a_higher_epoch_fences_the_owner() -> None:
    owner = Owner(window=2)
    owner.append(b"a", b"b", b"c")
    owner.answered(11, Answer.REFUSED)
    assert owner.found(11, record(epoch=6)) == []
    assert [(payload, outcome.epoch) for payload, outcome in owner.outcomes] == [(b"a", 6), (b"b", 6), (b"c", 6)]
    assert isinstance(owner.window.failure, Fenced)
    assert owner.append(b"d") == []
    assert owner.outcomes[-1][0] == b"d"


@pytest.mark.parametrize("data", [record(epoch=4), record(epoch=5), b"foreign"], ids=["older", "same", "foreign"])
def test_any_other_record_makes_the_owner_fence_itself_anew_and_send_again(data: bytes) -> None:
    owner = Owner()
    owner.append(b"a", b"b")
    owner.answered(12, Answer.STORED)
    owner.answered(11, Answer.REFUSED)
    assert owner.found(11, data) == [FenceAnew()]
    assert owner.append(b"c") == []  # nothing is sent before the fence
    assert owner.do(owner.window.refenced(Tenure(6, 100, 20, 19))) == [21, 22, 23]
    assert decode(owner.data[21]) == JournalRecord(JournalRecordKind.WHOLE, 6, 100, 19, b"a")
    for position in (21, 22, 23):
        owner.answered(position, Answer.STORED)
    assert owner.outcomes == [(b"a", 21), (b"b", 22), (b"c", 23)]


def test_a_payload_in_pieces_is_committed_with_its_last_one() -> None:
    owner = Owner(most_bytes=HEAD_BYTES + 2)
    assert owner.append(b"12345") == [11, 12, 13]
    owner.answered(11, Answer.STORED)
    owner.answered(12, Answer.STORED)
    assert owner.outcomes == []
    owner.answered(13, Answer.STORED)
    assert owner.outcomes == [(b"12345", 13)]


def test_behind_a_fence_all_pieces_of_a_payload_are_sent_again() -> None:
    owner = Owner(most_bytes=HEAD_BYTES + 2)
    owner.append(b"12345")
    owner.answered(11, Answer.STORED)
    owner.answered(12, Answer.REFUSED)
    owner.found(12, b"foreign")
    assert owner.do(owner.window.refenced(Tenure(6, 100, 20, 20))) == [21, 22, 23]


def test_late_and_doubled_answers_change_nothing() -> None:
    owner = Owner()
    owner.append(b"a", b"b")
    owner.answered(11, Answer.STORED)
    for answer in Answer:
        assert owner.answered(11, answer) == []
    owner.answered(12, Answer.REFUSED)
    for answer in (Answer.REFUSED, Answer.UNKNOWN):
        assert owner.answered(12, answer) == []  # it is being looked at already
    assert owner.answered(12, Answer.STORED) == []
    assert owner.found(12, None) == []
    assert owner.outcomes == [(b"a", 11), (b"b", 12)]
