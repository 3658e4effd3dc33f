"""The table of commands, and what was typed read by it.

A new command is one row in the COMMANDS of its file; a new file is one word in GROUPS.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from qb.cli.cluster import cluster_commands, migrate_commands, repair_commands
from qb.cli.commands import (
    bench_commands,
    consume_commands,
    group_commands,
    health_commands,
    produce_commands,
    publish_commands,
    pull_commands,
    push_commands,
    run_commands,
    subscription_commands,
    tls_commands,
    topic_commands,
    transaction_commands,
    users_commands,
    verify_commands,
)
from qb.cli.terminal.command import Command, UsageError, of_kind
from qb.core.settings.config_file import nearest
from qb.core.wire.value_kinds import INTEGER, NAMES, SECONDS, TEXT
from qb.core.wire.version import __version__

GROUPS: tuple[tuple[str, tuple[Command, ...]], ...] = (
    ("Topics", topic_commands.COMMANDS + pull_commands.TOPIC_COMMANDS),
    ("Messages", publish_commands.COMMANDS + pull_commands.COMMANDS + consume_commands.COMMANDS),
    ("Subscriptions", subscription_commands.COMMANDS + push_commands.COMMANDS),
    ("Programs, configured by a file", produce_commands.COMMANDS + run_commands.COMMANDS),
    ("Consumer groups", group_commands.COMMANDS),
    ("Transactions", transaction_commands.COMMANDS),
    ("The broker", health_commands.COMMANDS + bench_commands.COMMANDS),
    ("A cluster of brokers", cluster_commands.COMMANDS + repair_commands.COMMANDS + migrate_commands.COMMANDS),
    ("Users and rights", users_commands.COMMANDS + tls_commands.COMMANDS),
    ("The data directory", verify_commands.COMMANDS),
)


class UsageAnswer(Exception):
    """A text that answers what was typed, without any command."""


class _Show(argparse.Action):
    """A flag that answers with a text, whatever else was typed."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        raise UsageAnswer(self.const or parser.format_help().rstrip())


class _Parser(argparse.ArgumentParser):
    """argparse that leaves printing and exiting to us, and does not guess at shortened flags."""

    def __init__(self, page: str | None = None, **settings: Any) -> None:
        raw = argparse.RawDescriptionHelpFormatter
        super().__init__(add_help=False, allow_abbrev=False, formatter_class=raw, **settings)
        self.add_argument("-h", "--help", action=_Show, nargs=0, const=page, help="show this page")

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}\nsee: {self.prog} --help")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """A command that is not known is answered with the one that is meant, or with all."""
        if isinstance(action.choices, dict) and value not in action.choices:
            hint = nearest(value, action.choices) or f"; there are {', '.join(action.choices)}"
            self.error(f"there is no command {value!r}{hint}")
        super()._check_value(action, value)


def parse(program: str, argv: Sequence[str]) -> argparse.Namespace:
    """Return what was typed, with the command's `run`. Flags for every command work before and after it.

    Raises UsageError, and Answer for what needs no command.
    """
    page = overview(program)
    parser = _Parser(page, prog=program)
    parser.add_argument("--version", action=_Show, nargs=0, const=f"qb {__version__}")
    _add_common(parser)
    parser.set_defaults(
        run=None, parser=parser, host=None, port=None, servers=(), timeout=None, client_id=None, json=False, raw=False
    )
    nested = {"": parser.add_subparsers(metavar="COMMAND")}
    for _, commands in GROUPS:
        for command in commands:
            _add_command(nested, program, command)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}{_hint_at_flag(unknown[0], args.parser)}")
    if args.run is None:
        raise UsageAnswer(page)
    return args


def _hint_at_flag(typed: str, parser: argparse.ArgumentParser) -> str:
    """Return which flag of the command may be meant, empty if there is none, or if it is a shortened one."""
    flags = re.findall(r"--[a-z][a-z-]*", parser.format_help())
    return "" if any(flag.startswith(typed) for flag in flags) else nearest(typed, flags)


def _add_common(parser: argparse.ArgumentParser) -> None:
    """Add the flags of every command. Without a default, so that a subparser does not undo what came before it."""
    common = parser.add_argument_group("for every command")

    def add(flag: str, help: str, **settings: Any) -> None:
        common.add_argument(flag, default=argparse.SUPPRESS, help=help, **settings)

    add("--host", "the broker's address", type=of_kind(TEXT))
    add("--port", "the broker's port", type=of_kind(INTEGER.within(1, 65535)))
    add("--servers", "brokers of a cluster, with commas between, in place of host and port", type=of_kind(NAMES))
    add("--client-id", "name shown in the broker's logs and tools", metavar="ID")
    add("--timeout", "how long to wait for an answer", type=of_kind(SECONDS.within(0.001)), metavar="SECONDS")
    add("--json", "print one JSON value instead of text", action="store_true")
    add("--raw", "let escape sequences through to a terminal", action="store_true")


def _add_command(nested: dict[str, Any], program: str, command: Command) -> None:
    group, _, name = command.name.rpartition(" ")
    if group not in nested:
        of_group = nested[""].add_parser(group)
        _add_common(of_group)
        nested[group] = of_group.add_subparsers(metavar="COMMAND", required=True)
    example = f"example:\n  {program} {command.example}"
    parser = nested[group].add_parser(name, help=command.help, description=command.help, epilog=example)
    command.arguments(parser)
    _add_common(parser)
    parser.set_defaults(run=command.run, parser=parser)


def overview(program: str) -> str:
    """Return the page that names every command."""
    width = max(len(command.name) for _, commands in GROUPS for command in commands)
    lines = [f"{program}: talk to a QB broker", ""]
    for title, commands in GROUPS:
        lines += [title, *(f"  {command.name.ljust(width)}  {command.help}" for command in commands), ""]
    lines += [
        "For every command, before or after it: --host --port --servers --client-id --timeout --json --raw",
        f"More about one, with an example: {program} publish --help",
    ]
    return "\n".join(lines)
