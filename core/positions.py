"""Positions in a topic as people name them: an offset, `earliest`, `latest`, or a time."""

from __future__ import annotations

from datetime import UTC, datetime

from qb.core.wire.errors import BadRequest
from qb.core.wire.whole_numbers import whole_number
from qb.storage.engine import PartitionLog


async def resolve(log: PartitionLog, place: int | str) -> int:
    """Return the offset that is meant in this log; one outside of what it holds means its nearest end.

    Raises BadRequest.
    """
    if place == "earliest":
        return log.first_offset
    if place == "latest":
        return log.end_offset
    offset = whole_number(place) if isinstance(place, str) else place
    if offset is None:
        return await log.offset_for_time(_time_ms(str(place)))
    if offset < 0:
        raise BadRequest(f"offset {offset} is negative; say earliest or latest")
    return min(max(offset, log.first_offset), log.end_offset)


def _time_ms(text: str) -> int:
    milliseconds = whole_number(text[1:]) if text.startswith("@") else None
    if milliseconds is not None:
        return milliseconds
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise BadRequest(
            f"{text[:80]!r} is no place in a topic: use an offset, earliest, latest, a time such as "
            "2026-01-31T12:00:00Z, or @ and milliseconds"
        ) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return int(moment.timestamp() * 1000)
