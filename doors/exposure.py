"""Which addresses could be reached from elsewhere without users or without TLS. Pure: settings in, texts out."""

from __future__ import annotations

import socket
from ipaddress import ip_address

from qb.core.settings import Settings

WILDCARDS = {"0.0.0.0": '"$(hostname)"', "::": '"$(hostname)"'}  # a certificate is for names, not for all addresses


def exposed(settings: Settings) -> list[str]:
    """Return the addresses beyond loopback that a broker with these settings listens on, unless it is secured."""
    security = settings.security
    if _has_users(settings) and security.tls_cert:
        return []
    doors = [(settings.server.host, True), *((door.host, door.port != 0) for door in (settings.json, settings.http))]
    return list(dict.fromkeys(host for host, is_open in doors if is_open and not _is_loopback(host)))


def refusal_of_cluster_port(settings: Settings) -> str:
    """Return why the start of a broker of a cell is refused: empty, if its cluster port is on loopback."""
    if settings.storage.engine == "local" or settings.cluster.tls_cert or _is_loopback(settings.cluster.host):
        return ""
    return (
        f"the cluster port on {settings.cluster.host} would be open beyond loopback: a program that reaches it can "
        "claim to pass on any peer; give each broker a certificate (QB_CLUSTER_TLS_CERT, QB_CLUSTER_TLS_KEY) of an "
        "authority that is for brokers alone (QB_CLUSTER_TLS_CA), or --insecure"
    )


def refusal_of_users_file(settings: Settings) -> str:
    """Return why the start is refused: empty, if the users come from where this broker may have them."""
    security = settings.security
    if security.users_file and settings.storage.engine != "local":
        return (
            "QB_USERS_FILE is for a broker without a cluster: the brokers of a cell keep their users in its journal, "
            "where `qb users` changes them; QB_FIRST_USERS_FILE names such a file, for the users that begin it"
        )
    if security.users_file and security.first_users_file:
        return "QB_USERS_FILE and QB_FIRST_USERS_FILE exclude each other: with the former, users stay in the file"
    return ""


def _has_users(settings: Settings) -> bool:
    return bool(settings.security.users_file or settings.security.first_users_file)


def _is_loopback(host: str) -> bool:
    """Say whether all addresses of a host are loopback. One that cannot be found is refused when it is listened on."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror:
        return True
    return all(ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in found)


def refusal_to_listen(settings: Settings) -> str:
    """Return why the start is refused, and the commands that mend it."""
    missing = [
        *([] if _has_users(settings) else ["users"]),
        *([] if settings.security.tls_cert else ["TLS"]),
    ]
    lines = [
        f"{', '.join(exposed(settings))} can be reached from elsewhere without {' and without '.join(missing)}; do"
    ]
    if "users" in missing:
        kind = "" if settings.storage.engine == "local" else "first_"
        made = f"  qb users add ops --allow 'admin:*' --file {kind}users"
        lines.append(f"{made} && export QB_{kind.upper()}USERS_FILE={kind}users")
    if "TLS" in missing:
        names = " ".join(WILDCARDS.get(host, host) for host in exposed(settings))
        made = f"  qb tls make-dev --dir tls --name {names} localhost"
        lines.append(f"{made} && export QB_TLS_CERT=tls/cert.pem QB_TLS_KEY=tls/key.pem")
    return "\n".join([*lines, "or give --insecure, and every peer that can reach it may do what it likes"])
