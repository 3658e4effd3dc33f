"""Look at consumer groups, move and delete them."""

from __future__ import annotations

import argparse

from qb.cli.commands.subscription_commands import POSITION, position
from qb.cli.terminal.command import Command, Outcome, broker, counted, no_arguments, of_kind
from qb.core.wire.value_kinds import INTEGER


def _group(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("group", metavar="GROUP")


def _list(args: argparse.Namespace) -> Outcome:
    with broker(args) as client:
        groups = client.list_groups()
    return Outcome(groups, None if groups else "no groups yet; make one with: qb consume --group NAME --topic T")


def _describe(args: argparse.Namespace) -> Outcome:
    with broker(args) as client:
        return Outcome(client.describe_group(args.group))


def _reset_arguments(parser: argparse.ArgumentParser) -> None:
    _group(parser)
    parser.add_argument("topic", metavar="TOPIC")
    parser.add_argument("--to", metavar="POSITION", type=position, required=True, help=POSITION)
    parser.add_argument("--partition", metavar="N", type=of_kind(INTEGER.within(0)), help="only this one (all)")


def _reset(args: argparse.Namespace) -> Outcome:
    with broker(args) as client:
        return Outcome(client.reset_group(args.group, args.topic, args.to, args.partition))


def _delete(args: argparse.Namespace) -> Outcome:
    with broker(args) as client:
        offsets = len(client.committed_offsets(args.group))
        client.delete_group(args.group)
    what = f"deleted group '{args.group}' and {counted(offsets, 'committed offset')}"
    return Outcome({"group": args.group, "deleted": True}, what)


COMMANDS = (
    Command("groups list", "list the consumer groups", "groups list", no_arguments, _list),
    Command(
        "groups describe", "show members, offsets and lag of a group", "groups describe billing", _group, _describe
    ),
    Command(
        "groups reset",
        "let a group without members go on from elsewhere",
        "groups reset billing orders --to earliest",
        _reset_arguments,
        _reset,
    ),
    Command("groups delete", "forget a group without members", "groups delete billing", _group, _delete),
)
