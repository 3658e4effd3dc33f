"""What a consumer says to its group and which messages it hands out, without sockets, threads or a clock."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from qb.clients.consuming.assigned_partitions import (
    AHEAD,
    FETCHES,
    MIN_BYTES,
    SHORT_POLL,
    AssignedPartition,
    AssignedPartitions,
)
from qb.clients.consuming.consumer_options import DEFAULT_TERMS, checked_options
from qb.clients.consuming.consumer_state import ConsumerRequest, ConsumerState
from qb.clients.protocol.client_errors import BadName, StaleGeneration, UnknownGroup, refusal
from qb.core.wire.errors import Code
from tests.support.group_model import Broker, Member, options


def joined(broker: Broker, now: float = 0.0, **changed: Any) -> Member:
    member = Member(broker, **changed)
    member.settle(now)
    return member


def everything(broker: Broker) -> list[tuple[int, int]]:
    return [(partition, offset) for partition, end in enumerate(broker.ends) for offset in range(end)]


# Joining, and where to begin


def test_a_member_joins_syncs_and_then_finds_out_where_to_begin() -> None:
    broker = Broker(partitions=1)
    assert joined(broker).assigned.get(AssignedPartition("t", 0)).position == 0
    assert broker.heard == ["join_group", "sync_group", "committed_offsets", "offsets"]


@pytest.mark.parametrize(("start", "position"), [("earliest", 3), ("latest", 10), (7, 7), (1, 3), (99, 10)])
def test_a_new_group_begins_where_its_start_says(start: str | int, position: int) -> None:
    broker = Broker(partitions=1)
    broker.first[0] = 3
    assert joined(broker, start=start).assigned.get(AssignedPartition("t", 0)).position == position


def test_a_known_group_goes_on_from_the_committed_offset_whatever_the_start() -> None:
    broker = Broker(partitions=2)
    broker.committed[AssignedPartition("t", 1)] = 4
    member = joined(broker, start="latest")
    assert [held.position for held in member.assigned] == [10, 4]


def test_where_a_new_group_began_is_committed_so_that_no_member_begins_elsewhere() -> None:
    broker = Broker(partitions=1)
    member = joined(broker, start="latest")
    broker.ends[0] = 20
    member.settle(5.0)
    assert broker.committed == {AssignedPartition("t", 0): 10}


def test_a_position_before_the_first_kept_offset_moves_there() -> None:
    broker = Broker(partitions=1)
    broker.committed[AssignedPartition("t", 0)] = 2
    broker.first[0] = 6
    member = joined(broker)
    member.fetch(0.0)
    assert member.consume(0.0) == [(0, 6), (0, 7), (0, 8), (0, 9)]


def test_a_join_that_can_never_succeed_is_an_error_for_the_caller_that_asks_for_messages() -> None:
    state = ConsumerState(options())
    state.refused(state.next_ask(0.0), refusal(Code.BAD_NAME, "no such name"), 0.0)
    assert state.next_ask(1.0) is None
    with pytest.raises(BadName):
        state.take(1.0)


def test_a_join_whose_answer_was_lost_is_repeated_under_the_same_id() -> None:
    broker = Broker()
    member = Member(broker)
    first = member.say(0.0, answered=False)
    assert member.state.next_ask(0.1) is None
    assert member.say(0.2) == first


# Commits


def test_a_message_is_handled_when_the_next_one_is_asked_for() -> None:
    broker = Broker(partitions=1)
    member = joined(broker)
    member.fetch(0.0)
    for _ in range(3):
        member.next(0.0)
    assert member.settle(5.0) == ["heartbeat_group", "commit_offsets"]
    assert broker.committed == {AssignedPartition("t", 0): 2}


def test_without_auto_commit_only_the_program_commits() -> None:
    broker = Broker(partitions=1)
    member = joined(broker, auto_commit=False)
    member.fetch(0.0)
    member.next(0.0)
    member.next(0.0)
    assert "commit_offsets" not in member.settle(100.0)
    member.state.wish_commit(None)
    assert member.settle(100.0) == ["commit_offsets"]
    assert broker.committed == {AssignedPartition("t", 0): 2}
    member.state.leave()
    assert member.settle(100.0) == ["leave_group"]


def test_a_commit_by_hand_includes_what_is_in_hand_and_is_not_undone_by_the_next_automatic_one() -> None:
    broker = Broker(partitions=1)
    member = joined(broker)
    member.fetch(0.0)
    member.next(0.0)
    wish = member.state.wish_commit(None)
    assert not wish.settled
    member.settle(0.0)
    assert wish.settled
    assert broker.committed == {AssignedPartition("t", 0): 1}
    member.settle(6.0)
    assert broker.committed == {AssignedPartition("t", 0): 1}


def test_a_commit_whose_answer_was_lost_is_repeated() -> None:
    broker = Broker(partitions=1)
    member = joined(broker)
    member.fetch(0.0)
    member.next(0.0)
    wish = member.state.wish_commit(None)
    member.say(0.0, answered=False)
    assert not wish.settled
    member.settle(1.0)
    assert wish.settled
    assert wish.error is None


def test_one_partition_that_cannot_be_committed_does_not_keep_the_others_from_it() -> None:
    broker = Broker(partitions=3)
    member = joined(broker)
    member.consume(0.0)
    broker.first[1] = broker.ends[1] = 50  # everything in it was dropped by retention, and more came
    member.settle(5.0)
    assert broker.committed == {AssignedPartition("t", 0): 10, AssignedPartition("t", 2): 10}
    assert member.settle(7.0) == []


def test_a_commit_refused_for_another_reason_is_raised_to_the_waiter_and_tried_again() -> None:
    broker = Broker(partitions=1)
    member = joined(broker)
    member.consume(0.0)
    wish = member.state.wish_commit(None)
    member.state.refused(member.state.next_ask(0.0), refusal(Code.DISK_FULL, "no room"), 0.0)
    assert wish.error.code == Code.DISK_FULL
    member.settle(5.0)
    assert broker.committed == {AssignedPartition("t", 0): 10}


def test_a_partition_that_is_not_ours_can_neither_be_committed_nor_sought() -> None:
    member = joined(Broker(partitions=1))
    with pytest.raises(StaleGeneration, match="does not hold t/5"):
        member.state.seek(AssignedPartition("t", 5), 0)


def test_a_seek_hands_out_from_there_and_what_was_in_hand_does_not_count() -> None:
    broker = Broker(partitions=1)
    member = joined(broker)
    member.fetch(0.0)
    member.next(0.0)
    member.state.seek(AssignedPartition("t", 0), 8)
    assert member.consume(0.0) == [(0, 8), (0, 9)]
    member.settle(5.0)
    assert broker.committed == {AssignedPartition("t", 0): 10}


# Rebalances


def test_a_partition_in_hand_is_given_up_and_committed_only_after_it_is_handled() -> None:
    broker = Broker(partitions=2)
    one = joined(broker, name="a")
    one.fetch(0.0)
    while one.next(0.0) != (1, 0):
        pass
    two = joined(broker, 1.0, name="b")
    assert one.settle(4.0) == ["heartbeat_group"]
    assert len(two.assigned) == 0
    with pytest.raises(StaleGeneration, match="has to give up"):
        one.state.seek(AssignedPartition("t", 1), 5)
    assert one.next(4.0) is None or one.got[-1][0] == 0  # nothing more of the other partition
    assert one.settle(4.0) == ["commit_offsets", "sync_group"]
    assert broker.committed[AssignedPartition("t", 1)] == 1
    two.settle(4.0)
    two.fetch(4.0)
    assert two.next(4.0) == (1, 1)


def test_every_message_is_handled_once_when_a_second_member_comes() -> None:
    broker = Broker(partitions=4)
    one = joined(broker, name="a")
    one.fetch(0.0)
    for _ in range(5):
        one.next(0.0)
    two = joined(broker, 1.0, name="b")
    for now in range(2, 30):
        for member in (one, two):
            member.settle(float(now))
            member.consume(float(now))
    assert sorted(one.got + two.got) == everything(broker)
    assert {len(one.assigned), len(two.assigned)} == {2}


def test_a_member_that_waits_for_others_heartbeats_often() -> None:
    broker = Broker(partitions=2)
    joined(broker, name="a")
    two = joined(broker, 1.0, name="b")
    assert two.state.due(1.0) <= 1.25


def test_a_member_that_was_put_out_drops_everything_and_joins_under_a_new_id() -> None:
    broker = Broker(partitions=1)
    member = joined(broker)
    member.fetch(0.0)
    member.next(0.0)
    wish = member.state.wish_commit(None)
    broker.restart()
    ask = member.say(0.0)
    assert ask.method == "commit_offsets"
    assert isinstance(wish.error, UnknownGroup)
    assert len(member.assigned) == 0
    with pytest.raises(StaleGeneration, match="belongs to another"):
        member.state.wish_commit(None)
    assert member.next(0.0) is None
    assert member.state.wish_commit(None).settled  # nothing is in hand any more
    again = member.say(0.0)
    assert again.method == "join_group"
    assert again.arguments["member"] != ask.arguments["member"]


def test_a_stale_commit_is_followed_by_a_heartbeat() -> None:
    broker = Broker(partitions=1)
    member = joined(broker)
    member.consume(0.0)
    member.state.wish_commit(None)
    member.state.refused(member.state.next_ask(0.0), refusal(Code.STALE_GENERATION, "late"), 0.0)
    assert member.state.next_ask(0.0).method == "heartbeat_group"


def test_leaving_commits_what_is_handled_and_not_what_is_in_hand() -> None:
    broker = Broker(partitions=1)
    member = joined(broker)
    member.fetch(0.0)
    member.next(0.0)
    member.next(0.0)
    member.state.leave()
    assert member.settle(0.0) == ["commit_offsets", "leave_group"]
    assert member.state.over
    assert broker.committed == {AssignedPartition("t", 0): 1}
    assert broker.groups.get("g") is None


# Being sure


def test_a_member_that_has_not_reached_the_broker_for_a_session_timeout_hands_out_nothing() -> None:
    member = joined(Broker(partitions=1))
    member.fetch(0.0)
    assert member.next(9.9) is not None
    assert member.next(10.0) is None
    member.say(10.0)
    assert member.next(10.0) == (0, 1)


def test_after_a_lost_connection_nothing_is_handed_out_before_a_heartbeat() -> None:
    member = joined(Broker(partitions=1))
    member.fetch(0.0)
    assert member.next(0.0) == (0, 0)
    member.lose_connection()
    assert member.next(0.0) is None
    assert member.say(0.0).method == "heartbeat_group"
    assert member.next(0.0) == (0, 1)


def test_a_heartbeat_that_is_answered_late_counts_from_when_it_was_sent() -> None:
    member = joined(Broker(partitions=1))
    ask = ConsumerRequest("heartbeat_group", {})
    standing = {"generation": 2, "synced": 2, "rebalance": False, "partitions": [["t", 0]], "waiting": []}
    member.state.answered(ask, standing, 3.0)
    assert member.state.sure_until == 13.0


# Fetching


def assigned_of(count: int) -> AssignedPartitions:
    assigned = AssignedPartitions()
    assigned.allow([AssignedPartition("t", number) for number in range(count)])
    for held in assigned:
        held.begin(0, None)
    return assigned


def test_no_more_than_two_portions_of_a_partition_are_kept() -> None:
    member = joined(Broker(partitions=1, messages=100))
    for _ in range(10):
        member.fetch(0.0)
    (held,) = member.assigned
    assert held.position == AHEAD * 3


def test_few_partitions_are_polled_long_and_many_take_turns() -> None:
    few, many = assigned_of(3), assigned_of(100)
    assert [few.fetch(held).max_wait for held in few.wanting(0.0)] == [DEFAULT_TERMS.max_wait] * 3
    first = [many.fetch(held) for held in many.wanting(0.0)]
    assert {wanted.max_wait for wanted in first} == {SHORT_POLL}
    assert len(first) == FETCHES
    assert many.wanting(0.0) == []
    for held in many:
        held.fetching = False
    assert not {held.partition.partition for held in many.wanting(0.0)} & {wanted.partition for wanted in first}


@pytest.mark.parametrize(
    ("count", "size"), [(1, DEFAULT_TERMS.max_bytes), (100, 32 * 2**20 // 200), (5_000, MIN_BYTES)]
)
def test_many_partitions_share_the_memory(count: int, size: int) -> None:
    assigned = assigned_of(count)
    assert assigned.fetch(assigned.wanting(0.0)[0]).max_bytes == size


def test_partitions_take_turns() -> None:
    member = joined(Broker(partitions=3, messages=6))
    got = member.consume(0.0)
    assert [partition for partition, _ in got[:9]] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_the_answer_to_a_fetch_of_what_was_given_up_is_ignored() -> None:
    broker = Broker(partitions=1)
    member = joined(broker)
    member.fetch(0.0)
    held = member.assigned.get(AssignedPartition("t", 0))
    member.assigned.stop_all()
    assert member.next(0.0) is None
    assert held.stopped


@pytest.mark.parametrize("wrong", [{"start": "newest"}, {"start": -1}, {"max_poll_records": 0}])
def test_options_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    usual = {"auto_commit": True, "auto_commit_interval_ms": 5, "start": 0, "max_poll_records": 1}
    with pytest.raises(ValueError):
        checked_options("g", "t", **usual | wrong, session_timeout=10.0, rebalance_timeout=60.0)


# All of it at once


class Churn(RuleBasedStateMachine):
    """Consumers come, go, die and lose connections and answers; the real groups judge what they do."""

    def __init__(self) -> None:
        super().__init__()
        self.broker = Broker(partitions=3, messages=6)
        self.members: list[Member] = []
        self.handled: set[tuple[int, int]] = set()
        self.now = 0.0
        self.restarted_at = -100.0

    def _step(self, member: Member) -> None:
        before = member.got[-1] if member.in_hand else None
        got = member.next(self.now)
        if before is not None:
            self.handled.add(before)
        if got is not None and self.now - self.restarted_at > 10:
            group = self.broker.groups.get("g")
            assert group is not None
            assert group.holders.get(AssignedPartition("t", got[0])) == member.state._member, (
                "handed out what another holds"
            )

    @rule(name=st.sampled_from("abcd"))
    @precondition(lambda self: len(self.members) < 4)
    def come(self, name: str) -> None:
        self.members.append(Member(self.broker, name=name))

    @rule(which=st.integers(0, 3), answered=st.booleans())
    def say(self, which: int, answered: bool) -> None:
        if which < len(self.members):
            self.members[which].say(self.now, answered=answered)

    @rule(which=st.integers(0, 3))
    def work(self, which: int) -> None:
        if which < len(self.members):
            self.members[which].settle(self.now)
            self.members[which].fetch(self.now)
            for _ in range(3):
                self._step(self.members[which])

    @rule(which=st.integers(0, 3))
    def handle(self, which: int) -> None:
        if which < len(self.members):
            self._step(self.members[which])

    @rule(which=st.integers(0, 3))
    def lose_connection(self, which: int) -> None:
        if which < len(self.members):
            self.members[which].lose_connection()

    @rule(which=st.integers(0, 3))
    def die(self, which: int) -> None:
        if which < len(self.members):
            del self.members[which]

    @rule(which=st.integers(0, 3))
    def leave(self, which: int) -> None:
        if which < len(self.members):
            member = self.members.pop(which)
            member.state.leave()
            member.settle(self.now)

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.0, 6.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.broker.groups.tick(self.now)

    @rule()
    def restart(self) -> None:
        self.broker.restart()
        self.restarted_at = self.now
        for member in self.members:
            member.lose_connection()

    @invariant()
    def nothing_is_committed_that_was_not_handled(self) -> None:
        for at, offset in self.broker.committed.items():
            missing = [n for n in range(offset) if (at.partition, n) not in self.handled]
            assert not missing, f"{at} is committed up to {offset}, and {missing} were never handled"

    def teardown(self) -> None:
        """The members that are left, or that come last, handle the rest."""
        self.members.append(Member(self.broker))
        for _ in range(40):
            self.now += 3.0
            self.broker.groups.tick(self.now)
            for member in self.members:
                member.settle(self.now)
                member.fetch(self.now)
                for _ in range(8):
                    self._step(member)
        assert self.handled == set(everything(self.broker))
        assert all(self.broker.committed.get(AssignedPartition("t", p)) == 6 for p in range(3))


Churn.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestChurn = Churn.TestCase
