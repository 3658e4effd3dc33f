"""Consumer groups, decision by decision, on a clock that the tests hold in their hands."""

from __future__ import annotations

from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qb.core.groups.committed_offsets import CommittedOffset
from qb.core.groups.group_coordinator import GroupCoordinator
from qb.core.groups.group_reports import describe_group, list_groups, partitions_of
from qb.core.groups.rebalance import GroupPartition, share_out
from qb.core.wire.errors import (
    BadName,
    BadRequest,
    GroupInUse,
    LimitReached,
    StaleGeneration,
    UnknownGroup,
    UnknownMember,
    UnknownTopic,
)


@pytest.fixture
def groups():
    return GroupCoordinator({"orders": 4, "bills": 2})


def join(groups, member, topics=("orders",), now=0.0, **options):
    return groups.join("g", member, topics, now, **options)


def settle(groups, *members, now=0.0):
    """Let every member do what its standing asks for, until none is asked for anything."""
    standings = {}
    for _ in range(2):  # the second time they get what the others have given up
        for member in members:
            standings[member] = groups.heartbeat("g", member, now)
            if standings[member].rebalance:
                standings[member] = groups.sync("g", member, standings[member].generation, now)
    return {member: numbers(standing) for member, standing in standings.items()}


def numbers(standing, topic="orders"):
    return [each.partition for each in standing.partitions if each.topic == topic]


# Shares


def test_partition_p_goes_to_member_p_mod_m_of_the_sorted_ids():
    shares = share_out({"b": ["t"], "c": ["t"], "a": ["t"]}, {"t": 5})
    assert {member: [p for _, p in share] for member, share in shares.items()} == {"a": [0, 3], "b": [1, 4], "c": [2]}


def test_only_those_who_consume_a_topic_are_counted_for_it():
    shares = share_out({"a": ["t", "u"], "b": ["u"], "c": ["v"]}, {"t": 2, "u": 3})
    assert shares == {"a": [("t", 0), ("t", 1), ("u", 0), ("u", 2)], "b": [("u", 1)], "c": []}


@given(
    st.dictionaries(st.text(max_size=3), st.sets(st.sampled_from("tuv"))),
    st.fixed_dictionaries({}, optional=dict.fromkeys("tuv", st.integers(0, 9))),
)
def test_every_partition_that_a_member_consumes_is_in_one_share(topics, counts):
    shared = sorted(each for share in share_out(topics, counts).values() for each in share)
    consumed = {topic for names in topics.values() for topic in names}
    assert shared == [(t, p) for t in sorted(consumed & counts.keys()) for p in range(counts[t])]


# Rebalances


def test_the_first_member_gets_everything_once_it_has_synced(groups):
    joined = join(groups, "a")
    assert joined.rebalance
    assert joined.partitions == ()
    synced = groups.sync("g", "a", joined.generation, 0)
    assert not synced.rebalance
    assert synced.partitions == (("orders", 0), ("orders", 1), ("orders", 2), ("orders", 3))
    assert synced.waiting == ()


def test_a_partition_moves_only_when_its_holder_has_synced(groups):
    join(groups, "a")
    settle(groups, "a")
    joined = join(groups, "b")
    waits = groups.sync("g", "b", joined.generation, 0)
    assert (numbers(waits), waits.waiting) == ([], (("orders", 1), ("orders", 3)))
    standing = groups.heartbeat("g", "a", 0)
    assert (standing.rebalance, numbers(standing)) == (True, [0, 2])
    assert numbers(groups.heartbeat("g", "b", 0)) == []
    assert numbers(groups.sync("g", "a", standing.generation, 0)) == [0, 2]
    assert numbers(groups.heartbeat("g", "b", 0)) == [1, 3]


def test_a_released_partition_waits_for_its_next_holder_to_sync(groups):
    join(groups, "a")
    settle(groups, "a")
    joined = join(groups, "b")
    groups.sync("g", "a", joined.generation, 0)
    assert numbers(groups.heartbeat("g", "b", 0)) == []
    assert numbers(groups.sync("g", "b", joined.generation, 0)) == [1, 3]


def test_a_sync_that_was_overtaken_gives_nothing_up_and_says_so(groups):
    join(groups, "a")
    settle(groups, "a")
    second = join(groups, "b")
    third = join(groups, "c")
    late = groups.sync("g", "a", second.generation, 0)
    assert (late.rebalance, late.generation) == (True, third.generation)
    assert numbers(groups.sync("g", "c", third.generation, 0)) == []
    assert numbers(groups.sync("g", "a", third.generation, 0)) == [0, 3]
    assert numbers(groups.heartbeat("g", "c", 0)) == [2]


def test_a_lost_answer_to_sync_is_repeated_by_the_next_heartbeat(groups):
    first = join(groups, "a")
    groups.sync("g", "a", first.generation, 0)
    second = join(groups, "b")
    groups.sync("g", "a", second.generation, 0)
    again = groups.heartbeat("g", "a", 0, first.generation)
    assert (again.generation, again.rebalance, numbers(again)) == (second.generation, False, [0, 2])
    assert groups.sync("g", "a", second.generation, 0) == again


def test_what_a_leaver_held_goes_to_the_others_as_they_sync(groups):
    join(groups, "a")
    join(groups, "b")
    assert settle(groups, "a", "b") == {"a": [0, 2], "b": [1, 3]}
    groups.leave("g", "b", 0)
    assert settle(groups, "a") == {"a": [0, 1, 2, 3]}


def test_other_topics_of_a_member_are_a_rebalance(groups):
    join(groups, "a", ["orders"])
    join(groups, "b", ["orders"])
    settle(groups, "a", "b")
    before = groups.heartbeat("g", "a", 0).generation
    join(groups, "b", ["bills"])
    assert settle(groups, "a", "b") == {"a": [0, 1, 2, 3], "b": []}
    after = groups.heartbeat("g", "b", 0)
    assert after.generation > before
    assert numbers(after, "bills") == [0, 1]


def test_added_partitions_are_a_rebalance_that_takes_nothing_away(groups):
    join(groups, "a")
    join(groups, "b")
    settle(groups, "a", "b")
    groups.partitions_changed("orders", 6, 0)
    standing = groups.heartbeat("g", "a", 0)
    assert (standing.rebalance, numbers(standing)) == (True, [0, 2])
    assert settle(groups, "a", "b") == {"a": [0, 2, 4], "b": [1, 3, 5]}


def test_a_topic_that_no_member_consumes_is_no_reason_to_rebalance(groups):
    before = join(groups, "a").generation
    groups.partitions_changed("bills", 9, 0)
    groups.partitions_changed("orders", 4, 0)
    assert groups.heartbeat("g", "a", 0).generation == before


def test_a_deleted_topic_that_comes_back_is_taken_up_anew_and_not_gone_on_with(groups):
    join(groups, "a", ["orders", "bills"])
    settle(groups, "a")
    groups.topic_deleted("orders", 0)
    groups.partitions_changed("orders", 1, 0)
    standing = groups.heartbeat("g", "a", 0)
    assert (standing.rebalance, standing.partitions) == (True, (("bills", 0), ("bills", 1)))
    assert settle(groups, "a") == {"a": [0]}


def test_generations_of_a_group_grow_even_if_it_was_empty_in_between(groups):
    first = join(groups, "a").generation
    groups.leave("g", "a", 0)
    assert join(groups, "a").generation > first + 1


def test_generations_can_go_on_after_those_of_an_earlier_run():
    assert GroupCoordinator({"t": 1}, last_generation=41).join("g", "a", ["t"], 0).generation == 42


# Time


def test_a_silent_member_is_out_when_its_session_timeout_is_over_and_not_before(groups):
    join(groups, "a", now=0, session_timeout=30)
    join(groups, "b", now=0)
    settle(groups, "a", "b", now=5)
    assert groups.next_deadline() == 15
    assert groups.tick(14.9) == []
    assert groups.tick(15) == [("g", "b")]
    assert settle(groups, "a", now=15) == {"a": [0, 1, 2, 3]}
    with pytest.raises(UnknownMember):
        groups.heartbeat("g", "b", 15)


def test_the_death_of_the_last_member_ends_the_group(groups):
    join(groups, "a", now=0)
    assert groups.tick(10) == [("g", "a")]
    assert groups.next_deadline() == inf
    with pytest.raises(UnknownGroup, match="Group not found"):
        groups.heartbeat("g", "a", 10)


def test_members_that_die_together_are_one_rebalance(groups):
    for member in "abc":
        join(groups, member, now=0)
    settle(groups, "a", "b", "c")
    before = groups.heartbeat("g", "c", 5).generation
    assert groups.tick(10) == [("g", "a"), ("g", "b")]
    assert groups.heartbeat("g", "c", 10).generation == before + 1


def test_heartbeats_do_not_save_a_member_that_never_syncs(groups):
    join(groups, "a", now=0, rebalance_timeout=20)
    settle(groups, "a")
    join(groups, "b", now=1, session_timeout=100)
    settle(groups, "b", now=1)
    for now in (9, 18):
        groups.heartbeat("g", "a", now)
        assert groups.tick(now) == []
    assert groups.next_deadline() == 21
    assert groups.tick(21) == [("g", "a")]
    assert settle(groups, "b", now=21) == {"b": [0, 1, 2, 3]}


def test_a_further_rebalance_gives_the_late_no_more_time(groups):
    join(groups, "a", now=0, rebalance_timeout=10)
    settle(groups, "a")
    join(groups, "b", now=1, session_timeout=100)
    groups.heartbeat("g", "a", 9)
    join(groups, "c", now=9, session_timeout=100)
    assert groups.next_deadline() == 11


@pytest.mark.parametrize(
    "timeouts",
    [
        {"session_timeout": 0.9},
        {"session_timeout": 3601},
        {"session_timeout": nan},
        {"session_timeout": inf},
        {"rebalance_timeout": 9},
        {"rebalance_timeout": nan},
        {"rebalance_timeout": 3601},
    ],
)
def test_a_timeout_out_of_bounds_is_refused_and_no_member_has_joined(groups, timeouts):
    with pytest.raises(BadRequest, match="seconds"):
        join(groups, "a", **timeouts)
    assert groups.get("g") is None


# The fence


def test_a_member_commits_what_it_holds_in_the_generation_it_has_synced(groups):
    first = join(groups, "a")
    with pytest.raises(StaleGeneration):
        groups.check_commit("g", "a", first.generation, [GroupPartition("orders", 0)])
    groups.sync("g", "a", first.generation, 0)
    groups.check_commit("g", "a", first.generation, [GroupPartition("orders", 0), GroupPartition("orders", 3)])


def test_a_member_commits_before_it_gives_up_and_not_after(groups):
    first = join(groups, "a")
    groups.sync("g", "a", first.generation, 0)
    second = join(groups, "b")
    groups.check_commit("g", "a", first.generation, [GroupPartition("orders", 1)])
    groups.sync("g", "a", second.generation, 0)
    for generation in (first.generation, second.generation):
        with pytest.raises(StaleGeneration):
            groups.check_commit("g", "a", generation, [GroupPartition("orders", 1)])


def test_a_member_learns_what_to_commit_with_even_if_the_answer_to_its_sync_got_lost(groups):
    first = join(groups, "a")
    groups.sync("g", "a", first.generation, 0)
    second = join(groups, "b")
    groups.sync("g", "a", second.generation, 0)  # and the answer is lost
    join(groups, "c")
    standing = groups.heartbeat("g", "a", 0, first.generation)
    assert (standing.rebalance, standing.synced) == (True, second.generation)
    groups.check_commit("g", "a", standing.synced, [GroupPartition("orders", 2)])  # c is to have it


def test_one_partition_of_another_refuses_the_whole_commit(groups):
    join(groups, "a")
    join(groups, "b")
    settle(groups, "a", "b")
    generation = groups.heartbeat("g", "a", 0).generation
    with pytest.raises(StaleGeneration, match="'a' does not hold orders/1"):
        groups.check_commit("g", "a", generation, [GroupPartition("orders", 0), GroupPartition("orders", 1)])


def test_an_old_generation_is_refused_even_for_a_partition_that_was_kept(groups):
    first = join(groups, "a")
    groups.sync("g", "a", first.generation, 0)
    second = join(groups, "b")
    groups.sync("g", "a", second.generation, 0)
    with pytest.raises(StaleGeneration):
        groups.check_commit("g", "a", first.generation, [GroupPartition("orders", 0)])


def test_the_dead_and_strangers_commit_nothing(groups):
    generation = join(groups, "a", now=0).generation
    groups.sync("g", "a", generation, 0)
    join(groups, "b", now=5)
    groups.tick(10)
    with pytest.raises(UnknownMember):
        groups.check_commit("g", "a", generation, [])
    with pytest.raises(UnknownGroup):
        groups.check_commit("h", "a", generation, [])


def test_a_former_self_can_neither_heartbeat_nor_sync_nor_commit(groups):
    old = join(groups, "a")
    groups.sync("g", "a", old.generation, 0)
    new = join(groups, "a")
    groups.sync("g", "a", new.generation, 0)
    for call in (
        lambda: groups.heartbeat("g", "a", 0, old.generation),
        lambda: groups.sync("g", "a", old.generation, 0),
        lambda: groups.check_commit("g", "a", old.generation, [GroupPartition("orders", 0)]),
    ):
        with pytest.raises(StaleGeneration):
            call()
    assert numbers(groups.heartbeat("g", "a", 0, new.generation)) == [0, 1, 2, 3]


def test_a_member_that_joins_again_holds_nothing_until_it_syncs(groups):
    join(groups, "a")
    settle(groups, "a")
    again = join(groups, "a")
    assert (again.rebalance, again.partitions) == (True, ())
    assert groups.get("g").holders == {}


def test_giving_up_frees_nothing_that_the_member_keeps(groups):
    join(groups, "a")
    settle(groups, "a")
    join(groups, "b")
    group = groups.get("g")
    group.release(group.members["a"])
    assert sorted(group.holders) == [("orders", 0), ("orders", 2)]


def test_a_generation_from_the_future_is_refused(groups):
    joined = join(groups, "a")
    with pytest.raises(StaleGeneration):
        groups.sync("g", "a", joined.generation + 1, 0)


# The simple way


def test_a_simple_member_has_its_partitions_at_once(groups):
    assert numbers(join(groups, "a", simple=True)) == [0, 1, 2, 3]
    assert numbers(join(groups, "b", simple=True)) == [1, 3]
    assert numbers(groups.heartbeat("g", "a", 0)) == [0, 2]
    groups.leave("g", "a", 0)
    assert numbers(groups.heartbeat("g", "b", 0)) == [0, 1, 2, 3]


def test_joining_simply_again_is_a_heartbeat(groups):
    first = join(groups, "a", now=0, simple=True)
    assert join(groups, "a", now=9, simple=True) == first
    assert groups.tick(18.9) == []


def test_joining_simply_with_another_topic_changes_to_it(groups):
    join(groups, "a", simple=True)
    assert join(groups, "a", ["bills"], simple=True).partitions == (("bills", 0), ("bills", 1))


def test_a_simple_member_waits_for_what_a_full_member_holds(groups):
    join(groups, "a")
    settle(groups, "a")
    joined = join(groups, "b", simple=True)
    assert (joined.rebalance, numbers(joined)) == (False, [])
    groups.sync("g", "a", joined.generation, 0)
    assert numbers(groups.heartbeat("g", "b", 0)) == [1, 3]


# Limits and refusals


def test_bad_joins_are_refused_by_name(groups):
    with pytest.raises(BadName, match="group"):
        groups.join("a/b", "m", ["orders"], 0)
    with pytest.raises(BadName, match="member"):
        groups.join("g", "", ["orders"], 0)
    with pytest.raises(UnknownTopic):
        groups.join("g", "m", ["orders", "ordres"], 0)
    with pytest.raises(BadRequest, match="topics"):
        groups.join("g", "m", [], 0)
    assert list(groups) == []


def test_there_is_a_limit_to_members_that_names_its_setting():
    groups = GroupCoordinator({"orders": 4}, max_members=2)
    join(groups, "a")
    join(groups, "b")
    join(groups, "b")
    with pytest.raises(LimitReached, match=r"group 'g' has 2 members: the limit is 2 \(QB_MAX_GROUP_MEMBERS\)"):
        join(groups, "c")


def test_leaving_twice_is_refused(groups):
    join(groups, "a")
    join(groups, "b")
    groups.leave("g", "a", 0)
    with pytest.raises(UnknownMember):
        groups.leave("g", "a", 0)


def test_a_group_with_members_is_in_use(groups):
    groups.check_unused("g")
    join(groups, "a")
    with pytest.raises(GroupInUse, match="in use"):
        groups.check_unused("g")


# As tools see it


class NoOffsets:
    """Nothing is committed, but by group h."""

    def groups(self):
        return {"h"}

    def newest(self, group):
        return {"bills": {1: 7}} if group == "h" else {}

    def of_group(self, group):
        return {GroupPartition("bills", 1): CommittedOffset(7, 1234)} if group == "h" else {}


def test_a_group_is_described_with_its_members_holders_and_lag(groups):
    join(groups, "a", now=0)
    settle(groups, "a")
    join(groups, "b", now=1)
    seen = describe_group(groups, NoOffsets(), "g", {GroupPartition("orders", 0): 12}, now=3)
    assert seen.state == "rebalancing: waiting for a, b to sync"
    assert [(each.member, len(each.partitions), len(each.waiting), each.silent_for) for each in seen.members] == [
        ("a", 4, 0, 3),
        ("b", 0, 2, 2),
    ]
    assert [(each.partition, each.member, each.committed, each.lag) for each in seen.partitions] == [
        (0, "a", None, 12),
        (1, "a", None, None),
        (2, "a", None, None),
        (3, "a", None, None),
    ]
    settle(groups, "a", "b", now=3)
    assert describe_group(groups, NoOffsets(), "g", {}, now=3).state == "stable"


def test_a_group_without_members_is_known_by_what_it_committed(groups):
    assert partitions_of(groups, NoOffsets(), "h") == [("bills", 1)]
    seen = describe_group(groups, NoOffsets(), "h", {GroupPartition("bills", 1): 10}, now=0)
    assert (seen.state, seen.generation, seen.members) == ("empty", 0, [])
    (only,) = seen.partitions
    assert (only.member, only.committed, only.end, only.lag, only.updated_ms) == (None, 7, 10, 3, 1234)
    with pytest.raises(UnknownGroup):
        describe_group(groups, NoOffsets(), "unknown", {}, now=0)


def test_groups_are_listed_whether_they_have_members_or_offsets(groups):
    join(groups, "a", ["orders", "bills"], simple=True)
    listed = [(each.group, each.state, each.members, each.topics) for each in list_groups(groups, NoOffsets())]
    assert listed == [("g", "stable", 1, ["bills", "orders"]), ("h", "empty", 0, ["bills"])]
