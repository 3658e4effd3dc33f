"""Text of messages and peers on its way to a terminal.

A body, a key or an error may hold escape sequences that would move the cursor, change the title or type for the
operator. On a terminal they are shown as `\\x1b`; a pipe or a file gets everything as it is.
"""

from __future__ import annotations

from typing import IO

from qb.core.wire.harmless_text import escaped


def for_stream(text: str, stream: IO[str]) -> str:
    """Return the text as this stream shall get it: escaped if it is a terminal."""
    return escaped(text) if stream.isatty() else text
