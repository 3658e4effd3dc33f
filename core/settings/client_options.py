"""The arguments of a client that settings give."""

from __future__ import annotations

import os
from typing import Any

from qb.core.settings.config_file import SettingsError
from qb.core.settings.program_config import program_config
from qb.core.settings.program_table import ProgramConfig
from qb.core.settings.settings_sources import load
from qb.core.settings.settings_table import ClientSettings

ACKS = {"0": "none", "1": "leader", "all": "all"}  # the words of a producer for required_acks
START: dict[int, str | int] = {-2: "earliest", -1: "latest"}


def connection_options(**given: Any) -> dict[str, Any]:
    """Return the arguments that the environment and its settings file say, overridden by those `given`.

    Raises SettingsError.
    """
    settings = load([], os.environ).settings
    where: dict[str, Any] = {"host": settings.server.host, "port": settings.server.port}
    if settings.client.servers and "port" not in given:
        where = {"servers": settings.client.servers}
    patience = {
        "request_timeout": settings.client.request_timeout,
        "heartbeat_interval": settings.client.heartbeat_interval,
        **credential_files(settings.client),
    }
    return (patience if {"host", "servers"} & {*given} else where | patience) | given


def credential_files(client: ClientSettings) -> dict[str, str]:
    """Return the arguments of a client that say how it logs in."""
    names = ("token_file", "ca_file", "cert_file", "key_file")
    return {name: value for name in names if (value := getattr(client, name))}


def consumer_options(path: str) -> dict[str, Any]:
    """Return the arguments of a consumer that a program's file says. Raises SettingsError."""
    config = program_config(path)
    about, options = config.consumer, _connection_of(config)
    if about.topic is None or about.group_id is None:
        missing = "consumer.topic" if about.topic is None else "consumer.group_id"
        raise SettingsError(f"{missing}: is missing in file {path}")
    names = ("group_id", "partition", "auto_commit", "auto_commit_interval_ms", "max_bytes", "max_wait_ms", "min_bytes")
    taken = {name: getattr(about, name) for name in names}
    return options | taken | {"topics": about.topic, "start": START.get(about.offset, about.offset)}


def producer_options(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of a client and those of its producer that a program's file says. Raises SettingsError."""
    config = program_config(path)
    if config.producer.topic is None:
        raise SettingsError(f"producer.topic: is missing in file {path}")
    options = _connection_of(config)
    if config.producer.timeout_ms is not None:
        options["request_timeout"] = config.producer.timeout_ms / 1000
    return options, {"topic": config.producer.topic, **sending_options(config)}


def sending_options(config: ProgramConfig) -> dict[str, Any]:
    """Return the arguments of a producer, but for its topic."""
    about = config.producer
    return {
        "partition": about.partition,
        "acks": ACKS[about.required_acks],
        "batch_size": about.batch_size,
        "linger_ms": about.flush_interval_ms,
        "retries": config.broker.max_retries,
    }


def _connection_of(config: ProgramConfig) -> dict[str, Any]:
    """Return the arguments of a client: those of the section `broker`, over those of the environment."""
    about, options = config.broker, connection_options()
    if about.address is not None:
        options |= {"host": about.address, "port": None}
    if about.timeout_secs is not None:
        options["request_timeout"] = about.timeout_secs
    if about.compression is not None:
        options["compression"] = about.compression
    options |= {name: value for name in ("token_file", "ca_file") if (value := getattr(about, name)) is not None}
    return options
