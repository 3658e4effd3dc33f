"""How a NATS node is, decided from what its leader, its monitor and the newest scrub say."""

from __future__ import annotations

from typing import Any

import pytest

from qb.cluster.health.node_health import (
    HealthLog,
    LeaderSays,
    MonitorReport,
    MonitorSilent,
    Observed,
    judge,
    leader_says,
    spare_nodes,
    verdict,
)
from qb.core.broker.cell_report import JournalNode, JournalState, NodeState

NODES = ("n1", "n2", "n3")


def info(**changes: Any) -> LeaderSays:
    """Return what a leader says; a change is of one replica, by name."""
    replicas = [{"name": name, "current": True, "lag": 0} | changes.get(name, {}) for name in NODES[1:]]
    state = {"first_seq": 1, "last_seq": 100, "messages": 100, "bytes": 5_000}
    return leader_says({"state": state, "cluster": {"leader": "n1", "replicas": replicas}})


def whole(name: str, last: int = 100) -> MonitorReport:
    return MonitorReport(name, True, 1, last, last)


def states(state: JournalState) -> dict[str, NodeState]:
    return {each.name: each.state for each in state.nodes}


def node_of(*monitors: MonitorReport | MonitorSilent, name: str = "n2", leader: LeaderSays | None = None, **more: Any):
    judged = judge("S", Observed(leader or info(), monitors), **more)
    return next(each for each in judged.nodes if each.name == name)


def test_without_monitors_the_leader_alone_is_believed() -> None:
    judged = judge("S", Observed(info(n2={"current": False, "lag": 7}, n3={"offline": True})))
    assert states(judged) == {"n1": NodeState.CURRENT, "n2": NodeState.LAGS, "n3": NodeState.AWAY}
    assert [each.current for each in judged.nodes] == [True, False, False]
    assert judged.nodes[1].why == "lags by 7 records"


def test_a_node_whose_monitor_is_silent_is_away() -> None:
    node = node_of(whole("n1"), MonitorSilent("n2", "http://b:8222 does not answer"))
    assert (node.state, node.why) == (NodeState.AWAY, "is away: http://b:8222 does not answer")


@pytest.mark.parametrize(
    ("monitor", "missing", "why"),
    [
        (MonitorReport("n2", True, 1, 100, 97), 3, "lacks 3 records between 1 and 100"),
        (MonitorReport("n2", True, 11, 100, 90), 10, "lacks the first 10 records of the journal"),
        (MonitorReport("n2"), 0, "has no copy of the journal"),
    ],
)
def test_a_node_that_lacks_records_is_found_by_what_it_says_of_itself(
    monitor: MonitorReport, missing: int, why: str
) -> None:
    node = node_of(monitor)
    assert (node.state, node.missing, node.why) == (NodeState.LACKS, missing, why)


def test_a_node_that_does_not_come_on_lags_even_if_its_leader_takes_it_for_current() -> None:
    assert node_of(whole("n2", 90), due=90).state is NodeState.CURRENT
    node = node_of(whole("n2", 90), due=95)
    assert (node.state, node.lag) == (NodeState.LAGS, 5)


def test_a_node_with_damaged_records_is_not_current() -> None:
    node = node_of(whole("n2"), damaged={"n2": 2})
    assert (node.state, node.damaged, node.current) == (NodeState.DAMAGED, 2, False)


def test_without_a_leader_the_known_nodes_are_named_and_nothing_can_be_stored() -> None:
    known = info().nodes
    judged = judge("S", Observed("no server answers this request", [MonitorSilent("n3", "it is gone")]), known=known)
    assert judged.error == "no server answers this request"
    assert states(judged) == {"n1": NodeState.CURRENT, "n2": NodeState.CURRENT, "n3": NodeState.AWAY}
    assert spare_nodes(judged) == -1


def test_a_monitor_that_never_answered_is_noted() -> None:
    judged = judge("S", Observed(info(), [MonitorSilent("http://wrong:1", "http://wrong:1 does not answer")]))
    assert judged.notes == ["http://wrong:1 does not answer"]
    assert all(each.current for each in judged.nodes)


def test_a_trouble_is_logged_once_when_it_lasts_and_once_when_it_is_over() -> None:
    log, good = HealthLog(), judge("S", Observed(info()))
    lags = judge("S", Observed(info(n2={"current": False, "lag": 7})))
    more = judge("S", Observed(info(n2={"current": False, "lag": 9})))
    assert log.take(good) == []
    assert log.take(lags) == [], "one look is not enough"
    assert log.take(good) == []
    assert [log.take(lags), log.take(more), log.take(lags)] == [[], [(True, "NATS node n2 lags by 9 records")], []]
    away = judge("S", Observed(info(n2={"offline": True})))
    assert log.take(away) == []
    assert [line for _, line in log.take(away)] == ["NATS node n2 is away: the leader of the journal does not hear it"]
    assert log.take(good) == [(False, "NATS node n2 is well again")]
    assert log.take(good) == []


@pytest.mark.parametrize(
    ("current", "nodes", "spare", "said"),
    [
        (3, 3, 1, "3 of 3 NATS nodes have all of the journal: with one less nothing is lost, and work goes on"),
        (2, 3, 0, "2 of 3 NATS nodes have all of the journal: with one less nothing is lost, but work stops"),
        (1, 1, 0, "1 of 1 NATS nodes has all of the journal: if it dies, what is not in a broker's copy is lost"),
        (1, 3, -1, "1 of 3 NATS nodes has all of the journal: if it dies, what is not in a broker's copy is lost"),
    ],
)
def test_what_would_be_lost_if_one_more_node_died(current: int, nodes: int, spare: int, said: str) -> None:
    rows = [JournalNode(name=f"n{number}", role="replica", current=number < current) for number in range(nodes)]
    state = JournalState(stream="S", nodes=rows)
    assert (verdict(state), spare_nodes(state)) == (said, spare)
