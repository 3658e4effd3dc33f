"""The arguments of a client that the settings give."""

from __future__ import annotations

import os
from typing import Any

from qb.core.settings.settings_sources import load


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
