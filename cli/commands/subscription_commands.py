"""Make, look at and move subscriptions, and deal with their dead letters."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from qb.cli.terminal.command import Command, Outcome, broker, counted, of_kind
from qb.core.wire.value_kinds import INTEGER, SECONDS
from qb.core.wire.whole_numbers import whole_number

POSITION = "an offset, earliest, latest, or a time such as 2026-01-31T12:00:00Z"


def position(text: str) -> int | str:
    """Return a position in a topic as the broker takes it, which knows words and times."""
    number = whole_number(text)
    return text if number is None else number


def _subscription(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("subscription", metavar="SUBSCRIPTION")


def _create_arguments(parser: argparse.ArgumentParser) -> None:
    _subscription(parser)
    parser.add_argument("topic", metavar="TOPIC")
    parser.add_argument(
        "--offset", metavar="POSITION", type=position, default=0, help=f"where to begin: {POSITION} (0)"
    )
    parser.add_argument("--mode", choices=["shared", "key_shared", "exclusive", "failover"], help="(shared)")
    parser.add_argument(
        "--ack-deadline", metavar="SECONDS", type=of_kind(SECONDS), help="redeliver what is not acked by then (30)"
    )
    parser.add_argument(
        "--max-in-flight", metavar="N", type=of_kind(INTEGER.within(1)), help="of each subscriber (1000)"
    )
    parser.add_argument(
        "--max-deliveries", metavar="N", type=of_kind(INTEGER.within(0)), help="failures until the dead letter (16)"
    )
    parser.add_argument("--dead-letter-topic", metavar="TOPIC", help="(SUBSCRIPTION.dead-letters)")


def _create(args: argparse.Namespace) -> Outcome:
    names = ("mode", "ack_deadline", "max_in_flight", "max_deliveries", "dead_letter_topic")
    options = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    with broker(args) as client:
        made = client.create_subscription(args.subscription, args.topic, args.offset, **options)
    return Outcome(made, f"created subscription '{args.subscription}' on topic '{args.topic}'")


def _delete(args: argparse.Namespace) -> Outcome:
    with broker(args) as client:
        client.delete_subscription(args.subscription)
    return Outcome({"subscription_id": args.subscription, "deleted": True}, f"deleted '{args.subscription}'")


def _list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--topic", metavar="TOPIC", help="only those of this topic")


def _list(args: argparse.Namespace) -> Outcome:
    with broker(args) as client:
        subscriptions = client.list_subscriptions(args.topic)
    rows = [{**row, **row.pop("options")} for row in map(dict, subscriptions)]
    columns = ("subscription_id", "topic", "mode", "paused", "subscribers", "ack_deadline", "created_ms")
    shown = [{name: row[name] for name in columns} for row in rows]
    return Outcome(shown, None if shown else "no subscriptions; create one with: qb create-subscription NAME TOPIC")


def _describe(args: argparse.Namespace) -> Outcome:
    with broker(args) as client:
        described = client.describe_subscription(args.subscription)
    options = described.pop("options")
    return Outcome({**described, **{name: value for name, value in options.items() if value is not None}})


def _seek_arguments(parser: argparse.ArgumentParser) -> None:
    _subscription(parser)
    parser.add_argument("to", metavar="POSITION", type=position, help=POSITION)
    parser.add_argument("--partition", metavar="N", type=of_kind(INTEGER.within(0)), help="only this one (all)")


def _seek(args: argparse.Namespace) -> Outcome:
    with broker(args) as client:
        moved = client.seek(args.subscription, args.to, args.partition)
    return Outcome(moved, f"'{args.subscription}' goes on from {args.to}")


def _changing(method: str, said: str) -> Callable[[argparse.Namespace], Outcome]:
    def run(args: argparse.Namespace) -> Outcome:
        with broker(args) as client:
            changed: Any = getattr(client, method)(args.subscription)
        return Outcome(changed, f"'{args.subscription}' {said}")

    return run


def _fork_arguments(parser: argparse.ArgumentParser) -> None:
    _subscription(parser)
    parser.add_argument("new", metavar="NEW", help="the name of the new one")


def _fork(args: argparse.Namespace) -> Outcome:
    with broker(args) as client:
        made = client.fork(args.subscription, args.new)
    return Outcome(made, f"'{args.new}' stands where '{args.subscription}' stands")


def _explain_arguments(parser: argparse.ArgumentParser) -> None:
    _subscription(parser)
    parser.add_argument("offset", metavar="OFFSET", type=of_kind(INTEGER.within(0)))
    parser.add_argument("--partition", metavar="N", type=of_kind(INTEGER.within(0)), default=0, help="(0)")


def _explain(args: argparse.Namespace) -> Outcome:
    with broker(args) as client:
        text = client.explain(args.subscription, args.offset, args.partition)
    return Outcome({"text": text}, text)


def _letters_arguments(parser: argparse.ArgumentParser) -> None:
    _subscription(parser)
    parser.add_argument("--max", metavar="N", type=of_kind(INTEGER.within(1, 10_000)), default=100, help="(100)")


def _letters(args: argparse.Namespace) -> Outcome:
    with broker(args) as client:
        letters = client.dead_letters(args.subscription, args.max)
    return Outcome(letters, None if letters else f"'{args.subscription}' has no dead letters")


def _choose_arguments(parser: argparse.ArgumentParser) -> None:
    _subscription(parser)
    numbers = of_kind(INTEGER.within(0))
    parser.add_argument("numbers", metavar="NUMBER", type=numbers, nargs="*", help="which, as listed (all)")


def _retry(args: argparse.Namespace) -> Outcome:
    with broker(args) as client:
        count = client.retry_dead_letters(args.subscription, args.numbers or None)
    return Outcome({"retried": count}, f"{counted(count, 'message')} will be delivered again")


def _purge(args: argparse.Namespace) -> Outcome:
    with broker(args) as client:
        count = client.purge_dead_letters(args.subscription, args.numbers or None)
    return Outcome({"purged": count}, f"{counted(count, 'dead letter')} purged")


COMMANDS = (
    Command(
        "create-subscription",
        "make a subscription",
        "create-subscription till orders --offset latest",
        _create_arguments,
        _create,
    ),
    Command("delete-subscription", "delete a subscription", "delete-subscription till", _subscription, _delete),
    Command(
        "list-subscriptions", "list the subscriptions", "list-subscriptions --topic orders", _list_arguments, _list
    ),
    Command(
        "describe-subscription",
        "show lag, subscribers and what is in flight",
        "describe-subscription till",
        _subscription,
        _describe,
    ),
    Command(
        "seek",
        "begin a subscription anew at an offset or a time",
        "seek till 2026-01-31T12:00:00Z",
        _seek_arguments,
        _seek,
    ),
    Command("pause", "stop deliveries of a subscription", "pause till", _subscription, _changing("pause", "is paused")),
    Command("resume", "deliver again", "resume till", _subscription, _changing("resume", "delivers again")),
    Command(
        "fork", "make a subscription that stands where another stands", "fork till till-canary", _fork_arguments, _fork
    ),
    Command("explain", "say why a message is where it is", "explain till 4711", _explain_arguments, _explain),
    Command(
        "dead-letters list",
        "list the messages that were given up",
        "dead-letters list till",
        _letters_arguments,
        _letters,
    ),
    Command(
        "dead-letters retry",
        "deliver them again, to this subscription alone",
        "dead-letters retry till 3 4",
        _choose_arguments,
        _retry,
    ),
    Command("dead-letters purge", "forget them", "dead-letters purge till", _choose_arguments, _purge),
)
