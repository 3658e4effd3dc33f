"""Certificates and the first operator of a cluster on this machine: made once, and used again by later starts."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from qb.core.rights.development_certificates import NoCertificates, make_certificates, write_secret
from qb.core.rights.users_file import hash_of, make_token, parse_user, write_users
from qb.storage.files import CannotOpen

OPERATOR = "ops"
FILES = ("ca.pem", "cert.pem", "key.pem")


class LocalSecurity(NamedTuple):
    """What the processes of a cluster, and its clients, are told."""

    broker_flags: Mapping[str, str]
    nats: str  # of the configuration of a NATS server, and of its routes
    client: Mapping[str, str]  # the environment of clients
    context: ssl.SSLContext | None  # to ask a broker with


OPEN = LocalSecurity({}, "", {}, None)


def secured(directory: Path, host: str) -> LocalSecurity:
    """Return what secures a cluster whose files are in a directory; what is missing is made.

    Raises CannotOpen, OSError.
    Brokers and NATS servers have an authority of their own: any certificate of it makes a broker.
    """
    doors, cluster = directory / "tls", directory / "cluster-tls"
    for each in (doors, cluster):
        _make_once(each, host)
    token, users = directory / "operator.token", directory / "first-users"
    if not token.exists():
        write_secret(token, f"{make_token()}\n".encode())
    if not users.exists():
        words = ["user", OPERATOR, f"sha256:{hash_of(token.read_text().strip())}", "admin:*"]
        write_users(str(users), [parse_user(words)])
    authority, certificate, key = (str(cluster / name) for name in FILES)
    users_and_doors = {"--first-users-file": users, "--tls-cert": doors / "cert.pem", "--tls-key": doors / "key.pem"}
    of_cluster = {"--cluster-tls-cert": certificate, "--cluster-tls-key": key, "--cluster-tls-ca": authority}
    of_nats = {"--nats-cert-file": certificate, "--nats-key-file": key, "--nats-ca-file": authority}
    nats = f'tls {{ cert_file: "{certificate}", key_file: "{key}", ca_file: "{authority}", verify: true }}'
    client = {"QB_CA_FILE": str(doors / "ca.pem"), "QB_TOKEN_FILE": str(token)}
    context = ssl.create_default_context(cafile=doors / "ca.pem")
    flags = {flag: str(value) for flag, value in users_and_doors.items()} | of_cluster | of_nats
    return LocalSecurity(flags, nats, client, context)


def _make_once(directory: Path, host: str) -> None:
    if not all((directory / name).exists() for name in FILES):
        try:
            make_certificates(directory, [host, "localhost"])
        except NoCertificates as error:
            raise CannotOpen(str(error)) from None
