"""The arguments of a client that settings give."""

from __future__ import annotations

import os
from typing import Any

from qb.core.settings.config_file import SettingsError
from qb.core.settings.program_config import program_config
from qb.core.settings.settings_sources import load

START: dict[int, str | int] = {-2: "earliest", -1: "latest"}


def connection_options(**given: Any) -> dict[str, Any]:
    """Return the arguments that the environment and its settings file say, overridden by those `given`.

    Raises SettingsError.
    """
    settings = load([], os.environ).settings
    where = {"host": settings.server.host, "port": settings.server.port}
    patience = {
        "request_timeout": settings.client.request_timeout,
        "heartbeat_interval": settings.client.heartbeat_interval,
    }
    return (patience if {"host", "servers"} & {*given} else where | patience) | given


def consumer_options(path: str) -> dict[str, Any]:
    """Return the arguments of a consumer that a program's file says. Raises SettingsError."""
    config = program_config(path)
    about, options = config.consumer, connection_options()
    if about.topic is None or about.group_id is None:
        missing = "consumer.topic" if about.topic is None else "consumer.group_id"
        raise SettingsError(f"{missing}: is missing in file {path}")
    if about.partition is not None:
        raise SettingsError(f"consumer.partition: a group shares out all partitions; leave it away in file {path}")
    if config.broker.address is not None:
        options |= {"host": config.broker.address, "port": None}
    if config.broker.timeout_secs is not None:
        options["request_timeout"] = config.broker.timeout_secs
    if config.broker.compression is not None:
        options["compression"] = config.broker.compression
    names = ("group_id", "auto_commit", "auto_commit_interval_ms", "max_bytes", "max_wait_ms", "min_bytes")
    taken = {name: getattr(about, name) for name in names}
    return options | taken | {"topics": about.topic, "start": START.get(about.offset, about.offset)}
