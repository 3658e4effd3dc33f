"""Who has logged in by the page: a random cookie for each, and what a form must know to change something.

The token stays here, in memory, so that a reload of the users reaches a page as it reaches every other peer.
"""

from __future__ import annotations

import hmac
import secrets
from collections import OrderedDict
from collections.abc import Mapping
from typing import NamedTuple

from qb.core.wire.errors import Forbidden

COOKIE = "qb_session"
HEADER = "x-qb-csrf"
SECONDS = 12 * 3600.0  # that a login lasts
MOST = 1_000  # logins; beyond this the oldest ends
SAFE = ("GET", "HEAD")


class PageLogin(NamedTuple):
    """One login by the page."""

    token: str
    csrf: str
    until: float


class PageLogins:
    """The logins by cookie. `now` is in seconds on any clock that never goes back."""

    def __init__(self) -> None:
        self._logins: OrderedDict[str, PageLogin] = OrderedDict()

    def begin(self, token: str, now: float) -> str:
        """Note a login and return its cookie."""
        cookie = secrets.token_urlsafe(32)
        self._logins[cookie] = PageLogin(token, secrets.token_urlsafe(32), now + SECONDS)
        if len(self._logins) > MOST:
            self._logins.popitem(last=False)
        return cookie

    def end(self, headers: Mapping[str, str]) -> None:
        """Log out."""
        self._logins.pop(cookie_of(headers), None)

    def find(self, headers: Mapping[str, str], now: float) -> PageLogin | None:
        """Return the login that a request belongs to."""
        cookie = cookie_of(headers)
        login = self._logins.get(cookie)
        if login is not None and login.until < now:
            del self._logins[cookie]
            return None
        return login


def cookie_of(headers: Mapping[str, str]) -> str:
    """Return our cookie in the headers of a request, empty if there is none."""
    for part in headers.get("cookie", "").split(";"):
        name, _, value = part.strip().partition("=")
        if name == COOKIE:
            return value
    return ""


def set_cookie(cookie: str, *, secure: bool) -> dict[str, str]:
    """Return the header that has a browser keep a cookie; an empty one is forgotten."""
    age = int(SECONDS) if cookie else 0
    where = f"; Max-Age={age}; Path=/; HttpOnly; SameSite=Strict{'; Secure' if secure else ''}"
    return {"set-cookie": f"{COOKIE}={cookie}{where}"}


def check_csrf(login: PageLogin, method: str, headers: Mapping[str, str]) -> None:
    """Raises Forbidden if a request by cookie changes something and does not know what only our page knows."""
    if method not in SAFE and not hmac.compare_digest(headers.get(HEADER, "").encode(), login.csrf.encode()):
        raise Forbidden(
            f"a request by cookie that changes something needs the header {HEADER}, which GET /session gives"
        )
