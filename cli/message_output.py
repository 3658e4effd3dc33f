"""Messages on standard output, one after another as they come."""

from __future__ import annotations

import base64
import json
import sys
import threading
from typing import Any

from qb.clients.protocol.message import Message

_one_at_a_time = threading.Lock()  # handlers may run in several threads


def show_message(message: Message, as_json: bool) -> None:
    """Print a message: as one JSON line, or its body, on a terminal with where it came from."""
    with _one_at_a_time:
        if as_json:
            print(json.dumps(as_data(message)), flush=True)
            return
        if sys.stdout.isatty():
            key = f" {message.key}" if message.key is not None else ""
            again = f" (attempt {message.attempt})" if message.attempt > 1 else ""
            sys.stdout.write(f"\x1b[2m{message.partition}/{message.offset}{key}{again}\x1b[0m ")
            sys.stdout.flush()
        sys.stdout.buffer.write(message.body + b"\n")
        sys.stdout.buffer.flush()


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
