"""What a browser may do through this door, and the headers that say so.

The door asks for no password, so it must not serve pages of other sites that run in a browser on the same network.
Three facts of a request give such a page away: the name by which it reached us (Host), the site that sent it
(Origin, Sec-Fetch-Site), and what it can read (Accept).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from ipaddress import ip_address

from qb.doors.http.requests.http_errors import HttpError

LOOPBACK_NAMES = ("localhost", "localhost.localdomain", "localhost6", "ip6-localhost", "ip6-loopback")
EVENTS = "text/event-stream"
_REFUSED = re.compile(r"\s*q\s*=\s*0(\.0*)?\s*", re.IGNORECASE)  # this weight means "not acceptable"
SHOWN = 100  # characters of a peer's own text in an error


def check_host(headers: Mapping[str, str], names: Collection[str]) -> None:
    """Refuse a request that reached us by a foreign name: DNS rebinding makes a page of that name "same origin".

    Loopback names, IP addresses (rebinding needs a name) and `names` are accepted, with any port. A request without
    Host, which only HTTP/1.0 allows, is no browser's. Raises HttpError.
    """
    host = headers.get("host")
    if host is None or _is_address(name := host_name(host)):
        return
    if name in LOOPBACK_NAMES or name.endswith(".localhost") or name in names:
        return
    raise HttpError(
        421,
        "UNKNOWN_HOST",
        f"this broker is not called {name[:SHOWN]!r}; use its address, or let it know the name with QB_HTTP_HOSTS",
    )


def host_name(host: str) -> str:
    """Return a Host header without its port, brackets and final dot, in lower case."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def check_origin(headers: Mapping[str, str]) -> None:
    """Refuse a request that a page of another site makes. Raises HttpError."""
    origin, host = headers.get("origin"), headers.get("host", "")
    foreign = origin is not None and origin.partition("://")[2].lower() != host.lower()
    if foreign or headers.get("sec-fetch-site") == "cross-site":
        raise HttpError(403, "FOREIGN_ORIGIN", "a page of another site may not use this broker")


def accepts_events(accept: str) -> bool:
    """Return whether an Accept header names event streams, and not as what the sender cannot read (`;q=0`)."""
    ranges = (each.split(";") for each in accept.split(","))
    named = [parameters for kind, *parameters in ranges if kind.strip().lower() == EVENTS]
    return any(not any(map(_REFUSED.fullmatch, parameters)) for parameters in named)


def check_join(headers: Mapping[str, str]) -> None:
    """Refuse to join a subscription by a GET that no program for event streams made, such as that of an <img>.

    It is the one GET that changes something: it takes messages. Raises HttpError.
    """
    if not accepts_events(headers.get("accept", "")):
        raise HttpError(
            406,
            "NOT_ACCEPTABLE",
            f"joining a subscription takes messages, so the request must say that it can read them: "
            f"send the header `Accept: {EVENTS}`",
        )
    if headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
        raise HttpError(403, "FOREIGN_ORIGIN", "a page of another origin may not join a subscription")
