"""What `qb cluster verify` makes of the brokers' answers: a cell is whole only if every broker was compared."""

from __future__ import annotations

from typing import Any

import pytest

from qb.cli.cluster.repair_commands import _outcome, _silent

STATUS = {"cell": "main"}
COPY = {"files": 1, "bytes": 10, "findings": []}
NODES = {"nodes": [{"node": "n0", "findings": [], "note": "", "records": 3}]}


def proof(brokers: dict[str, str] | None = None) -> dict[str, Any]:
    compared: dict[str, Any] = {"nodes": NODES, "brokers": brokers, "position": 9} if brokers else {"nodes": None}
    return {"trouble": "", "copy": COPY, **compared}


def test_a_cell_is_whole_if_every_broker_was_compared() -> None:
    found = _outcome(STATUS, {"a": proof({"a": "same", "b": "same"}), "b": proof()}, [])
    assert (found.exit_code, found.data["unproved"]) == (0, [])


@pytest.mark.parametrize(
    ("brokers", "other", "why"),
    [
        ({"a": "same", "b": "not compared: it has fallen silent"}, proof(), "it has fallen silent"),
        ({"a": "same"}, proof(), "no other broker has heard it"),
        ({"a": "same"}, _silent("it does not answer: timed out"), "it does not answer: timed out"),
        ({"a": "same", "b": "same"}, _silent("it answers no more: timed out"), "it answers no more: timed out"),
    ],
)
def test_a_silent_broker_is_named_and_the_cell_is_not_whole(
    brokers: dict[str, str], other: dict[str, Any], why: str
) -> None:
    found = _outcome(STATUS, {"a": proof(brokers), "b": other}, [])
    assert found.exit_code != 0
    assert found.data["whole"] is False
    assert found.data["unproved"] == [f"broker b: not compared: {why}"]
    assert f"not proved: broker b: not compared: {why}" in found.text
