"""A repair is refused while it could lose something, and says which steps there are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qb.cli.cluster.repair_commands import _set_aside
from qb.cli.cluster.repair_plan import RepairPlan, plan
from qb.cli.terminal.command import CommandFailed
from qb.storage.directory_lock import DirectoryLock


def status(*, error: str | None = None, owner: str | None = "b1", **states: str) -> dict[str, Any]:
    nodes = [
        {"name": name, "state": states.get(name, "current"), "current": name not in states, "why": states.get(name, "")}
        for name in ("n1", "n2", "n3")
    ]
    roles = {"b1": "owner", "b2": "follower", "b3": "gone"}
    brokers = [{"name": name, "role": role} for name, role in roles.items()]
    return {"owner": owner, "brokers": brokers, "journal": {"error": error, "nodes": nodes}}


def planned(name: str, **found: Any) -> RepairPlan:
    made = plan(status(**found), name)
    assert made is not None
    return made


def test_a_follower_is_repaired_from_the_journal() -> None:
    made = planned("b2")
    assert (made.kind, list(made.refusals), made.is_stopped) == ("broker", [], False)
    assert made.steps[0] == "stop the broker b2"
    assert planned("b3").is_stopped


def test_a_copy_that_may_be_needed_is_not_set_aside() -> None:
    assert planned("b1").refusals == ["b1 owns the cell: give it away first, with: qb cluster move"]
    assert "may have to be restored from this copy" in planned("b2", error="no majority").refusals[0]
    assert planned("b2", owner=None).refusals == ["no broker owns the cell just now"]


def test_a_node_is_repaired_only_while_all_others_are_current() -> None:
    assert planned("n2").refusals == []
    assert planned("n2", n2="damaged").refusals == []
    assert planned("n2", n2="away").is_stopped
    assert planned("n2", n3="damaged").refusals == ["NATS node n3 damaged"]
    assert planned("n2", error="no leader").refusals == ["the journal cannot be written: no leader"]


def test_what_is_not_there_has_no_plan() -> None:
    assert plan(status(), "n9") is None


def stopped(kind: str, *, is_stopped: bool = True) -> RepairPlan:
    return RepairPlan("x", kind, [], [], is_stopped)


def test_a_directory_is_set_aside_and_nothing_is_deleted(tmp_path: Path) -> None:
    for number in (1, 2):
        store = tmp_path / "store"
        (store / "jetstream").mkdir(parents=True)
        (store / "jetstream" / "block").write_text(str(number))
        assert _set_aside(stopped("nats"), store).data["set_aside"] == str(tmp_path / f"store.aside-{number}")
        assert (tmp_path / f"store.aside-{number}" / "jetstream" / "block").read_text() == str(number)
        assert not store.exists()


def test_what_is_in_use_or_something_else_is_not_set_aside(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match="still answers"):
        _set_aside(stopped("nats", is_stopped=False), tmp_path)
    with pytest.raises(CommandFailed, match="no jetstream in it"):
        _set_aside(stopped("nats"), tmp_path)
    (tmp_path / "checkpoint").touch()
    lock = DirectoryLock(tmp_path)
    try:
        with pytest.raises(CommandFailed, match="in use"):
            _set_aside(stopped("broker"), tmp_path)
    finally:
        lock.close()
