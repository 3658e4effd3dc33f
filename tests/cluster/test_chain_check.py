"""Brokers have applied the same records if their chains have one checksum at one position."""

from __future__ import annotations

import trio

from qb.cluster.members import Announcement
from qb.cluster.roles import Role
from qb.cluster.scrub.cell_scrub import heard_behind
from qb.cluster.scrub.chain_check import answers_due, chain_verdicts, reader_of_nodes
from qb.replication.journal.record_chain import ChainPoint

HERE = ChainPoint(position=10, chain=111)


def said(name: str, applied: int, chain: int, role: Role = Role.FOLLOWER) -> Announcement:
    return Announcement(name, f"{name}:1", f"{name}:2", role, 3, applied, "1", 1, chain)


def test_each_broker_is_compared_where_it_is() -> None:
    others = [said("b", 10, 111), said("c", 12, 222), said("d", 12, 9), said("e", 4, 5), said("f", 11, 7)]
    verdicts = chain_verdicts(HERE, {10: 111, 12: 222}, others)
    assert (verdicts["b"], verdicts["c"], verdicts["d"]) == ("same", "same", "differs")
    assert verdicts["e"] == "not compared: it is 6 records behind"
    assert verdicts["f"].startswith("not compared")


def test_a_broker_that_is_behind_is_waited_for() -> None:
    assert answers_due(HERE, ["b"], [said("b", 9, 1)])
    assert answers_due(HERE, ["b"], [])
    assert answers_due(HERE, ["b"], [said("b", 10, 1), said("c", 9, 1)]), "it was heard only since"
    assert not answers_due(HERE, ["b"], [said("b", 10, 1)])


async def test_a_copy_that_began_again_behind_a_silent_node_is_compared(autojump_clock) -> None:
    due = trio.current_time() + 8
    heard = await heard_behind(HERE, lambda: [said("b", 12, 222) if trio.current_time() >= due else said("b", 4, 5)])
    assert chain_verdicts(HERE, {10: 111, 12: 222}, *heard) == {"b": "same"}


async def test_a_copy_that_stays_behind_is_not_compared_and_ends_the_wait(autojump_clock) -> None:
    heard = await heard_behind(HERE, lambda: [said("b", 10, 111), said("c", 4, 5)])
    verdicts = chain_verdicts(HERE, {10: 111}, *heard)
    assert verdicts == {"b": "same", "c": "not compared: it is 6 records behind"}


async def test_a_broker_that_falls_silent_meanwhile_is_named_as_not_compared(autojump_clock) -> None:
    began = trio.current_time()

    def others() -> list[Announcement]:
        is_there = 2 <= trio.current_time() - began < 5
        return [said("b", 10 if trio.current_time() - began > 3 else 9, 111), *([said("c", 4, 5)] if is_there else [])]

    verdicts = chain_verdicts(HERE, {10: 111}, *await heard_behind(HERE, others))
    assert verdicts == {"b": "same", "c": "not compared: it has fallen silent"}


def test_one_follower_reads_the_nodes_and_the_owner_only_if_it_is_alone() -> None:
    owner, followers = said("a", 1, 1, Role.OWNER), [said("c", 1, 1), said("d", 1, 1)]
    assert reader_of_nodes(Role.FOLLOWER, "b", [owner, *followers]) == "b"
    assert reader_of_nodes(Role.OWNER, "a", followers) == "c"
    assert reader_of_nodes(Role.OWNER, "a", []) == "a"
