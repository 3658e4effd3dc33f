"""Look at transactions that are under way."""

from __future__ import annotations

import argparse

from qb.cli.command import Command, Outcome, broker, counted, no_arguments


def _list(args: argparse.Namespace) -> Outcome:
    with broker(args) as client:
        listed = client.list_transactions()
    if listed["stages"] or listed["committing"]:
        return Outcome(listed)
    return Outcome(listed, f"nothing is staged; {counted(listed['committed'], 'committed transaction')} remembered")


COMMANDS = (
    Command(
        "list-transactions",
        "list what is staged and what is being committed",
        "list-transactions",
        no_arguments,
        _list,
    ),
)
