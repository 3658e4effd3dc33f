"""One trial: a copy of a directory, one damage, and what becomes of it."""

from __future__ import annotations

import shutil
import traceback
from enum import StrEnum
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from qb.storage import repair
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
        if wrong := _after_repair(whole, path):
            return wrong
        return (Outcome.VERIFY if findings else Outcome.START), str(error)
    except Exception:
        return Outcome.CRASHED, "start: " + traceback.format_exc()
    return _compare(whole, done, seen, findings, notes)


def _after_repair(whole: Original, path: Path) -> tuple[Outcome, str] | None:
    """Repair what no start takes; returns what is wrong then: it does not start, or has changed what was not named."""
    try:
        repair.check_repairable(path)
    except CannotOpen:
        return None  # it is not the metadata
    try:
        found = repair.plan(path)
        assert found, "the start is refused, and nothing is to be repaired"
        repair.repair(path, *found)
        findings = [each for each in verify(path).findings if not each.what.startswith("the partition has no log")]
        seen = look(path, whole.state.answers["transactions"]["stages"])
    except Exception:
        return Outcome.CRASHED, "repair: " + traceback.format_exc()
    before, after = _kept(whole.state.answers), _kept(seen.answers)
    changed = _differences(before, after)
    named = {key.split("/")[1] for keys in found[0].doubtful.values() for key in keys}
    silent = [about for about, value in changed.items() if value and _subject(about) not in named]
    for about, messages in before.items():  # a subscription that goes back may dead-letter some again
        if about.endswith("/messages") and after.get(about, [])[: len(messages)] != messages:
            silent.append(about)
    if findings or silent:
        return Outcome.SPREAD, f"after a repair {silent} has changed, {findings}: {changed}; {found[0]}"
    return None


def _subject(about: str) -> str:
    """Return what must be named in doubt for this to change: for dead letters, their subscription."""
    return about.split("/")[1].removesuffix(".dead-letters")


def _kept(answers: dict[str, Any]) -> dict[str, Any]:
    """Return what a repair changes only by name: messages that no transaction was copying, positions and offsets."""
    kept = {about: value for about, value in answers.items() if about.split("/")[0] == "offsets"}
    kept |= {f"subscription/{name}": answers.get(f"subscription/{name}") for name in ("late", "failing")}
    for about, value in answers.items():
        if about.endswith("/messages") and isinstance(value, list):
            kept[about] = [each for each in value if not each.body.startswith(b"decided")]
    return kept


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
