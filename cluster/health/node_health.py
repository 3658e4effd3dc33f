"""Decides how each NATS node is: from what their leader says, what their monitors say, and what a scrub has found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from qb.core.broker.cell_report import JournalNode, JournalState, NodeState

PATIENCE = 5.0  # seconds in which a node may still get what its leader has


class MonitorReport(NamedTuple):
    """What one node says of its own copy."""

    name: str
    holds: bool = False  # has it a copy of the journal at all?
    first: int = 0
    last: int = 0
    messages: int = 0

    @property
    def missing(self) -> int:
        """How many records are missing between its first and its last one: nothing ever removes one there."""
        return max(0, self.last - self.first + 1 - self.messages) if self.holds else 0


class MonitorSilent(NamedTuple):
    """A monitor does not answer."""

    name: str  # of the node that answered there before, else the address
    why: str


class LeaderSays(NamedTuple):
    """What the leader of the stream says of it."""

    nodes: Sequence[JournalNode] = ()
    first: int = 0
    last: int = 0
    messages: int = 0
    bytes: int = 0


class Observed(NamedTuple):
    """Everything that one look has found."""

    leader: LeaderSays | str  # in words, why there is no leader
    monitors: Sequence[MonitorReport | MonitorSilent] = ()


def leader_says(answer: Mapping[str, Any]) -> LeaderSays:
    """Read an answer to STREAM.INFO."""
    state, group = answer["state"], answer.get("cluster") or {}
    leader = group.get("leader", "")
    nodes = [JournalNode(name=leader, role="leader")] if leader else []
    for each in group.get("replicas") or ():
        lag, name = each.get("lag", 0), each["name"]
        if each.get("offline"):
            nodes.append(_node(name, NodeState.AWAY, "is away: the leader of the journal does not hear it", lag=lag))
        elif not each.get("current"):
            nodes.append(_node(name, NodeState.LAGS, f"lags by {lag} records", lag=lag))
        else:
            nodes.append(JournalNode(name=name, role="replica", lag=lag))
    return LeaderSays(nodes, state["first_seq"], state["last_seq"], state["messages"], state["bytes"])


def _node(name: str, state: NodeState, why: str, **more: int) -> JournalNode:
    return JournalNode(name=name, role="replica", state=state, current=False, why=why, **more)


def judge(
    stream: str,
    observed: Observed,
    *,
    known: Sequence[JournalNode] = (),
    due: int = 0,
    damaged: Mapping[str, int] | None = None,
) -> JournalState:
    """Return how the journal and its nodes are.

    Args:
        known: The nodes that were there when a leader was seen last; they are named if there is none.
        due: A position that was the leader's end PATIENCE ago: all nodes should have come so far.
        damaged: How many records the newest pass over each node's copy has found damaged.
    """
    by_name = {each.name: each for each in observed.monitors}
    if isinstance(observed.leader, str):
        nodes = [_by_monitor(msgspec.structs.replace(each, role="replica"), by_name) for each in known]
        return JournalState(stream=stream, error=observed.leader, nodes=nodes)
    leader = observed.leader
    nodes = []
    for each in leader.nodes:
        node = _by_position(_by_monitor(each, by_name), by_name.get(each.name), leader.first, due)
        nodes.append(_by_scrub(node, (damaged or {}).get(each.name, 0)))
    names = {each.name for each in nodes}
    notes = [each.why for each in observed.monitors if isinstance(each, MonitorSilent) and each.name not in names]
    messages, size, last = leader.messages, leader.bytes, leader.last
    return JournalState(stream=stream, nodes=nodes, notes=notes, messages=messages, bytes=size, last=last)


def _by_monitor(node: JournalNode, by_name: Mapping[str, MonitorReport | MonitorSilent]) -> JournalNode:
    """Look at what the node itself says."""
    said = by_name.get(node.name)
    if isinstance(said, MonitorSilent) and node.state is not NodeState.AWAY:
        return _worse(node, NodeState.AWAY, f"is away: {said.why}")
    if isinstance(said, MonitorReport) and node.state in (NodeState.CURRENT, NodeState.LAGS):
        if not said.holds:
            return _worse(node, NodeState.LACKS, "has no copy of the journal")
        if said.missing:
            why = f"lacks {said.missing} records between {said.first} and {said.last}"
            return _worse(node, NodeState.LACKS, why, missing=said.missing)
    return node


def _by_position(node: JournalNode, said: MonitorReport | MonitorSilent | None, first: int, due: int) -> JournalNode:
    """Compare where its copy begins and ends with where it should."""
    if not isinstance(said, MonitorReport) or node.state is not NodeState.CURRENT:
        return node
    if said.last < due:
        return _worse(node, NodeState.LAGS, f"lags: it ends at {said.last}, and {due} is due", lag=due - said.last)
    if said.messages and said.first > first:
        missing = said.first - first
        return _worse(node, NodeState.LACKS, f"lacks the first {missing} records of the journal", missing=missing)
    return node


def _by_scrub(node: JournalNode, damaged: int) -> JournalNode:
    if not damaged or node.state in (NodeState.AWAY, NodeState.LACKS):
        return msgspec.structs.replace(node, damaged=damaged)
    return _worse(node, NodeState.DAMAGED, f"has {damaged} damaged records; see: qb cluster verify", damaged=damaged)


def _worse(node: JournalNode, state: NodeState, why: str, **more: int) -> JournalNode:
    return msgspec.structs.replace(node, state=state, current=False, why=why, **more)


class HealthLog:
    """Which sentences are to be logged: each trouble once when it is certain, and once when it is over."""

    def __init__(self) -> None:
        self._seen: dict[str, str] = {}  # the trouble of the look before, by whom it concerns
        self._logged: dict[str, str] = {}

    def take(self, state: JournalState) -> list[tuple[bool, str]]:
        """Take a look; returns sentences, and whether each is about a trouble. One that lasts two looks is certain."""
        now = {f"NATS node {each.name}": (each.state.value, each.why) for each in state.nodes if not each.current}
        if state.error is not None:
            now["the journal"] = ("error", f"cannot be written: {state.error}")
        now |= {f"the monitor {note}": ("silent", "") for note in state.notes}
        lines = []
        for who, (kind, why) in now.items():
            if self._seen.get(who) == kind != self._logged.get(who):
                self._logged[who] = kind
                lines.append((True, f"{who} {why}".rstrip()))
        for who in [each for each in self._logged if each not in now]:
            del self._logged[who]
            lines.append((False, f"{who} is well again"))
        self._seen = {who: kind for who, (kind, _) in now.items()}
        return lines


def spare_nodes(state: JournalState) -> int:
    """Return how many more nodes may die before work stops; below 0: it has stopped."""
    most = len(state.nodes) // 2 + 1
    current = sum(each.current for each in state.nodes)
    return current - most if state.error is None else min(-1, current - most)


def verdict(state: JournalState) -> str:
    """Return what would happen if one more NATS node died."""
    nodes, current = len(state.nodes), sum(each.current for each in state.nodes)
    most = nodes // 2 + 1
    if state.error is not None:
        return f"nothing can be stored: {state.error}"
    have = f"{current} of {nodes} NATS nodes {'has' if current == 1 else 'have'} all of the journal"
    if current > most:
        return f"{have}: with one less nothing is lost, and work goes on"
    if current == most and nodes > 1:
        return f"{have}: with one less nothing is lost, but work stops"
    return f"{have}: if it dies, what is not in a broker's copy is lost"
