"""Is the broker there, how fast does it answer, and what is it?"""

from __future__ import annotations

import argparse

from qb.cli.terminal.command import Command, Outcome, broker, no_arguments, of_kind
from qb.core.wire.value_kinds import INTEGER


def _ping_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--count", metavar="N", type=of_kind(INTEGER.within(1)), default=1, help="how often (1)")


def _ping(args: argparse.Namespace) -> Outcome:
    with broker(args) as client:
        times_ms = [round(client.ping() * 1000, 3) for _ in range(args.count)]
        address = f"{client.host}:{client.port}"
    data = {"address": address, "round_trips_ms": times_ms}
    return Outcome(data, "\n".join(f"{address} answered in {time_ms:.3f} ms" for time_ms in times_ms))


def _info(args: argparse.Namespace) -> Outcome:
    with broker(args) as client:
        return Outcome(client.server_info())


COMMANDS = (
    Command("ping", "measure the round trip to the broker", "ping --count 5", _ping_arguments, _ping),
    Command("info", "show the broker's version, uptime and durability", "info", no_arguments, _info),
)
