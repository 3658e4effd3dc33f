"""Which of a query's filters the reader takes over from Spark.

Filters on topic and partition decide which partitions are read at all, those on offset narrow what is read of them.
Those on timestamp are applied to what has been read, before Spark sees it: publishers choose their timestamps, so
nothing says where in a log the messages of a time are. (startingTimestamp goes by the time of appending, which never
goes back in a partition.)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from pyspark.sql import datasource as ds

from pyspark_qb.arrow.bounds import Bounds
from pyspark_qb.read.query_offsets import OffsetRange, TopicPartition

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
NEVER_NULL = ("value", "topic", "partition", "offset", "timestamp", "properties")

COMPARE: dict[type[ds.Filter], Callable[[Any, Any], bool]] = {
    ds.EqualTo: operator.eq,
    ds.EqualNullSafe: operator.eq,
    ds.GreaterThan: operator.gt,
    ds.GreaterThanOrEqual: operator.ge,
    ds.LessThan: operator.lt,
    ds.LessThanOrEqual: operator.le,
    ds.In: lambda one, many: one in many,
}


class Comparison(NamedTuple):
    """A comparison of a partition's topic or number."""

    column: str  # a field of Partition
    kind: type[ds.Filter]
    value: Any

    def holds(self, partition: TopicPartition) -> bool:
        return COMPARE[self.kind](getattr(partition, self.column), self.value)


class PushedFilters(NamedTuple):
    """What of the messages is wanted."""

    comparisons: tuple[Comparison, ...] = ()
    offsets: Bounds = Bounds()
    times: Bounds = Bounds()  # in microseconds since 1970

    def narrowed(self, ranges: Iterable[OffsetRange]) -> list[OffsetRange]:
        """Return what of the ranges is to be read."""
        found = []
        for partition, start, end in ranges:
            if all(each.holds(partition) for each in self.comparisons):
                found.append(OffsetRange(partition, max(start, self.offsets.first), min(end, self.offsets.end)))
        return [each for each in found if each.rows > 0]

    def take(self, given: ds.Filter) -> PushedFilters | None:
        """Return this with one filter more, or None if Spark has to apply that one."""
        column = ".".join(getattr(given, "attribute", ()))
        if isinstance(given, ds.IsNotNull):
            return self if column in NEVER_NULL else None
        if type(given) not in COMPARE:
            return None
        value = given.value  # type: ignore[attr-defined]
        match column:
            case "topic" | "partition":
                return self._replace(comparisons=(*self.comparisons, Comparison(column, type(given), value)))
            case "offset" if isinstance(value, int) and (span := _span(given, value)):
                return self._replace(offsets=self.offsets.within(*span))
            case "timestamp" if isinstance(value, datetime) and value.tzinfo and (span := _span(given, _micros(value))):
                return self._replace(times=self.times.within(*span))
        return None


def push(filters: Iterable[ds.Filter]) -> tuple[PushedFilters, list[ds.Filter]]:
    """Return what the reader takes over, and the filters that are left to Spark."""
    pushed, left = PushedFilters(), []
    for each in filters:
        taken = pushed.take(each)
        if taken is None:
            left.append(each)
        else:
            pushed = taken
    return pushed, left


def _span(given: ds.Filter, value: int) -> Bounds | None:
    """Return the whole numbers that pass a comparison, or None if they are no span."""
    match given:
        case ds.EqualTo() | ds.EqualNullSafe():
            return Bounds(value, value + 1)
        case ds.GreaterThan():
            return Bounds(first=value + 1)
        case ds.GreaterThanOrEqual():
            return Bounds(first=value)
        case ds.LessThan():
            return Bounds(end=value)
        case ds.LessThanOrEqual():
            return Bounds(end=value + 1)
    return None


def _micros(moment: datetime) -> int:
    return (moment - EPOCH) // timedelta(microseconds=1)
