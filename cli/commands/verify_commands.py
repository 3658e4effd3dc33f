"""Prove a data directory whole, without a broker."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import msgspec

from qb.cli.terminal.command import REFUSED, Command, Outcome, counted

if TYPE_CHECKING:
    from qb.storage.verification import VerifyReport


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


COMMANDS = (
    Command(
        "verify",
        "prove every seal and index of a data directory; needs no broker",
        "verify ./storage/data",
        _arguments,
        _verify,
    ),
)
