"""Make, delete, list and describe topics."""

from __future__ import annotations

import argparse
import re

from qb.cli.terminal.command import Command, Outcome, broker, counted, no_arguments, of_kind
from qb.core.wire.value_kinds import INTEGER, SIZE, Kind

_HOURS_IN = {"d": 24.0, "h": 1.0, "m": 1 / 60, "": 1.0}


def parse_retention(text: str) -> float:
    """Return the hours meant by `168`, `7d`, `12h` or `30m`. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([dhm]?)", text.strip().lower())
    if match is None:
        raise ValueError(text)
    return float(match[1]) * _HOURS_IN[match[2]]


RETENTION = Kind("hours, or a time such as 7d, 12h or 30m", parse_retention)


def _topic(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("topic", metavar="TOPIC")


def _create_arguments(parser: argparse.ArgumentParser) -> None:
    _topic(parser)
    parser.add_argument("--partitions", metavar="N", type=of_kind(INTEGER.within(1)), default=1, help="how many (1)")
    parser.add_argument(
        "--retention",
        metavar="TIME",
        type=of_kind(RETENTION),
        help="drop messages older than this: hours, or 7d, 12h, 30m; 0: never (as the broker is set)",
    )
    parser.add_argument(
        "--retention-bytes",
        metavar="SIZE",
        type=of_kind(SIZE),
        help="drop the oldest messages of a larger partition, such as 10GiB; 0: never (as the broker is set)",
    )


def _create(args: argparse.Namespace) -> Outcome:
    with broker(args) as client:
        topic = client.create_topic(args.topic, args.partitions, args.retention, args.retention_bytes)
    return Outcome(topic, f"created topic '{args.topic}' with {counted(args.partitions, 'partition')}")


def _delete_arguments(parser: argparse.ArgumentParser) -> None:
    _topic(parser)
    parser.add_argument("--if-unused", action="store_true", help="refuse while it has subscriptions")


def _delete(args: argparse.Namespace) -> Outcome:
    with broker(args) as client:
        client.delete_topic(args.topic, if_unused=args.if_unused)
    return Outcome({"topic": args.topic, "deleted": True}, f"deleted topic '{args.topic}'")


def _list(args: argparse.Namespace) -> Outcome:
    with broker(args) as client:
        topics = client.list_topics()
    return Outcome(topics, None if topics else "no topics yet; create one with: qb create-topic NAME")


def _describe(args: argparse.Namespace) -> Outcome:
    with broker(args) as client:
        return Outcome(client.describe_topic(args.topic))


COMMANDS = (
    Command(
        "create-topic", "make a topic", "create-topic orders --partitions 4 --retention 7d", _create_arguments, _create
    ),
    Command("delete-topic", "delete a topic and its messages", "delete-topic orders", _delete_arguments, _delete),
    Command("list-topics", "list the topics", "list-topics", no_arguments, _list),
    Command("describe-topic", "show a topic and its partitions", "describe-topic orders", _topic, _describe),
)
