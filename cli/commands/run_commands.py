"""One program for all roles: a broker, a producer or a consumer, as its file says."""

from __future__ import annotations

import argparse

from qb.cli.commands import consume_commands, produce_commands
from qb.cli.terminal.command import Command, Outcome, of_kind
from qb.core.settings.program_table import ADDRESS
from qb.core.wire.addresses import parse_address

COMMAND_OF = {"producer": produce_commands.COMMANDS, "consumer": consume_commands.COMMANDS}


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mode", choices=["broker", *COMMAND_OF], required=True)
    parser.add_argument("--config", metavar="FILE", required=True, help="YAML file with what the mode needs")
    parser.add_argument(
        "--broker", metavar="ADDRESS", type=of_kind(ADDRESS), help="where the broker is; as a broker, where to listen"
    )


def _run(args: argparse.Namespace) -> Outcome:
    if args.mode == "broker":
        return _run_broker(args)
    (command,) = COMMAND_OF[args.mode]
    parser = argparse.ArgumentParser()
    command.arguments(parser)
    address = ["--broker", args.broker] if args.broker else []
    return command.run(parser.parse_args(["--config", args.config, *address], args))


def _run_broker(args: argparse.Namespace) -> Outcome:
    from qb.server import main  # here, because no other command needs a server

    flags = ["--config", args.config]
    if args.broker is not None:
        address = parse_address(args.broker)
        flags += ["--host", address.host, "--port", str(address.port)]
    return Outcome(None, exit_code=main(flags))


COMMANDS = (
    Command(
        "run",
        "be a broker, a producer or a consumer, as a YAML file says",
        "run --mode consumer --config config/consumer.yaml --broker host:9999",
        _arguments,
        _run,
    ),
)
