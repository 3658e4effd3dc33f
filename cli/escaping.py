"""Text of messages and peers made harmless for a terminal.

A body, a key or an error may hold escape sequences that would move the cursor, change the title or type for the
operator. On a terminal they are shown as `\\x1b`; a pipe or a file gets everything as it is.
"""

from __future__ import annotations

import re
from typing import IO

# Control characters except tab and newline; marks that change the direction of text; halves of characters.
_DANGEROUS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def escaped(text: str) -> str:
    """Return the text with every character that a terminal would act on written as `\\x1b` or `\\u202e`."""
    return _DANGEROUS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """Return escaped text without line ends and tabs, for a cell of a table."""
    return escaped(text).replace("\n", "\\n").replace("\t", "\\t")


def for_stream(text: str, stream: IO[str]) -> str:
    """Return the text as this stream shall get it: escaped if it is a terminal."""
    return escaped(text) if stream.isatty() else text
