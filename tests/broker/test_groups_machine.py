"""Consumer groups under churn: consumers that follow docs/GROUPS.md, a broker that judges them, and a fake clock.

The model knows what each consumer *believes* it may handle; that is where two holders would show.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from qb.core.groups.group_coordinator import GroupCoordinator, MemberStanding
from qb.core.groups.rebalance import GroupPartition
from qb.core.wire.errors import StaleGeneration, UnknownGroup, UnknownMember

RARELY = st.integers(0, 4).map(lambda number: number == 4)
IDS = "abcd"
TOPICS = st.sets(st.sampled_from(["t", "u"]), min_size=1)
SECONDS = st.sampled_from([0.5, 1.0, 3.0, 5.0])
SESSION = st.sampled_from([10.0, 4.0])
LONGER = st.sampled_from([20.0, 0.0])  # than the session timeout is the one for a rebalance


@dataclass
class Consumer:
    """One life of a consumer."""

    member: str
    topics: set[str]
    session_timeout: float
    rebalance_timeout: float
    simple: bool
    heard: float
    standing: MemberStanding
    unsure: bool = False  # the last answer to it got lost
    unsynced_since: float = inf
    mine: set[GroupPartition] = field(default_factory=set)
    vanished: bool = False  # without a word

    def deadline(self) -> float:
        return min(self.heard + self.session_timeout, self.unsynced_since + self.rebalance_timeout)


class GroupsUnderChurn(RuleBasedStateMachine):
    @initialize(t=st.integers(1, 6), u=st.integers(1, 3))
    def start(self, t, u):
        self.now = 100.0
        self.counts = {"t": t, "u": u}
        self.groups = GroupCoordinator(self.counts)
        self.consumers: dict[str, Consumer] = {}  # those that the broker should have as members
        self.former: list[Consumer] = []  # replaced by another of the same id
        self.generation = 0
        for member in "ac":
            self.join(member, {"t", "u"}, session=10.0, longer=20.0, simple=False)
        self.all_members_do_their_part_and_the_group_settles()

    # What consumers do

    @precondition(lambda self: len(self.consumers) < len(IDS))
    @rule(data=st.data(), session=SESSION, longer=LONGER, simple=RARELY)
    def a_consumer_joins(self, data, session, longer, simple):
        member = data.draw(st.sampled_from([each for each in IDS if each not in self.consumers]))
        self.join(member, data.draw(TOPICS), session, longer, simple)

    @precondition(lambda self: self.consumers)
    @rule(data=st.data(), session=SESSION, longer=LONGER, simple=RARELY)
    def a_consumer_joins_again(self, data, session, longer, simple):
        self.join(data.draw(st.sampled_from(sorted(self.consumers))), data.draw(TOPICS), session, longer, simple)

    def join(self, member: str, topics: set[str], session: float, longer: float, simple: bool) -> None:
        topics = topics & self.counts.keys()
        if not topics:
            return
        before, rebalance = self.consumers.get(member), session + longer
        standing = self.groups.join(
            "g", member, topics, self.now, session_timeout=session, rebalance_timeout=rebalance, simple=simple
        )
        again = before and before.simple and simple and before.topics == topics
        if before and not again:
            self.former.append(before)
        consumer = Consumer(member, topics, session, rebalance, simple, self.now, standing)
        consumer.mine = set(standing.partitions)
        self.consumers[member] = consumer
        assert simple or (standing.rebalance, standing.synced, standing.partitions) == (True, 0, ())
        assert again or standing.generation > self.generation
        self.note_rebalance(standing.generation)

    @precondition(lambda self: self.living())
    @rule(data=st.data(), lost=RARELY)
    def a_consumer_heartbeats(self, data, lost):
        self.heartbeat(data.draw(st.sampled_from(self.living())), lost)

    def heartbeat(self, consumer: Consumer, lost: bool = False) -> None:
        member = consumer.member
        standing = self.groups.heartbeat(
            "g", member, self.now, None if consumer.simple else consumer.standing.generation
        )
        self.answer(consumer, standing, lost)

    def answer(self, consumer: Consumer, standing: MemberStanding, lost: bool) -> None:
        consumer.heard, consumer.unsure = self.now, lost
        if not lost:
            self.hear(consumer, standing)

    def hear(self, consumer: Consumer, standing: MemberStanding) -> None:
        consumer.standing = standing
        if not standing.rebalance:
            assert consumer.simple or consumer.mine <= set(standing.partitions), "nothing is taken without a rebalance"
            consumer.mine = set(standing.partitions)

    @precondition(lambda self: self.living())
    @rule(data=st.data())
    def a_consumer_does_its_part(self, data):
        consumer = data.draw(st.sampled_from(self.living()))
        self.heartbeat(consumer)
        if consumer.standing.rebalance:
            self.give_up_and_sync(consumer)

    @precondition(lambda self: self.asked_to_sync())
    @rule(data=st.data(), lost=RARELY)
    def a_consumer_gives_up_and_syncs(self, data, lost):
        self.give_up_and_sync(data.draw(st.sampled_from(self.asked_to_sync())), lost)

    def give_up_and_sync(self, consumer: Consumer, lost: bool = False) -> None:
        consumer.mine &= set(consumer.standing.partitions)
        standing = self.groups.sync("g", consumer.member, consumer.standing.generation, self.now)
        assert standing.rebalance == (consumer.standing.generation < self.generation)
        if not standing.rebalance:
            consumer.unsynced_since = inf
        self.answer(consumer, standing, lost)

    @precondition(lambda self: len(self.living()) > 1)
    @rule(data=st.data())
    def a_consumer_leaves(self, data):
        consumer = data.draw(st.sampled_from(self.living()))
        self.groups.leave("g", consumer.member, self.now)
        del self.consumers[consumer.member]
        self.note_rebalance()

    @precondition(lambda self: self.living())
    @rule(data=st.data())
    def a_consumer_vanishes(self, data):
        consumer = data.draw(st.sampled_from(self.living()))
        consumer.vanished, consumer.mine = True, set()

    @precondition(lambda self: self.former)
    @rule(data=st.data())
    def a_former_self_speaks(self, data):
        former = data.draw(st.sampled_from(self.former))
        if former.simple:
            return  # it carries no generation and cannot be distinguished from its successor
        generation = former.standing.generation
        for call in (
            lambda: self.groups.heartbeat("g", former.member, self.now, generation),
            lambda: self.groups.sync("g", former.member, generation, self.now),
            lambda: self.groups.check_commit("g", former.member, generation, former.mine),
        ):
            with pytest.raises((StaleGeneration, UnknownMember, UnknownGroup)):
                call()

    @precondition(lambda self: self.living())
    @rule(data=st.data(), age=st.integers(0, 1))
    def a_consumer_commits_what_it_must_not(self, data, age):
        consumer = data.draw(st.sampled_from(self.living()))
        others = sorted(self.expected().keys() - self.held(consumer)) or [GroupPartition("t", 99)]
        partitions = consumer.mine if age else [data.draw(st.sampled_from(others))]
        if not consumer.unsure:
            with pytest.raises(StaleGeneration):
                self.groups.check_commit("g", consumer.member, consumer.standing.synced - age, partitions)

    # What happens to them

    @rule(seconds=SECONDS, silent=st.sets(st.sampled_from(IDS), max_size=2))
    def time_passes(self, seconds, silent):
        for consumer in self.living():
            if consumer.member not in silent:
                self.heartbeat(consumer)
        self.now += seconds
        self.tick()

    @precondition(lambda self: len(self.consumers) > 2)
    @rule()
    def the_timer_rings(self):
        self.now = self.groups.next_deadline()
        assert self.tick()

    @rule(topic=st.sampled_from(["t", "u"]), more=st.integers(1, 3))
    def partitions_are_added(self, topic, more):
        count = min(self.counts.get(topic, 0) + more, 7)
        self.counts[topic] = count
        self.groups.partitions_changed(topic, count, self.now)
        self.note_rebalance()

    @rule(topic=st.sampled_from(["t", "u"]))
    def the_topic_is_deleted(self, topic):
        self.counts.pop(topic, None)
        self.groups.topic_deleted(topic, self.now)
        for consumer in self.consumers.values():
            consumer.mine = {each for each in consumer.mine if each.topic != topic}
        self.note_rebalance()

    @rule()
    def all_members_do_their_part_and_the_group_settles(self):
        while any(each.vanished for each in self.consumers.values()):
            self.all_members_heartbeat_and_sync()
            self.now += 1
            self.tick()
        self.all_members_heartbeat_and_sync()
        held = {}
        for member, consumer in self.consumers.items():
            self.heartbeat(consumer)
            assert not consumer.standing.rebalance
            assert consumer.standing.waiting == ()
            held |= dict.fromkeys(consumer.mine, member)
        assert held == self.expected()

    # The model

    def living(self) -> list[Consumer]:
        return [each for _, each in sorted(self.consumers.items()) if not each.vanished]

    def asked_to_sync(self) -> list[Consumer]:
        return [each for each in self.living() if each.standing.rebalance]

    def held(self, consumer: Consumer) -> set[GroupPartition]:
        group = self.groups.get("g")
        return {each for each, holder in group.holders.items() if holder == consumer.member}

    def expected(self) -> dict[GroupPartition, str]:
        """Sorted members, partition p to number p mod m: written once more, in another way."""
        shares = {}
        for topic, count in self.counts.items():
            members = sorted(member for member, each in self.consumers.items() if topic in each.topics)
            for partition in range(count if members else 0):
                shares[GroupPartition(topic, partition)] = members[partition % len(members)]
        return shares

    def tick(self) -> bool:
        late = {("g", member) for member, each in self.consumers.items() if each.deadline() <= self.now}
        assert set(self.groups.tick(self.now)) == late
        for _, member in late:
            del self.consumers[member]
        self.note_rebalance()
        return bool(late)

    def note_rebalance(self, generation: int | None = None) -> None:
        group = self.groups.get("g")
        generation = generation or (group.generation if group else self.generation)
        assert generation >= self.generation
        if generation > self.generation:
            self.generation = generation
            for each in self.consumers.values():
                each.unsynced_since = inf if each.simple else min(each.unsynced_since, self.now)

    def all_members_heartbeat_and_sync(self) -> None:
        for consumer in self.living():
            self.heartbeat(consumer)
        for consumer in self.asked_to_sync():
            self.give_up_and_sync(consumer)

    def can_commit_all_it_has(self, consumer: Consumer) -> None:
        if not consumer.simple and not consumer.unsure and consumer.mine:
            self.groups.check_commit("g", consumer.member, consumer.standing.synced, consumer.mine)

    # Always true

    @invariant()
    def a_holder_may_commit_its_partitions(self):
        for each in self.living():
            self.can_commit_all_it_has(each)

    @invariant()
    def members_are_those_whose_time_is_not_up(self):
        group = self.groups.get("g")
        assert set(group.members if group else ()) == set(self.consumers)

    @invariant()
    def the_timer_is_set_to_the_first_who_would_be_late(self):
        first = min([each.deadline() for each in self.consumers.values()], default=inf)
        assert self.groups.next_deadline() == first

    @invariant()
    def no_member_believes_to_have_what_another_holds(self):
        full = [each for each in self.consumers.values() if not each.simple]
        for consumer in full:
            assert consumer.mine <= self.held(consumer)
        believed = [each for consumer in full for each in consumer.mine]
        assert len(believed) == len(set(believed))

    @invariant()
    def only_existing_partitions_are_held_and_only_by_members(self):
        if group := self.groups.get("g"):
            assert all(each.partition < self.counts.get(each.topic, 0) for each in group.holders)
            assert set(group.holders.values()) <= group.members.keys()

    @invariant()
    def what_is_free_is_free_because_its_next_holder_has_not_synced(self):
        group = self.groups.get("g")
        for each, member in self.expected().items():
            assert each in group.holders or not group.is_synced(group.members[member])


GroupsUnderChurn.TestCase.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
test_groups_under_churn = GroupsUnderChurn.TestCase
