"""What callers say about subscriptions, as the broker understands it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

Place = int | str | datetime  # an offset, "earliest", "latest", or a time


def place_of(place: Place) -> int | str:
    """Return a place in a topic for the wire; a datetime without a zone is local time."""
    return place.astimezone(UTC).isoformat() if isinstance(place, datetime) else place


def options_of(options: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the options that were given; the broker checks them."""
    return {name: value for name, value in options.items() if value is not None} or None


def own_name(topic: str) -> str:
    """Return a name for a subscription that no other client will use."""
    return f"{topic[:160]}.{os.urandom(8).hex()}"
