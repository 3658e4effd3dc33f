"""Proving all copies of a cell, and repairing one of them."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qb.cli.cluster.cell_questions import addresses, ask, best
from qb.cli.cluster.repair_plan import RepairPlan, plan
from qb.cli.terminal.command import REFUSED, Command, CommandFailed, Outcome, counted, no_arguments
from qb.clients.credentials import Credentials
from qb.clients.protocol.client_errors import RequestRefused
from qb.core.wire.addresses import BrokerAddress, like
from qb.core.wire.errors import BrokerError

POLL = 0.2  # seconds between two questions
SILENT = 15.0  # seconds that a broker may give no answer while it verifies


def _verify(args: argparse.Namespace) -> Outcome:
    status = best(args)
    if status["engine"] == "local":
        raise CommandFailed("one broker, without a cluster; prove its data directory with: qb verify DATA_DIR")
    first, credentials = addresses(args)[0], Credentials(**args.credentials)
    rows = sorted(status["brokers"], key=lambda each: (each["role"] != "follower", each["name"]))
    there = [each for each in rows if each["role"] != "gone"]
    gone = [f"broker {each['name']} is gone, and its copy was not proved" for each in rows if each["role"] == "gone"]
    asked: dict[str, BrokerAddress] = {}
    proofs: dict[str, dict[str, Any]] = {}
    for each in there:
        address = like(first, each["address"])
        try:
            ask(address, credentials, "verify_cell", start=True, nodes=not asked)
        except (OSError, BrokerError, RequestRefused) as error:
            proofs[each["name"]] = _silent(f"it does not answer: {error}")
        else:
            asked[each["name"]] = address
    proofs |= {name: _finished(address, credentials) for name, address in asked.items()}
    return _outcome(status, proofs, gone)


def _silent(why: str) -> dict[str, Any]:
    """Return the proof of a broker that gives none."""
    return {"running": False, "trouble": f"not compared: {why}", "copy": None, "nodes": None}


def _finished(address: BrokerAddress, credentials: Credentials) -> dict[str, Any]:
    """Wait until a broker has verified."""
    heard = time.monotonic()
    while True:
        try:
            found: dict[str, Any] = ask(address, credentials, "verify_cell")
        except (OSError, BrokerError, RequestRefused) as error:
            if time.monotonic() - heard > SILENT:
                return _silent(f"it answers no more: {error}")
        else:
            heard = time.monotonic()
            if not found["running"]:
                return found
        time.sleep(POLL)


def _outcome(status: Mapping[str, Any], proofs: Mapping[str, Mapping[str, Any]], gone: Sequence[str]) -> Outcome:
    """Return everything that was found, and 0 only if all copies were proved."""
    findings, unproved = [], list(gone)
    lines = []
    for name, proof in proofs.items():
        if proof["trouble"]:
            unproved.append(f"broker {name}: {proof['trouble']}")
        if copy := proof["copy"]:
            findings += [f"broker {name}: {each}" for each in copy["findings"]]
            lines.append(f"broker {name}: {counted(copy['files'], 'file')}, {counted(copy['bytes'], 'byte')} proved")
        for other, what in proof.get("brokers", {}).items():
            if what == "differs":
                findings.append(f"broker {other} has applied other records than {name} up to {proof['position']}")
            elif what != "same":
                unproved.append(f"broker {other}: {what}")
        for node in (proof["nodes"] or {}).get("nodes", ()):
            findings += [f"NATS node {node['node']}: {each}" for each in node["findings"]]
            if node["note"]:
                unproved.append(f"NATS node {node['node']}: {node['note']}")
            lines.append(f"NATS node {node['node']}: {counted(node['records'], 'record')} compared")
    compared = {name for proof in proofs.values() for name in proof.get("brokers", {})}
    unheard = [name for name, proof in proofs.items() if name not in compared and not proof["trouble"]]
    unproved += [f"broker {name}: not compared: no other broker has heard it" for name in unheard]
    if not any(proof["nodes"] for proof in proofs.values()):
        unproved.append("the NATS nodes were not compared")
    is_whole = not findings and not unproved
    lines += [f"damaged: {each}" for each in findings] + [f"not proved: {each}" for each in unproved]
    verdict = f"has {counted(len(findings), 'finding')}" if findings else "is not proved whole"
    lines.append(f"cell {status['cell']} {'is whole: all copies have the same chain' if is_whole else verdict}")
    data = {"cell": status["cell"], "whole": is_whole, "findings": findings, "unproved": unproved, "proofs": proofs}
    return Outcome(data, "\n".join(lines), 0 if is_whole else REFUSED)


def _repair_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="of a broker or a NATS node, as qb cluster status shows it")
    parser.add_argument(
        "--directory",
        type=Path,
        metavar="DIR",
        help="its data directory, or its store_dir: set it aside, once it is stopped",
    )


def _repair(args: argparse.Namespace) -> Outcome:
    status = best(args)
    found = plan(status, args.name) if status["engine"] != "local" else None
    if found is None:
        raise CommandFailed(f"there is no broker and no NATS node {args.name!r}; see: qb cluster status")
    if found.refusals:
        raise CommandFailed("\n".join([f"{args.name} cannot be repaired now:", *found.refusals]))
    if args.directory is not None:
        return _set_aside(found, args.directory)
    steps = [f"{number}. {step}" for number, step in enumerate(found.steps, 1)]
    return Outcome({**found._asdict(), "set_aside": None}, "\n".join([f"{args.name} can be repaired now:", *steps]))


def _set_aside(found: RepairPlan, directory: Path) -> Outcome:
    """Rename a directory that no process uses. Raises CommandFailed."""
    if not found.is_stopped:
        raise CommandFailed(f"{found.name} still answers: stop it first, and wait until qb cluster status shows that")
    mark, what = (
        ("checkpoint", "the copy of a broker") if found.kind == "broker" else ("jetstream", "the store_dir of NATS")
    )
    if not (directory / mark).exists():
        raise CommandFailed(f"{directory} is not {what}: there is no {mark} in it")
    if found.kind == "broker":
        _check_unlocked(directory)
    number = 1
    while (aside := directory.with_name(f"{directory.name}.aside-{number}")).exists():
        number += 1
    try:
        directory.rename(aside)
    except OSError as error:
        raise CommandFailed(f"{directory} cannot be renamed: {error.strerror or error}") from None
    data = {**found._asdict(), "set_aside": str(aside)}
    return Outcome(data, f"{directory} is {aside} now; start {found.name} again, and it takes everything anew")


def _check_unlocked(directory: Path) -> None:
    from qb.storage.directory_lock import DirectoryLock  # here, because no other command needs files
    from qb.storage.files import CannotOpen

    try:
        DirectoryLock(directory).close()
    except CannotOpen as error:
        raise CommandFailed(str(error)) from None


COMMANDS = (
    Command(
        "cluster verify",
        "prove that all brokers and NATS nodes have the same chain",
        "cluster verify",
        no_arguments,
        _verify,
    ),
    Command(
        "cluster repair",
        "say how a damaged copy is repaired, and set it aside",
        "cluster repair nats-2 --directory /var/lib/nats",
        _repair_arguments,
        _repair,
    ),
)
