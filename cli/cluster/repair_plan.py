"""Decides whether a broker's copy or a NATS node may be repaired now, and says which steps do it. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class RepairPlan(NamedTuple):
    """What to do about one broker or NATS node."""

    name: str
    kind: str  # "broker" or "nats"
    refusals: Sequence[str]  # why not now; empty if it is safe
    steps: Sequence[str]
    is_stopped: bool  # as far as the others hear


def plan(found: Mapping[str, Any], name: str) -> RepairPlan | None:
    """Return what to do, given the status of the cell; None if there is no broker and no NATS node of that name."""
    brokers = {each["name"]: each for each in found["brokers"]}
    nodes = {each["name"]: each for each in found["journal"]["nodes"]}
    if name in brokers:
        return _of_broker(found, brokers[name])
    if name in nodes:
        return _of_node(found, nodes[name])
    return None


def _of_broker(found: Mapping[str, Any], broker: Mapping[str, Any]) -> RepairPlan:
    name, refusals = broker["name"], []
    if broker["role"] == "owner":
        refusals.append(f"{name} owns the cell: give it away first, with: qb cluster move")
    if found["owner"] is None:
        refusals.append("no broker owns the cell just now")
    if found["journal"]["error"] is not None:
        why = found["journal"]["error"]
        refusals.append(f"the journal cannot be written ({why}), and may have to be restored from this copy")
    steps = [
        f"stop the broker {name}",
        f"on its machine: qb cluster repair {name} --directory ITS_DATA_DIR (sets the copy aside; nothing is deleted)",
        "start it again: it takes a new copy from the journal",
        f"wait until qb cluster status shows lag 0 for {name}; then what was set aside can be deleted",
    ]
    return RepairPlan(name, "broker", refusals, steps, broker["role"] == "gone")


def _of_node(found: Mapping[str, Any], node: Mapping[str, Any]) -> RepairPlan:
    name, refusals = node["name"], []
    others = [each for each in found["journal"]["nodes"] if each["name"] != name]
    if found["journal"]["error"] is not None:
        refusals.append(f"the journal cannot be written: {found['journal']['error']}")
    refusals += [
        f"NATS node {each['name']} {each['why'] or 'is not current'}" for each in others if not each["current"]
    ]
    if len(others) < 2:
        refusals.append("there is no majority of other nodes that could give it everything")
    steps = [
        "prove the other nodes first: qb cluster verify must find nothing about them",
        f"stop the NATS server {name}",
        f"on its machine: qb cluster repair {name} --directory ITS_STORE_DIR (sets it aside; nothing is deleted)",
        "start it again under the same name: the leader sends it everything",
        f"wait until qb cluster status shows {name} as current, then: qb cluster verify",
        "only then work on another node; what was set aside can be deleted",
    ]
    return RepairPlan(name, "nats", refusals, steps, node["state"] == "away")
