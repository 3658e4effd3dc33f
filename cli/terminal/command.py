"""What a command of the command line is made of."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from qb.clients.blocking.client import BrokerClient
from qb.clients.protocol.client_errors import without_calls
from qb.core.wire.value_kinds import Kind

REFUSED, MISUSED, INTERRUPTED = 1, 2, 130  # exit codes


class UsageError(Exception):
    """The command was typed wrongly: words for the person who typed it."""


class CommandFailed(Exception):
    """The command could not do what it was asked to: one or two lines that say why, and what was done before."""

    def __init__(self, text: str, exit_code: int = REFUSED) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class Outcome(NamedTuple):
    """What a command found out or did: plain data for scripts and, where data alone would be dull, text for people."""

    data: Any  # what JSON can carry; None without a text: everything was shown as it came
    text: str | None = None  # None: the data is shown as a table; empty: people are shown nothing
    exit_code: int = 0


class Command(NamedTuple):
    """One row of the command line. A name of two words, such as `bench publish`, belongs to a group."""

    name: str
    help: str  # one line, without a full stop
    example: str  # what comes after the program's name
    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], Outcome]


def broker(args: argparse.Namespace) -> BrokerClient:
    """Return the client that the flags for every command describe; `with` connects it."""
    where = {"servers": args.servers} if args.servers else {"host": args.host, "port": args.port}
    return BrokerClient(
        **where,
        client_id=args.client_id,
        request_timeout=args.timeout,
        heartbeat_interval=args.heartbeat_interval,
        **args.credentials,
    )


def of_kind(kind: Kind) -> Callable[[str], Any]:
    """Return an argparse type that reads values of this kind."""

    def parse(text: str) -> Any:
        try:
            return kind.parse(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be {kind.must_be}, not {text!r}") from None

    return parse


def reason(error: BaseException) -> str:
    """Return why something failed, in words for people."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return re.sub(r"the argument (\w+)", _as_flag, without_calls(str(error))) or type(error).__name__


def _as_flag(argument: re.Match[str]) -> str:
    return f"--{argument[1].replace('_', '-')}"


def counted(number: int, noun: str) -> str:
    """Return `1 message` or `2,000 messages`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def no_arguments(parser: argparse.ArgumentParser) -> None:
    """For commands that take none."""
