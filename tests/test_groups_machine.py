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

from core.errors import StaleGeneration, UnknownGroup, UnknownMember
from core.groups import Groups, Standing
from core.membership import Partition

IDS = st.sampled_from(["a", "b", "c", "d"])
TOPICS = st.sets(st.sampled_from(["t", "u"]), min_size=1)
SECONDS = st.sampled_from([0.5, 1.0, 3.0, 8.0, 25.0])


@dataclass
class Consumer:
    """One life of a consumer."""

    member: str
    topics: set[str]
    session_timeout: float
    rebalance_timeout: float
    simple: bool
    heard: float
    told: Standing
    unsure: bool = False  # whether its last sync was carried out
    unsynced_since: float = inf
    mine: set[Partition] = field(default_factory=set)
    vanished: bool = False  # without a word

    def deadline(self) -> float:
        return min(self.heard + self.session_timeout, self.unsynced_since + self.rebalance_timeout)


class GroupsUnderChurn(RuleBasedStateMachine):
    @initialize(t=st.integers(1, 6), u=st.integers(1, 3))
    def start(self, t, u):
        self.now = 100.0
        self.counts = {"t": t, "u": u}
        self.groups = Groups(self.counts)
        self.consumers: dict[str, Consumer] = {}  # those that the broker should have as members
        self.former: list[Consumer] = []  # replaced by another of the same id
        self.generation = 0

    # What consumers do

    @rule(
        member=IDS,
        topics=TOPICS,
        session=st.sampled_from([2.0, 10.0]),
        longer=st.sampled_from([0, 20]),
        simple=st.booleans(),
    )
    def join(self, member, topics, session, longer, simple):
        topics &= self.counts.keys()
        if not topics:
            return
        before, rebalance = self.consumers.get(member), session + longer
        told = self.groups.join(
            "g", member, topics, self.now, session_timeout=session, rebalance_timeout=rebalance, simple=simple
        )
        again = before and before.simple and simple and before.topics == topics
        if before and not again:
            self.former.append(before)
        consumer = Consumer(member, topics, session, rebalance, simple, self.now, told)
        consumer.mine = set(told.partitions)
        self.consumers[member] = consumer
        assert (told.rebalance, told.synced) == ((False, told.generation) if simple else (True, 0))
        assert again or told.generation > self.generation
        self.note_rebalance(told.generation)

    @rule(member=IDS, lost=st.booleans())
    def heartbeat(self, member, lost):
        consumer = self.living(member)
        if consumer is None:
            return
        told = self.groups.heartbeat("g", member, self.now, None if consumer.simple else consumer.told.generation)
        consumer.heard = self.now
        if not lost:
            self.hear(consumer, told)

    def hear(self, consumer: Consumer, told: Standing) -> None:
        consumer.told, consumer.unsure = told, False
        if not told.rebalance:
            assert consumer.simple or consumer.mine <= set(told.partitions), "nothing is taken without a rebalance"
            consumer.mine = set(told.partitions)

    @rule(member=IDS, lost=st.booleans())
    def give_up_and_sync(self, member, lost):
        consumer = self.living(member)
        if consumer is None or consumer.simple or not consumer.told.rebalance:
            return
        self.can_commit_all_it_has(consumer)
        consumer.mine &= set(consumer.told.partitions)
        told = self.groups.sync("g", member, consumer.told.generation, self.now)
        consumer.heard = self.now
        assert told.rebalance == (consumer.told.generation < self.generation)
        if not told.rebalance:
            consumer.unsynced_since = inf
        consumer.unsure = lost
        if not lost:
            self.hear(consumer, told)

    @rule(member=IDS)
    def leave(self, member):
        if self.living(member):
            self.groups.leave("g", member, self.now)
            del self.consumers[member]
            self.note_rebalance()

    @rule(member=IDS)
    def vanish(self, member):
        if consumer := self.living(member):
            consumer.vanished = True
            consumer.mine = set()

    @precondition(lambda self: self.former)
    @rule(data=st.data())
    def a_former_self_speaks(self, data):
        former = data.draw(st.sampled_from(self.former))
        if former.simple:
            return  # it carries no generation and cannot be told from its successor
        generation = former.told.generation
        for call in (
            lambda: self.groups.heartbeat("g", former.member, self.now, generation),
            lambda: self.groups.sync("g", former.member, generation, self.now),
            lambda: self.groups.check_commit("g", former.member, generation, former.mine),
        ):
            with pytest.raises((StaleGeneration, UnknownMember, UnknownGroup)):
                call()

    @rule(member=IDS, topic=st.sampled_from(["t", "u"]), partition=st.integers(0, 6), age=st.integers(0, 3))
    def commit(self, member, topic, partition, age):
        consumer, each = self.living(member), Partition(topic, partition)
        if consumer is None or consumer.simple:
            return
        if age or each not in self.held(consumer):
            with pytest.raises(StaleGeneration):
                self.groups.check_commit("g", member, consumer.told.synced - age, [each])
        else:
            self.can_commit_all_it_has(consumer)

    # What happens to them

    @rule(seconds=SECONDS)
    def time_passes(self, seconds):
        self.now += seconds
        self.tick()

    @rule()
    def the_timer_rings(self):
        deadline = self.groups.next_deadline()
        assert deadline == min([each.deadline() for each in self.consumers.values()], default=inf)
        if self.consumers:
            self.now = deadline
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
    def everybody_does_its_part_and_the_group_settles(self):
        while any(each.vanished for each in self.consumers.values()):
            self.everybody_heartbeats_and_syncs()
            self.now += 1
            self.tick()
        self.everybody_heartbeats_and_syncs()
        held = {}
        for member, consumer in self.consumers.items():
            self.heartbeat(member, lost=False)
            assert not consumer.told.rebalance
            assert consumer.told.waiting == ()
            held |= dict.fromkeys(consumer.mine, member)
        assert held == self.expected()

    # The model

    def living(self, member: str) -> Consumer | None:
        consumer = self.consumers.get(member)
        return consumer if consumer and not consumer.vanished else None

    def held(self, consumer: Consumer) -> set[Partition]:
        group = self.groups.get("g")
        return {each for each, holder in group.holders.items() if holder == consumer.member}

    def expected(self) -> dict[Partition, str]:
        """Sorted members, partition p to number p mod m: written once more, in another way."""
        shares = {}
        for topic, count in self.counts.items():
            members = sorted(member for member, each in self.consumers.items() if topic in each.topics)
            for partition in range(count if members else 0):
                shares[Partition(topic, partition)] = members[partition % len(members)]
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

    def everybody_heartbeats_and_syncs(self) -> None:
        for member in list(self.consumers):
            self.heartbeat(member, lost=False)
            self.give_up_and_sync(member, lost=False)

    def can_commit_all_it_has(self, consumer: Consumer) -> None:
        if consumer.mine and not consumer.unsure:
            self.groups.check_commit("g", consumer.member, consumer.told.synced, consumer.mine)

    # Always true

    @invariant()
    def members_are_those_whose_time_is_not_up(self):
        group = self.groups.get("g")
        assert set(group.members if group else ()) == set(self.consumers)

    @invariant()
    def nobody_believes_to_have_what_another_holds(self):
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


GroupsUnderChurn.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
test_groups_under_churn = GroupsUnderChurn.TestCase
