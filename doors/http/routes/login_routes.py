"""Logging in and out, for the page: a browser's EventSource can send a cookie, and no other header."""

from __future__ import annotations

import msgspec
import trio

from qb.core.rights.needs import OPEN
from qb.doors.exposure import exposed
from qb.doors.http.requests.page_logins import set_cookie
from qb.doors.http.routes.route_table import Fields, NoFields, RouteAnswer, RouteCall, RouteRow
from qb.doors.tls_transport import TlsTransport


class LoginBody(Fields):
    token: str


class SessionBody(msgspec.Struct, frozen=True):
    """Who asks. `csrf` is for the header x-qb-csrf of what changes something; `has_users`: one can log in."""

    user: str
    has_users: bool
    csrf: str | None
    warning: str | None  # for every reader of the page


async def login(call: RouteCall) -> RouteAnswer:
    await call.peer.log_in(call.body.token)
    cookie = call.service.logins.begin(call.body.token, trio.current_time())
    return RouteAnswer(_session(call, None), headers=set_cookie(cookie, secure=_is_secure(call)))


async def logout(call: RouteCall) -> RouteAnswer:
    call.service.logins.end(call.headers)
    await call.peer.log_in("")
    return RouteAnswer(_session(call, None), headers=set_cookie("", secure=_is_secure(call)))


async def session(call: RouteCall) -> RouteAnswer:
    known = call.service.logins.find(call.headers, trio.current_time())
    return RouteAnswer(_session(call, known and known.csrf))


def _session(call: RouteCall, csrf: str | None) -> SessionBody:
    settings = call.broker.settings
    open_to = exposed(settings) if settings.security.insecure else []
    warning = f"{', '.join(open_to)} can be reached without users or without TLS (--insecure)." if open_to else None
    return SessionBody(call.principal.name, call.peer.identity.restricts, csrf, warning)


def _is_secure(call: RouteCall) -> bool:
    return isinstance(call.peer.transport, TlsTransport)


ROWS = [
    RouteRow("GET", "/session", "who is logged in", session, OPEN, answer=SessionBody),
    RouteRow("POST", "/login", "log in by a cookie, for the page", login, OPEN, body=LoginBody, answer=SessionBody),
    RouteRow("POST", "/logout", "log out, for the page", logout, OPEN, body=NoFields, answer=SessionBody),
]
