"""The live page: files that a browser asks for.

The files are read when the broker starts; none of them is made or changed by a build step.
"""

from __future__ import annotations

from importlib.resources import files

from qb.core.rights.needs import OPEN
from qb.doors.http.routes.route_table import RouteAnswer, RouteCall, RouteRow

FILES = (
    "page.css",
    "page.js",
    "docs.css",
    "broker.js",
    "cell.js",
    "dom.js",
    "history.js",
    "letters.js",
    "login.js",
    "messages.js",
    "overview.js",
    "tables.js",
    "tail.js",
    "topic.js",
    "words.js",
)
MEDIA_TYPES = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8"}


def _read(name: str) -> bytes:
    return (files("qb.doors.http") / "page" / name).read_bytes()


INDEX = _read("index.html")  # what GET / answers to a browser


def _row(name: str) -> RouteRow:
    content, media_type = _read(name), MEDIA_TYPES[name.rpartition(".")[2]]

    async def send(call: RouteCall) -> RouteAnswer:
        return RouteAnswer(content, media_type=media_type)

    send.__name__ = name.replace(".", "_")  # the name of an operation is the name of its function
    return RouteRow("GET", f"/page/{name}", "a part of the live page", send, OPEN, media_type=media_type)


ROWS = [_row(name) for name in FILES]
