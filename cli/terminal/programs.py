"""What the programs `produce` and `consume` share: their file, their flags, and how a signal ends them."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from qb.cli.terminal.command import UsageError, of_kind
from qb.clients.blocking.client import BrokerClient
from qb.core.settings import PROGRAM_TABLE, ProgramConfig, program_config
from qb.core.wire.addresses import parse_address
from qb.core.wire.compression.codecs import check_codec


def add_config(parser: argparse.ArgumentParser, section: str, but: frozenset[str] = frozenset()) -> None:
    """Add --config, and a flag for each key of a section and of `broker`, `but` for those that have another flag."""
    parser.add_argument("--config", metavar="FILE", help="YAML file that configures the program; flags win over it")
    keys = parser.add_argument_group("keys of the file")
    for setting in PROGRAM_TABLE:
        where, name = setting.name.split(".")
        if where in (section, "broker") and name not in but:
            flag = "--broker" if name == "address" else f"--{name.replace('_', '-')}"
            default = "" if setting.default is None else f" ({setting.kind.show(setting.default)})"
            dest, kind = f"key {setting.name}", of_kind(setting.kind)
            keys.add_argument(flag, dest=dest, type=kind, metavar=name.upper(), help=setting.help + default)


def configured(args: argparse.Namespace, **more: Any) -> ProgramConfig:
    """Return what the file and the flags say; `more` are flags by another name. Raises SettingsError, UsageError."""
    given = {name.removeprefix("key "): value for name, value in vars(args).items() if name.startswith("key ")}
    given |= {name.replace("__", "."): value for name, value in more.items()}
    return program_config(args.config, given, "--config")


def required(value: Any, key: str, flag: str) -> Any:
    """Return a value that a program cannot do without. Raises UsageError."""
    if value is None:
        raise UsageError(f"{key} is missing: set it in the file of --config, or give {flag}")
    return value


def configured_broker(args: argparse.Namespace, config: ProgramConfig, timeout: float | None = None) -> BrokerClient:
    """Return a client of the broker that the flags name, else the file, else the settings of every command."""
    servers = args.servers or [str(parse_address(args.host, args.port))]
    if config.broker.address is not None and not args.broker_is_given:
        servers = [str(parse_address(config.broker.address))]
    timeout = timeout if timeout is not None else config.broker.timeout_secs
    files = {name: value for name in ("token_file", "ca_file") if (value := getattr(config.broker, name)) is not None}
    return BrokerClient(
        client_id=args.client_id,
        servers=servers,
        request_timeout=args.timeout if timeout is None or args.timeout_is_given else timeout,
        heartbeat_interval=args.heartbeat_interval,
        **(args.credentials | files),
        compression=_installed(config.broker.compression),
        connect_wait=sum(min(2.0, 0.1 * 2**attempt) for attempt in range(config.broker.max_retries)),
    )


def _installed(codec: str | None) -> str | None:
    try:
        return check_codec(codec)
    except ImportError as error:
        raise UsageError(str(error)) from None


@contextmanager
def ended_by_signals(end: Callable[[], None]) -> Iterator[None]:
    """Call `end` at SIGINT and SIGTERM inside the block."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda *_: end()) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
