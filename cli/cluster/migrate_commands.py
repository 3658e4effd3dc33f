"""Bring a data directory into a cluster's journal, and back."""

from __future__ import annotations

import argparse
import os

from qb.cli.terminal.command import Command, CommandFailed, Outcome, UsageError, counted, of_kind, reason
from qb.core.settings import Settings, SettingsError, load
from qb.core.wire.value_kinds import INTEGER, WORD

NATS = ("nats://", "tls://")


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--from", dest="source", required=True, metavar="WHERE", help="a data directory, or nats://host:4222,…"
    )
    parser.add_argument("--to", dest="target", required=True, metavar="WHERE", help="the other kind of place")
    parser.add_argument("--cell", type=of_kind(WORD), help="the cell whose journal it is (QB_CELL, or main)")
    parser.add_argument(
        "--replicas",
        type=of_kind(INTEGER.within(1)),
        metavar="N",
        help="copies that NATS keeps (QB_NATS_REPLICAS, or 3)",
    )


def _settings(args: argparse.Namespace, servers: str, data_dir: str) -> Settings:
    """Return the settings of a broker with this directory and this journal; logins to NATS are in the environment."""
    flags = ["--nats-servers", servers, "--data-dir", data_dir, "--storage-engine", "jetstream"]
    flags += ["--cell", args.cell] if args.cell else []
    flags += ["--nats-replicas", str(args.replicas)] if args.replicas else []
    try:
        return load(flags, os.environ).settings
    except SettingsError as error:
        raise UsageError(str(error)) from None


def _migrate(args: argparse.Namespace) -> Outcome:
    import trio  # here, with all that follows, because no other command needs NATS

    from qb.cluster.migration import migrate_to_directory, migrate_to_journal
    from qb.replication.journal.journal_store import JournalError
    from qb.replication.nats.nats_protocol import NatsError
    from qb.storage.files import CannotOpen

    is_journal = [where.startswith(NATS) for where in (args.source, args.target)]
    if sum(is_journal) != 1:
        raise UsageError("one of --from and --to is a data directory, and the other one nats://host:port")
    failures = (CannotOpen, JournalError, NatsError, trio.TooSlowError, OSError)
    try:
        if is_journal[1]:
            migrated = trio.run(migrate_to_journal, _settings(args, args.target, args.source))
        else:
            migrated = trio.run(migrate_to_directory, _settings(args, args.source, args.target))
    except (*failures, ExceptionGroup) as failed:
        error: BaseException = failed
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if not isinstance(error, failures):
            raise
        why = reason(error) if isinstance(error, OSError) else str(error) or "NATS does not answer"
        raise CommandFailed(f"{why}\nnothing of it counts; it can be begun again") from None
    data = {"from": args.source, "to": args.target, **migrated._asdict()}
    what = f"{counted(migrated.messages, 'message')} of {counted(migrated.topics, 'topic')}"
    return Outcome(data, f"migrated {what} from {args.source} to {args.target}; {args.source} is as it was")


COMMANDS = (
    Command(
        "migrate",
        "bring a data directory into the journal of a cluster, or back",
        "migrate --from ./storage/data --to nats://a:4222,nats://b:4222,nats://c:4222",
        _arguments,
        _migrate,
    ),
)
