"""Whole numbers that peers write as text: the one place that says what is a number."""

from __future__ import annotations

import re

_WHOLE = re.compile(r"-?[0-9]{1,19}")
LEAST, MOST = -(2**63), 2**63 - 1


def whole_number(text: str, least: int = LEAST, most: int = MOST) -> int | None:
    """Return the number that a text is, or None if it is none or out of bounds.

    Only ASCII digits with at most one minus before them: `²`, `٣`, `--5`, `+5`, `5_0`, ` 5` and 5,000 digits are none.
    """
    if _WHOLE.fullmatch(text) is None:
        return None
    number = int(text)
    return number if least <= number <= most else None
