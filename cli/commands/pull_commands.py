"""Look at stored messages, and at the offsets that topics hold."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from qb.cli.terminal.command import Command, Outcome, broker, of_kind
from qb.cli.terminal.message_output import as_data, show_message
from qb.clients.blocking.client import BrokerClient
from qb.clients.protocol.message import Message
from qb.core.wire.value_kinds import INTEGER, SECONDS, Kind
from qb.core.wire.whole_numbers import whole_number


def parse_offset(text: str) -> int:
    """Return an offset as FETCH takes it. Raises ValueError."""
    return {"earliest": -2, "latest": -1}[text] if text in WORDS else _parse_number(text)


def _parse_number(text: str) -> int:
    number = whole_number(text)
    if number is None:
        raise ValueError(text)
    return number


WORDS = ("earliest", "latest")
OFFSET = Kind("an offset, earliest or latest", parse_offset)
START = Kind(OFFSET.noun, lambda text: text if text in WORDS else _parse_number(text)).within(0)


def _fetch_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("topic", metavar="TOPIC")
    parser.add_argument("--partition", metavar="N", type=of_kind(INTEGER.within(0)), default=0, help="(0)")
    parser.add_argument(
        "--offset", metavar="OFFSET", type=of_kind(OFFSET.within(-2)), default=-2, help=f"{OFFSET.noun} (earliest)"
    )
    parser.add_argument(
        "--max", metavar="N", type=of_kind(INTEGER.within(1)), default=100, help="at most so many (100)"
    )
    parser.add_argument(
        "--wait", metavar="SECONDS", type=of_kind(SECONDS.within(0)), default=0.0, help="for the first one (0)"
    )


def _fetch(args: argparse.Namespace) -> Outcome:
    with broker(args) as client:
        messages = list(_fetched(client, args))
    if args.json:
        return Outcome([as_data(message) for message in messages])
    for message in messages:
        show_message(message, as_json=False, raw=args.raw)
    return Outcome(None)


def _fetched(client: BrokerClient, args: argparse.Namespace) -> Iterator[Message]:
    """Yield as many messages as are wanted and there: one answer may hold fewer."""
    offset, wait, left = args.offset, args.wait, args.max
    while left and (portion := client.fetch(args.topic, args.partition, offset, left, max_wait=wait)):
        yield from portion
        offset, wait, left = portion.next_offset, 0.0, left - len(portion)


def _offsets_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("topic", metavar="TOPIC")


def _offsets(args: argparse.Namespace) -> Outcome:
    with broker(args) as client:
        partitions = range(client.describe_topic(args.topic)["partitions"])
        return Outcome([{"partition": number} | client.offsets(args.topic, number)._asdict() for number in partitions])


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("topic", metavar="TOPIC")
    parser.add_argument("partitions", metavar="N", type=of_kind(INTEGER.within(1)), help="how many it shall have")


def _add_partitions(args: argparse.Namespace) -> Outcome:
    with broker(args) as client:
        topic = client.add_partitions(args.topic, args.partitions)
    return Outcome(topic, f"topic '{args.topic}' has {args.partitions} partitions now; keys may have moved")


COMMANDS = (
    Command(
        "fetch",
        "print stored messages of a partition",
        "fetch orders --partition 1 --offset 100 --max 10",
        _fetch_arguments,
        _fetch,
    ),
)
TOPIC_COMMANDS = (
    Command("offsets", "show the offsets that a topic holds", "offsets orders", _offsets_arguments, _offsets),
    Command(
        "add-partitions", "give a topic more partitions", "add-partitions orders 8", _add_arguments, _add_partitions
    ),
)
