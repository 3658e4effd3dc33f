"""Look at transactions that are under way, and end those that cannot be finished."""

from __future__ import annotations

import argparse
from typing import Any

from qb.cli.terminal.command import Command, Outcome, broker, counted, no_arguments
from qb.clients.protocol.staged_messages import TransactionReceipt


def _transaction(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("transaction", help="its id")


def _abandon_arguments(parser: argparse.ArgumentParser) -> None:
    _transaction(parser)
    parser.add_argument("--yes", action="store_true", help="give it up; without this, only show what would be lost")


def _list(args: argparse.Namespace) -> Outcome:
    with broker(args) as client:
        listed = client.list_transactions()
    if listed["stages"] or listed["committing"]:
        return Outcome(listed)
    return Outcome(listed, f"nothing is staged; {counted(listed['committed'], 'committed transaction')} remembered")


def _show(args: argparse.Namespace) -> Outcome:
    with broker(args) as client:
        shown = client.show_transaction(args.transaction)
    return Outcome(shown, _in_words(shown))


def _finish(args: argparse.Namespace) -> Outcome:
    with broker(args) as client:
        receipt = client.finish_transaction(args.transaction)
    return Outcome(_as_data(receipt), f"{args.transaction} is finished: {counted(receipt.messages, 'message')}")


def _abandon(args: argparse.Namespace) -> Outcome:
    with broker(args) as client:
        if not args.yes:
            shown = client.show_transaction(args.transaction)
            return Outcome(shown, f"{_in_words(shown)}\nnothing was done: to give it up, add --yes", 1)
        receipt = client.abandon_transaction(args.transaction)
    text = f"{args.transaction} is abandoned: {counted(receipt.messages, 'message')} of it can be seen"
    return Outcome(_as_data(receipt), text)


def _as_data(receipt: TransactionReceipt) -> dict[str, Any]:
    return {**receipt._asdict(), "partitions": [share._asdict() for share in receipt.partitions]}


def _in_words(shown: dict[str, Any]) -> str:
    """Return a transaction as lines for people."""
    lines = [f"{shown['transaction']}: {shown['state']}"]
    lines += [f"  stage {each['stage']}: {counted(each['messages'], 'message')}" for each in shown["stages"]]
    if unfinished := shown["unfinished"]:
        lines += [f"  {unfinished['reason']}"] if unfinished["reason"] else []
        for each in unfinished["partitions"]:
            copied = f"{each['copied']} of {counted(each['messages'], 'message')} copied"
            lines.append(f"  {each['topic']}/{each['partition']}: {copied}")
    for each in (shown["receipt"] or {}).get("partitions", ()):
        offsets = f"offsets {each['first_offset']} to {each['last_offset']}"
        lines.append(f"  {each['topic']}/{each['partition']}: {counted(each['messages'], 'message')}, {offsets}")
    return "\n".join(lines)


LISTS = "list what is staged and what is being committed"
COMMANDS = (
    Command("transactions list", LISTS, "transactions list", no_arguments, _list),
    Command("transactions show", "show one transaction", "transactions show nightly", _transaction, _show),
    Command(
        "transactions finish",
        "try at once to finish a transaction that is committed and not visible",
        "transactions finish nightly",
        _transaction,
        _finish,
    ),
    Command(
        "transactions abandon",
        "give up a committed transaction that cannot be finished",
        "transactions abandon nightly --yes",
        _abandon_arguments,
        _abandon,
    ),
    Command("list-transactions", "the same as transactions list", "list-transactions", no_arguments, _list),
)
