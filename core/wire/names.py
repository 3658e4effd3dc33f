"""The rules for names of topics, subscriptions and groups, and for ids of transactions."""

from __future__ import annotations

import re

from qb.core.wire.errors import BadName

_TRANSACTION = re.compile(r"[A-Za-z0-9._:-]{1,200}\Z")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}\Z")


def check_name(kind: str, name: object) -> str:
    """Return `name` if it is one: 1 to 200 of A-Z a-z 0-9 . _ - and neither `.` nor `..`. Raises BadName."""
    if isinstance(name, str) and _NAME.match(name) and name not in (".", ".."):
        return name
    raise BadName(f"{_short(name)} is not a {kind} name: use 1 to 200 of A-Z a-z 0-9 . _ - but neither '.' nor '..'")


def check_transaction(name: str) -> str:
    """Return `name` if it can be a transaction's id: 1 to 200 of A-Z a-z 0-9 . _ : - . Raises BadName."""
    if _TRANSACTION.match(name):
        return name
    raise BadName(f"{_short(name)} is not a transaction's id: use 1 to 200 of A-Z a-z 0-9 . _ : -")


def _short(name: object) -> str:
    shown = repr(name)
    return shown if len(shown) <= 80 else shown[:77] + "..."
