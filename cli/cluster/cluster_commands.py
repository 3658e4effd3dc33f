"""How a cluster of brokers is, and giving its cell to another one."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from typing import Any

from qb.cli.cluster.cell_questions import ask, verdict
from qb.cli.terminal.command import Command, CommandFailed, Outcome, no_arguments
from qb.clients.credentials import Credentials
from qb.clients.protocol.client_errors import RequestRefused
from qb.core.wire.addresses import BrokerAddress, like, parse_address
from qb.core.wire.errors import BrokerError

MOVED_WITHIN = 30.0  # seconds for another broker to own the cell
POLL = 0.02  # seconds between two questions meanwhile


def _addresses(args: argparse.Namespace) -> Sequence[BrokerAddress]:
    return [parse_address(each) for each in args.servers] or [parse_address(args.host, args.port)]


def _best(args: argparse.Namespace) -> dict[str, Any]:
    """Return the answer of the broker that knows the newest epoch, and an owner. Raises CommandFailed."""
    answers, troubles = [], []
    for address in _addresses(args):
        try:
            answers.append(ask(address, Credentials(**args.credentials)))
        except (OSError, BrokerError, RequestRefused) as error:
            troubles.append(f"{address}: {error}")
    if not answers:
        raise CommandFailed("no broker answers\n" + "\n".join(troubles))
    return max(answers, key=lambda each: (each.get("epoch", 0), each.get("owner") is not None))


def _status(args: argparse.Namespace) -> Outcome:
    found = _best(args)
    if found["engine"] == "local":
        return Outcome(found, "one broker, without a cluster: its data is on its own disk alone")
    found["verdict"] = verdict(found)
    return Outcome(found, _in_words(found), 0 if found["owner"] else 1)


def _in_words(found: Mapping[str, Any]) -> str:
    lines = [f"cell {found['cell']}, epoch {found['epoch']}, owner {found['owner'] or 'none just now'}", ""]
    rows: list[tuple[str, ...]] = [("BROKER", "ROLE", "ADDRESS", "APPLIED", "LAG", "SILENT")]
    for each in found["brokers"]:
        lag = "?" if each["lag"] is None else str(each["lag"])
        silent = f"{each['silent_for']:g} s" if each["silent_for"] > 3 else "-"
        rows.append((each["name"], each["role"], each["address"], str(each["applied"]), lag, silent))
    lines += _aligned(rows)
    nodes: list[tuple[str, ...]] = [("NATS NODE", "ROLE", "CURRENT", "LAG")]
    nodes += [
        (each["name"], each["role"], "yes" if each["current"] else "no", str(each["lag"]))
        for each in found["journal"]["nodes"]
    ]
    return "\n".join([*lines, "", *_aligned(nodes), "", found["verdict"]])


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _move_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--to", metavar="BROKER", help="the name of the broker that shall own it (any other)")


def _move(args: argparse.Namespace) -> Outcome:
    before = _best(args)
    began = time.monotonic()
    owner = next((each["address"] for each in before["brokers"] if each["name"] == before["owner"]), None)
    if owner is None:
        raise CommandFailed("no broker owns the cell just now; see: qb cluster status")
    ask(like(_addresses(args)[0], owner), Credentials(**args.credentials), "move_cell", to=args.to)
    while time.monotonic() < began + MOVED_WITHIN:
        try:
            now = _best(args)
        except CommandFailed:
            continue
        if now["owner"] and now["epoch"] > before["epoch"]:
            took = round(time.monotonic() - began, 3)
            data = {"owner": now["owner"], "before": before["owner"], "epoch": now["epoch"], "seconds": took}
            return Outcome(data, f"{now['owner']} owns the cell now (before: {before['owner']}), after {took:g} s")
        time.sleep(POLL)
    raise CommandFailed(f"no other broker owns the cell after {MOVED_WITHIN:g} s; see: qb cluster status")


COMMANDS = (
    Command("cluster status", "show brokers, owner, lag and the journal", "cluster status", no_arguments, _status),
    Command("cluster move", "give the cell to another broker", "cluster move --to broker-2", _move_arguments, _move),
)
