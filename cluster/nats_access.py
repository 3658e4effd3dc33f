"""The NATS client of a broker, as the settings say."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from pathlib import Path

from qb.cluster.health.nats_monitor import NatsMonitor
from qb.core.settings import ClusterSettings
from qb.replication.nats.nats_client import NatsClient
from qb.replication.nats.nats_protocol import NatsCredentials


def nats_client(settings: ClusterSettings, name: str) -> NatsClient:
    """Return a client; run() connects it. Raises OSError with words for the operator."""
    if not settings.nats_servers:
        raise OSError("the storage engine jetstream needs QB_NATS_SERVERS: nats://host:4222 of each NATS server")
    try:
        return NatsClient(
            settings.nats_servers, name=name, credentials=_credentials(settings.nats_login_file), tls=_tls(settings)
        )
    except ValueError as error:
        raise OSError(f"QB_NATS_SERVERS: {error}") from None


def nats_monitors(settings: ClusterSettings) -> Sequence[NatsMonitor]:
    """Return the monitors that the settings name. Raises OSError with words for the operator."""
    try:
        return [NatsMonitor(address, _tls(settings)) for address in settings.nats_monitors]
    except ValueError as error:
        raise OSError(f"QB_NATS_MONITORS: {error}") from None


def _credentials(file: str) -> NatsCredentials | None:
    """Return what a login file says: a token, or a user and a password."""
    if not file:
        return None
    words = Path(file).read_text().split()
    if len(words) == 1:
        return NatsCredentials(token=words[0])
    if len(words) == 2:
        return NatsCredentials(user=words[0], password=words[1])
    raise OSError(f"{file} must hold a token, or one line USER PASSWORD")


def _tls(settings: ClusterSettings) -> ssl.SSLContext | None:
    """Return the context for servers that want TLS; None: the system's authorities, and no certificate of ours."""
    if not settings.nats_ca_file and not settings.nats_cert_file:
        return None
    try:
        context = ssl.create_default_context(cafile=settings.nats_ca_file or None)
        if settings.nats_cert_file:
            context.load_cert_chain(settings.nats_cert_file, settings.nats_key_file or None)
    except OSError as error:
        raise OSError(f"the certificates for NATS cannot be used: {error.strerror or error}") from None
    return context
