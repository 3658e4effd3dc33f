"""Text of peers made harmless for a terminal and for a log: control characters are shown, not acted on."""

from __future__ import annotations

import re

# Control characters except tab and newline; marks that change the direction of text; halves of characters.
_DANGEROUS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def escaped(text: str) -> str:
    """Return the text with every character that a terminal would act on written as `\\x1b` or `\\u202e`."""
    return _DANGEROUS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """Return escaped text without line ends and tabs."""
    return escaped(text).replace("\n", "\\n").replace("\t", "\\t")
