"""gateways.http_page: the live page: files that a browser asks for.

May import: gateways.http_rows, the standard library.
Never: trio, sockets, storage, anything from another host.

The files are read when the broker starts; none of them is made or changed by a build step.
"""

from __future__ import annotations

from importlib.resources import files

from gateways.http_rows import Answer, Call, Row

FILES = (
    "page.css",
    "page.js",
    "broker.js",
    "dom.js",
    "history.js",
    "letters.js",
    "messages.js",
    "overview.js",
    "tables.js",
    "tail.js",
    "topic.js",
    "words.js",
)
MEDIA_TYPES = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8"}


def _read(name: str) -> bytes:
    return (files("gateways") / "page" / name).read_bytes()


INDEX = _read("index.html")  # what GET / answers to a browser


def _row(name: str) -> Row:
    content, media_type = _read(name), MEDIA_TYPES[name.rpartition(".")[2]]

    async def send(call: Call) -> Answer:
        return Answer(content, media_type=media_type)

    send.__name__ = name.replace(".", "_")  # the name of an operation is the name of its function
    return Row("GET", f"/page/{name}", "a part of the live page", send, media_type=media_type)


ROWS = [_row(name) for name in FILES]
