"""Publish one message, or a stream of them, one a line."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from io import BufferedReader

from qb.cli.terminal.command import (
    INTERRUPTED,
    REFUSED,
    Command,
    CommandFailed,
    Outcome,
    UsageError,
    broker,
    counted,
    of_kind,
    reason,
)
from qb.cli.terminal.input_lines import open_source, portions, size_of
from qb.cli.terminal.progress import Advance, progress
from qb.clients.blocking.client import BrokerClient
from qb.clients.protocol.client_errors import PublishFailed, QBError
from qb.core.wire.frames import RESERVED
from qb.core.wire.value_kinds import INTEGER

TAKEN = RESERVED | {"data", "self", "timestamp_ms", "properties"}  # by the broker, and by the parameters of publish()


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("topic", metavar="TOPIC")
    parser.add_argument("message", metavar="MESSAGE", nargs="?", help="without it: one message a line, from FILE")
    parser.add_argument("--file", metavar="FILE", help="file to read messages from; - is standard input (the default)")
    parser.add_argument("--key", help="messages of one key stay in order in one partition")
    parser.add_argument("--partition", metavar="N", type=of_kind(INTEGER.within(0)), help="store in this partition")
    parser.add_argument(
        "--properties", metavar="JSON", type=_parse_properties, default={}, help='such as \'{"source": "web"}\''
    )


def _parse_properties(text: str) -> dict[str, str]:
    """Return the object's members: text as it is, anything else as its JSON."""
    try:
        members = json.loads(text)
    except (ValueError, RecursionError):
        members = None
    if not isinstance(members, dict):
        raise argparse.ArgumentTypeError(f'must be a JSON object such as \'{{"source": "web"}}\', not {text!r}')
    if taken := TAKEN & members.keys():
        raise argparse.ArgumentTypeError(f"the name {min(taken)!r} has a meaning of its own")
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in members.items()}


def _publish(args: argparse.Namespace) -> Outcome:
    if args.message is None:
        return _publish_lines(args)
    if args.file is not None:
        raise UsageError("give either a MESSAGE or --file, not both")
    return _publish_one(args)


def _publish_one(args: argparse.Namespace) -> Outcome:
    body = os.fsencode(args.message)  # the bytes that were typed, valid text or not
    with broker(args) as client:
        receipt = client.publish(args.topic, body, args.partition, args.key, **args.properties)
    where = f"{receipt.topic}/{receipt.partition} at offset {receipt.offset}"
    return Outcome(receipt._asdict(), f"stored in {where} ({receipt.durability})")


# --- many: one message a line ---


class _Tally:
    """What is known to be stored."""

    def __init__(self) -> None:
        self.messages = 0
        self.bytes = 0  # of bodies

    def add(self, bodies: list[bytes]) -> None:
        self.messages += len(bodies)
        self.bytes += sum(map(len, bodies))


def _publish_lines(args: argparse.Namespace) -> Outcome:
    tally = _Tally()
    started = time.perf_counter()
    with open_source(args.file) as source, broker(args) as client, progress(size_of(source)) as advance:
        try:
            _pump(source, client, args, tally, advance)
        except (QBError, CommandFailed, OSError, KeyboardInterrupt) as error:
            raise _incomplete(error, tally.messages) from error
    seconds = time.perf_counter() - started
    data = {"topic": args.topic, "messages": tally.messages, "bytes": tally.bytes, "seconds": round(seconds, 6)}
    if not sys.stdout.isatty():
        return Outcome(data, "")
    stored = f"stored {counted(tally.messages, 'message')} in topic '{args.topic}'"
    return Outcome(data, f"{stored}, {tally.messages / seconds:,.0f} a second")


def _pump(
    source: BufferedReader, client: BrokerClient, args: argparse.Namespace, tally: _Tally, advance: Advance
) -> None:
    """Publish every line of the source, counting what the broker has acked."""
    for lines in portions(source):
        client.publish_many(args.topic, lines, args.partition, args.key, args.properties)
        tally.add(lines)
        advance(tally.messages, tally.bytes + tally.messages)  # newlines count as done too


def _incomplete(error: BaseException, before: int) -> CommandFailed:
    """Return a failure that says what went wrong and how far it got."""
    stored, line = before, before + 1
    if isinstance(error, PublishFailed):
        stored, line = before + len(error.stored), before + error.index + 1
        error = error.__cause__ or error  # its own text counts bodies of this portion alone
    known = f"known to be stored: {counted(stored, 'message')}; the first that is not: line {line:,}"
    exit_code = INTERRUPTED if isinstance(error, KeyboardInterrupt) else REFUSED
    return CommandFailed(f"{reason(error)}\n{known}", exit_code)


COMMANDS = (
    Command(
        "publish",
        "store a message, or one a line from a file or standard input",
        """publish orders '{"id": 7}' --key customer-42""",
        _arguments,
        _publish,
    ),
)
