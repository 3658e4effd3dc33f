"""The lines of the broker's log: one event, one line, whatever text a peer has given."""

from __future__ import annotations

import logging
from types import TracebackType

from qb.core.wire.harmless_text import escaped, one_line

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
INDENT = "    "
ExceptionInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


class LogLineFormatter(logging.Formatter):
    """Escapes control characters, so that no text forges a line or drives a terminal.

    A line that begins without an indent is an event; the lines of its traceback are indented.
    """

    def __init__(self) -> None:
        super().__init__(FORMAT)

    def formatMessage(self, record: logging.LogRecord) -> str:
        return one_line(super().formatMessage(record))

    def formatException(self, ei: ExceptionInfo) -> str:
        return _indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:
        return _indented(super().formatStack(stack_info))


def _indented(text: str) -> str:
    return INDENT + escaped(text).replace("\n", f"\n{INDENT}")


def start_logging(level: str) -> None:
    """Log to stderr from this level on."""
    handler = logging.StreamHandler()
    handler.setFormatter(LogLineFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])
