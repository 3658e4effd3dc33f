"""Prove a data directory whole, and go on without metadata that is lost; both without a broker."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from qb.cli.terminal.command import REFUSED, Command, Outcome, counted

if TYPE_CHECKING:
    from qb.storage.repair import MetadataRepair
    from qb.storage.verification import VerifyReport

SHOWN = 20  # names of a kind


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data_dir", metavar="DATA_DIR")


def _verify(args: argparse.Namespace) -> Outcome:
    from qb.storage.verification import verify  # here, because no other command reads files

    report = verify(args.data_dir)
    whole = not report.findings
    data = {"data_dir": args.data_dir, "whole": whole, **msgspec.to_builtins(report)}
    return Outcome(data, _sentences(args.data_dir, report), 0 if whole else REFUSED)


def _sentences(data_dir: str, report: VerifyReport) -> str:
    lines = [f"cannot be proved: {finding}" for finding in report.findings]
    lines += [f"note: {note}" for note in report.notes]
    verdict = f"has {counted(len(report.findings), 'finding')}" if report.findings else "is whole"
    nouns = ("topic", "partition", "segment", "message", "stage")
    seen = ", ".join(counted(getattr(report, f"{noun}s"), noun) for noun in nouns)
    return "\n".join([*lines, f"{data_dir} {verdict}; seen: {seen}, {counted(report.bytes, 'byte')}"])


def _repair_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data_dir", metavar="DATA_DIR", type=Path)
    parser.add_argument("--yes", action="store_true", help="do it; otherwise only say what would be lost")


def _repair(args: argparse.Namespace) -> Outcome:
    from qb.storage import repair  # here, because no other command writes files
    from qb.storage.directory_lock import DirectoryLock

    repair.check_repairable(args.data_dir)
    lock = DirectoryLock(args.data_dir)
    try:
        found = repair.plan(args.data_dir)
        if found is None:
            text = f"nothing is to be repaired: a start takes the metadata of {args.data_dir} as it is"
            return Outcome({"data_dir": str(args.data_dir), "repaired": False, "plan": None}, text)
        planned, entries = found
        aside = repair.repair(args.data_dir, planned, entries) if args.yes else None
    finally:
        lock.close()
    data = {"data_dir": str(args.data_dir), "repaired": bool(aside), "plan": msgspec.to_builtins(planned)}
    if aside is None:
        end = f"nothing was changed; to go on with what is left: qb repair {args.data_dir} --yes"
        return Outcome(data, "\n".join([*_planned(planned), end]), REFUSED)
    end = f"{args.data_dir} goes on with what is left; the damaged files are in {aside}"
    return Outcome({**data, "aside": str(aside)}, "\n".join([*_planned(planned), end]))


def _planned(planned: MetadataRepair) -> list[str]:
    from qb.storage.repair import MEANINGS

    lines = [f"a start refuses it: {planned.why}"]
    lines += [f"damaged in both files: {each}" for each in planned.damages]
    lines.append(f"of the metadata {planned.kept:,} values are known")
    for kind, keys in planned.doubtful.items():
        names = [key.partition("/")[2] for key in keys]
        lines.append(f"in doubt, {MEANINGS[kind]}: {_listed(names)}")
    if planned.legible:
        lines.append(f"readable in the damaged bytes, which proves nothing: {_listed(planned.legible)}")
    lines += [f"topic {each}" for each in planned.topics]
    lines.append("what nothing but the damaged records knew is lost and cannot be named")
    return lines


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more (all of them: --json)" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


COMMANDS = (
    Command(
        "verify",
        "prove every seal and index of a data directory; needs no broker",
        "verify ./storage/data",
        _arguments,
        _verify,
    ),
    Command(
        "repair",
        "say what is lost where both files of the metadata are damaged, and go on without it",
        "repair ./storage/data",
        _repair_arguments,
        _repair,
    ),
)
