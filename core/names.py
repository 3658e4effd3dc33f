"""core.names: the rule for names of topics, subscriptions and groups.

May import: core.errors, the standard library.
Never: anything else of ours.
"""

from __future__ import annotations

import re

from core.errors import BadName

_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}\Z")


def check_name(kind: str, name: object) -> str:
    """Return `name` if it is one: 1 to 200 of A-Z a-z 0-9 . _ - and neither `.` nor `..`. Raises BadName."""
    if isinstance(name, str) and _NAME.match(name) and name not in (".", ".."):
        return name
    shown = repr(name)
    if len(shown) > 80:
        shown = shown[:77] + "..."
    raise BadName(f"{shown} is not a {kind} name: use 1 to 200 of A-Z a-z 0-9 . _ - but neither '.' nor '..'")
