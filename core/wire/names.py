"""The rules for names of topics, subscriptions and groups, and for ids of transactions."""

from __future__ import annotations

import re

from qb.core.wire.errors import BadName

LONGEST = 200  # characters of a name
DEAD_LETTERS = ".dead-letters"  # how the names of default dead-letter topics end: only the broker writes to them
LONGEST_SUBSCRIPTION = LONGEST - len(DEAD_LETTERS)

_TRANSACTION = re.compile(r"[A-Za-z0-9._:-]{1,200}\Z")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}\Z")


def check_name(kind: str, name: object) -> str:
    """Return `name` if it is one: 1 to 200 of A-Z a-z 0-9 . _ - and neither `.` nor `..`. Raises BadName."""
    if isinstance(name, str) and _NAME.match(name) and name not in (".", ".."):
        return name
    raise BadName(f"{_short(name)} is not a {kind} name: use 1 to 200 of A-Z a-z 0-9 . _ - but neither '.' nor '..'")


def check_subscription(name: object) -> str:
    """Return `name` if a new subscription can have it: one whose dead-letter topic can have a name. Raises BadName."""
    name = check_name("subscription", name)
    if len(name) > LONGEST_SUBSCRIPTION:
        raise BadName(
            f"{_short(name)} has {len(name)} characters: a subscription's id has at most {LONGEST_SUBSCRIPTION}, "
            f"so that its dead-letter topic can be called by it with {DEAD_LETTERS!r} behind it"
        )
    return name


def check_transaction(name: str) -> str:
    """Return `name` if it can be a transaction's id: 1 to 200 of A-Z a-z 0-9 . _ : - . Raises BadName."""
    if _TRANSACTION.match(name):
        return name
    raise BadName(f"{_short(name)} is not a transaction's id: use 1 to 200 of A-Z a-z 0-9 . _ : -")


def _short(name: object) -> str:
    shown = repr(name)
    return shown if len(shown) <= 80 else shown[:77] + "..."
