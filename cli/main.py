"""Carry out what was typed, and show its outcome or why it failed."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from qb.cli.parser import UsageAnswer, parse
from qb.cli.terminal.command import (
    INTERRUPTED,
    MISUSED,
    REFUSED,
    CommandFailed,
    Outcome,
    UsageError,
    reason,
)
from qb.cli.terminal.output import complain, emit, escape_warnings
from qb.clients.protocol.client_errors import QBError
from qb.core.settings import DEBUG, SettingsError, credential_files, load
from qb.core.wire.addresses import parse_address

OUTPUT_CLOSED = 141  # as if SIGPIPE had ended us, like other tools in a pipe


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out one command and return the exit code. Blocks until it is done; never raises."""
    try:
        return _carry_out(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        return _leave_quietly()
    except (UsageError, SettingsError) as error:
        complain(str(error))
        return MISUSED
    except CommandFailed as error:
        complain(str(error))
        return error.exit_code
    except (QBError, OSError) as error:
        complain(reason(error))
        return REFUSED
    except Exception as error:
        return _report_fault(error)


def _carry_out(argv: Sequence[str]) -> int:
    try:
        args = parse("qb" if Path(sys.argv[0]).name == "qb" else "client.py", argv)
    except UsageAnswer as answer:
        return _print(Outcome(None, str(answer)), as_json=False, raw=False)
    escape_warnings()
    settings = load([], os.environ).settings
    if not (args.servers or args.host or args.port):
        args.servers = settings.client.servers
    args.broker_is_given, args.timeout_is_given = bool(args.host or args.port or args.servers), bool(args.timeout)
    if args.host:
        args.host, args.port = _without_port(args.host, args.port)
    args.host = args.host or settings.server.host
    args.port = args.port or settings.server.port
    args.timeout = args.timeout or settings.client.request_timeout
    args.credentials = credential_files(settings.client)
    args.heartbeat_interval = settings.client.heartbeat_interval
    return _print(args.run(args), as_json=args.json, raw=args.raw)


def _without_port(host: str, port: int | None) -> tuple[str, int | None]:
    """Return an address without its port, and the port. Raises UsageError."""
    try:
        address = parse_address(host, port)
    except ValueError as error:
        raise UsageError(reason(error)) from None
    is_bare_ipv6 = "://" not in host and host.count(":") > 1 and not host.startswith("[")
    has_port = "://" in host or (re.search(r":\d+\Z", host) is not None and not is_bare_ipv6)
    where = re.sub(r":\d+/?\Z", "", host) if address.is_secure else address.host
    return where, address.port if has_port else port


def _print(outcome: Outcome, *, as_json: bool, raw: bool) -> int:
    """Show the outcome and return the exit code."""
    emit(outcome, as_json=as_json, raw=raw)
    return outcome.exit_code


def _leave_quietly() -> int:
    """Return the exit code when our output is not read any more: that is no failure of ours."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains at exit
    return OUTPUT_CLOSED


def _report_fault(error: Exception) -> int:
    if os.environ.get(DEBUG):
        import traceback

        complain("".join(traceback.format_exception(error)))
    else:
        what = " ".join(f"{type(error).__name__}: {error}".split())
        complain(f"unexpected {what}\nset {DEBUG}=1 for the traceback")
    return REFUSED
