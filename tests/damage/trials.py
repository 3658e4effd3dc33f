"""One trial: a copy of a directory, one damage, and what becomes of it."""

from __future__ import annotations

import shutil
import traceback
from enum import StrEnum
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from qb.storage.files import CannotOpen
from qb.storage.verification import VerifyReport, verify
from tests.damage.client_state import ClientState, Refused, look
from tests.damage.damages import Damage, damage


class Outcome(StrEnum):
    """How a trial ended."""

    VERIFY = "found by verify"
    START = "found by the start"
    CUT = "a cut tail, reported"
    REFUSED = "refused at read"
    HARMLESS = "harmless"
    SILENT = "silent"
    CRASHED = "crashed"
    SPREAD = "took out more"


BAD = (Outcome.SILENT, Outcome.CRASHED, Outcome.SPREAD)


class Trial(NamedTuple):
    """What was done, and what came of it."""

    seed: int
    directory: str
    damage: Damage
    outcome: Outcome
    details: str


class Original(NamedTuple):
    """A directory, and what clients see of it."""

    name: str
    path: Path
    state: ClientState
    notes: set[str]  # of verify


def original(name: str, path: Path, scratch: Path) -> Original:
    """Look at a directory that is not damaged, through a copy."""
    shutil.copytree(path, scratch)
    try:
        report = verify(scratch)
        assert not report.findings, report.findings
        return Original(name, path, look(scratch), _noted(report, scratch))
    finally:
        shutil.rmtree(scratch)


def try_seed(seed: int, originals: list[Original], scratch: Path) -> Trial:
    """Damage a copy of one of the directories as the seed says."""
    random = Random(seed)
    chosen = originals[seed % len(originals)]
    shutil.copytree(chosen.path, scratch)
    try:
        done = damage(scratch, random)
        outcome, details = _judge(chosen, done, scratch)
        return Trial(seed, chosen.name, done, outcome, details)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _judge(whole: Original, done: Damage, path: Path) -> tuple[Outcome, str]:
    try:
        findings, notes = _verified(whole, path)
    except Exception:
        return Outcome.CRASHED, "verify: " + traceback.format_exc()
    try:
        seen = look(path, whole.state.answers["transactions"]["stages"])
    except CannotOpen as error:
        if not _describes_all(done):
            return Outcome.SPREAD, f"the broker does not start: {error}"
        return (Outcome.VERIFY if findings else Outcome.START), str(error)
    except Exception:
        return Outcome.CRASHED, "start: " + traceback.format_exc()
    return _compare(whole, done, seen, findings, notes)


def _compare(
    whole: Original, done: Damage, seen: ClientState, findings: list[str], notes: list[str]
) -> tuple[Outcome, str]:
    logged = [line for line in seen.logged if line not in whole.state.logged]
    if any("Traceback" in line for line in logged):
        return Outcome.CRASHED, "logged: " + "; ".join(logged)
    changed = _differences(whole.state.answers, seen.answers)
    details = f"changed: {sorted(changed)}; findings: {findings}; notes: {notes}; logged: {logged}"
    if spread := [about for about in changed if not _may_change(done, about)]:
        return Outcome.SPREAD, f"{done.file} does not describe {spread}; {details}"
    if findings:
        return Outcome.VERIFY, details
    if logged:
        return (Outcome.CUT if any("if it was acked" in line for line in logged) else Outcome.START), details
    if not changed:
        return Outcome.HARMLESS, details
    if all(isinstance(value, Refused) for value in changed.values()):
        return Outcome.REFUSED, details
    return Outcome.SILENT, details + "".join([f"\n{about}: {value!r:.200}" for about, value in changed.items()])


def _verified(whole: Original, path: Path) -> tuple[list[str], list[str]]:
    """Return what verify finds, and what it notes besides what it notes of the whole directory."""
    try:
        report = verify(path)
    except CannotOpen as error:
        return [str(error)], []
    return [str(finding) for finding in report.findings], sorted(_noted(report, path) - whole.notes)


def _noted(report: VerifyReport, path: Path) -> set[str]:
    return {str(note).replace(str(path), "DIR") for note in report.notes}


def _differences(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return what is answered differently, with the new answer."""
    return {about: other.get(about) for about in one.keys() | other.keys() if one.get(about) != other.get(about)}


# What a file describes


def _paths(done: Damage) -> list[str]:
    """Return the damaged file, and the one that it was swapped with."""
    swapped = done.what.removeprefix("swapped with ") if done.kind == "swap" else done.file
    return [done.file, swapped]


def _describes_all(done: Damage) -> bool:
    """Does it leave nothing that says what there is? Both copies of the metadata may be damaged at one record."""
    return "format" in _paths(done) or done.kind in ("same place", "two spots")


def _may_change(done: Damage, about: str) -> bool:
    """May the answer change? A damaged partition stops its topic, and what goes by it."""
    if _describes_all(done):
        return True
    return any(_describes(path.split("/"), about.split("/")) for path in _paths(done))


def _describes(place: list[str], about: list[str]) -> bool:
    if place[0] == "staged":
        if about[0] in ("subscription", "group"):
            return about[1] in ("all", "paused", "group")  # a decided transaction holds its partitions
        return about[0] in ("transactions", "transaction", "commit") or about[:2] == ["topic", "orders"]
    if place[0] != "topics":
        return False
    if about[0] == "topic":
        return len(place) == 1 or about[1] == place[1]
    topics = {"orders": ("all", "paused"), "events": ("late", "failing"), "failing.dead-letters": ("failing",)}
    if about[0] in ("subscription", "dead letters"):
        return about[1] in topics.get(place[1], ())
    return about[0] in ("topics", "subscriptions", "groups", "group", "transactions", "transaction", "commit")
