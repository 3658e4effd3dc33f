"""gateways.http_page: the live page: files that a browser asks for.

May import: gateways.http_rows, the standard library.
Never: trio, sockets, storage, anything from another host.

The files are read when the broker starts; none of them is made or changed by a build step.
"""

from __future__ import annotations

from importlib.resources import files

from gateways.http_rows import Answer, Call, Row

FILES = {
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "broker.js": "text/javascript; charset=utf-8",
    "dom.js": "text/javascript; charset=utf-8",
    "history.js": "text/javascript; charset=utf-8",
    "letters.js": "text/javascript; charset=utf-8",
    "messages.js": "text/javascript; charset=utf-8",
    "overview.js": "text/javascript; charset=utf-8",
    "tables.js": "text/javascript; charset=utf-8",
    "tail.js": "text/javascript; charset=utf-8",
    "topic.js": "text/javascript; charset=utf-8",
    "words.js": "text/javascript; charset=utf-8",
}


def _read(name: str) -> bytes:
    return (files("gateways") / "page" / name).read_bytes()


INDEX = _read("index.html")  # what GET / answers to a browser


def _row(name: str, media_type: str) -> Row:
    content = _read(name)

    async def send(call: Call) -> Answer:
        return Answer(content, media_type=media_type)

    send.__name__ = name.replace(".", "_")  # the name of an operation is the name of its function
    return Row("GET", f"/page/{name}", "a part of the live page", send, media_type=media_type)


ROWS = [_row(name, media_type) for name, media_type in FILES.items()]
