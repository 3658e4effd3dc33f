"""Messages on standard output, one after another as they come."""

from __future__ import annotations

import base64
import json
import sys
import threading
from typing import Any

from qb.clients.protocol.message import Message
from qb.core.wire.harmless_text import one_line

_one_at_a_time = threading.Lock()  # handlers may run in several threads


def show_message(message: Message, *, as_json: bool, raw: bool) -> None:
    """Print a message: as one JSON line, or its body. A terminal also gets where the message came from.

    A terminal gets the body escaped and on one line, unless it shall be `raw`: no body looks like two messages.
    """
    with _one_at_a_time:
        if as_json:
            print(json.dumps(as_data(message)), flush=True)
            return
        body = message.body
        if sys.stdout.isatty():
            sys.stdout.write(f"\x1b[2m{_origin(message)}\x1b[0m ")
            sys.stdout.flush()
            body = body if raw else one_line(body.decode(errors="backslashreplace")).encode()
        sys.stdout.buffer.write(body + b"\n")
        sys.stdout.buffer.flush()


def _origin(message: Message) -> str:
    """Return where a message came from: partition, offset, key, and the attempt if it is not the first."""
    key = f" {one_line(message.key)}" if message.key is not None else ""
    again = f" (attempt {message.attempt})" if message.attempt > 1 else ""
    return f"{message.partition}/{message.offset}{key}{again}"


def as_data(message: Message) -> dict[str, Any]:
    """Return a message as what JSON can carry; a body that is not UTF-8 as base64, and said so."""
    data: dict[str, Any] = {
        "topic": message.topic,
        "partition": message.partition,
        "offset": message.offset,
        "timestamp": message.timestamp,
        "key": message.key,
        "attempt": message.attempt,
        "properties": dict(message.properties),
    }
    try:
        data["value"] = message.body.decode()
    except UnicodeDecodeError:
        data |= {"value": base64.b64encode(message.body).decode(), "encoding": "base64"}
    return data
