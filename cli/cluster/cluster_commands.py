"""How a cluster of brokers is, and giving its cell to another one."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from typing import Any

from qb.cli.cluster.cell_questions import addresses, ask, best
from qb.cli.terminal.command import Command, CommandFailed, Outcome, no_arguments
from qb.clients.credentials import Credentials
from qb.core.wire.addresses import like

MOVED_WITHIN = 30.0  # seconds for another broker to own the cell
POLL = 0.02  # seconds between two questions meanwhile


def _status(args: argparse.Namespace) -> Outcome:
    found = best(args)
    if found["engine"] == "local":
        return Outcome(found, "one broker, without a cluster: its data is on its own disk alone")
    return Outcome(found, _in_words(found), 0 if found["owner"] else 1)


def _in_words(found: Mapping[str, Any]) -> str:
    lines = [f"cell {found['cell']}, epoch {found['epoch']}, owner {found['owner'] or 'none just now'}", ""]
    lines += [f"JOURNAL_LOST, says broker {found['broker']}: {found['lost']}", ""] if found["lost"] else []
    rows: list[tuple[str, ...]] = [("BROKER", "ROLE", "ADDRESS", "APPLIED", "LAG", "SILENT")]
    for each in found["brokers"]:
        lag = "?" if each["lag"] is None else str(each["lag"])
        silent = f"{each['silent_for']:g} s" if each["silent_for"] > 3 else "-"
        rows.append((each["name"], each["role"], each["address"], str(each["applied"]), lag, silent))
    lines += _aligned(rows)
    journal = found["journal"]
    nodes: list[tuple[str, ...]] = [("NATS NODE", "ROLE", "STATE", "LAG", "MISSING", "DAMAGED")]
    for each in journal["nodes"]:
        counts = (str(each[what]) for what in ("lag", "missing", "damaged"))
        nodes.append((each["name"], each["role"], each["state"], *counts))
    troubles = [f"NATS node {each['name']} {each['why']}" for each in journal["nodes"] if each["why"]]
    return "\n".join([*lines, "", *_aligned(nodes), "", *troubles, *journal["notes"], found["verdict"]])


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _move_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--to", metavar="BROKER", help="the name of the broker that shall own it (any other)")


def _move(args: argparse.Namespace) -> Outcome:
    before = best(args)
    began = time.monotonic()
    owner = next((each["address"] for each in before["brokers"] if each["name"] == before["owner"]), None)
    if owner is None:
        raise CommandFailed("no broker owns the cell just now; see: qb cluster status")
    ask(like(addresses(args)[0], owner), Credentials(**args.credentials), "move_cell", to=args.to)
    while time.monotonic() < began + MOVED_WITHIN:
        try:
            now = best(args)
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
