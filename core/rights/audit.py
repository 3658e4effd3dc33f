"""The audit: one JSON line for each log-in, refusal and administrative act. Never a body or a token."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler

import msgspec

STANDARD_ERROR = "-"
FILE_BYTES, FILES = 16 << 20, 8  # of one file, and how many there are before the oldest is dropped
LONGEST_NAME = 200  # characters of what a peer named


class Audit:
    """Writes the lines. A write that fails is reported to standard error by logging, and stops nothing."""

    def __init__(self, where: str = "") -> None:
        """`where` is a file, `-` for standard error, or empty: then nothing is written. Raises OSError."""
        self._logger: logging.Logger | None = None
        if where:
            self._logger = logging.Logger("qb.audit", logging.INFO)
            to_error = where == STANDARD_ERROR
            self._logger.addHandler(
                logging.StreamHandler(sys.stderr)
                if to_error
                else RotatingFileHandler(where, maxBytes=FILE_BYTES, backupCount=FILES, delay=False)
            )

    def close(self) -> None:
        """Close the file. A line that is noted later opens it again."""
        for handler in [] if self._logger is None else self._logger.handlers:
            handler.close()

    def note(self, user: str, address: str, door: str, action: str, on: list[str], outcome: str) -> None:
        """Write one line, if an audit is wanted."""
        if self._logger is None:
            return
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "user": user,
            "address": address,
            "door": door,
            "action": action,
            "on": [each[:LONGEST_NAME] for each in on[:10]],
            "outcome": outcome,
        }
        self._logger.info("%s", msgspec.json.encode(line).decode())
