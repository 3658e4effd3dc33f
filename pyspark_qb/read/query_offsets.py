"""How far a query has come in each partition, and what lies between two such positions.

Spark keeps offsets as JSON: `{"topic": {"0": 42}}`, the next offset to read of each partition.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from pyspark_qb.options.spark_errors import BadOption, DataLost
from pyspark_qb.options.spark_options import EARLIEST, LATEST, Offsets
from qb.clients.protocol.fetch_requests import PartitionExtent

BEGUN = "(begun)"  # no topic can be called this
# More of them are worth another task, unless the options say otherwise. A Python task costs Spark about as much
# processor time as reading 100,000 rows does, however few it reads.
ROWS_PER_TASK = 1_000_000


class TopicPartition(NamedTuple):
    """One partition of a topic."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}"


class OffsetRange(NamedTuple):
    """Messages of a partition from offset `start` up to, not including, `end`."""

    partition: TopicPartition
    start: int
    end: int

    @property
    def rows(self) -> int:
        return self.end - self.start


Positions = dict[TopicPartition, int]  # an offset in each partition
AtTime = Callable[[TopicPartition, int], int]  # partition, ms since 1970 -> the first offset appended then or later


def to_json(positions: Positions, begun: Positions | None = None) -> dict[str, Any]:
    """Return positions as Spark keeps them, always in the same order, since it compares texts.

    `begun` is where the query began; it is kept there and at the end of the first batch. Spark does not keep it: it
    asks for it anew when it repeats the first batch after a crash, and by then `latest` has moved on.
    """
    listed: dict[str, Any] = {}
    for (topic, partition), offset in sorted(positions.items()):
        listed.setdefault(topic, {})[str(partition)] = offset
    if begun is not None:
        listed[BEGUN] = to_json(begun)
    return listed


def from_json(listed: Mapping[str, Any]) -> Positions:
    """Return the positions that to_json() was given."""
    topics = {topic: offsets for topic, offsets in listed.items() if topic != BEGUN}
    return {
        TopicPartition(topic, int(partition)): offset
        for topic, of in topics.items()
        for partition, offset in of.items()
    }


def begun_in(listed: Mapping[str, Any]) -> Positions | None:
    """Return where the query began, if no batch but the first ends here."""
    return from_json(listed[BEGUN]) if BEGUN in listed else None


def resolve(
    extents: Mapping[TopicPartition, PartitionExtent],
    offsets: Offsets | None,
    time_ms: int | None,
    default: str,
    at_time: AtTime,
) -> Positions:
    """Return the positions that options mean: offsets or a time, or else the default ("earliest" or "latest").

    Partitions that are not listed in `offsets` are at the default. Raises BadOption for one that there is not.
    """
    if time_ms is not None:
        return {each: min(at_time(each, time_ms), extent.next) for each, extent in extents.items()}  # it may have grown
    named = offsets if isinstance(offsets, dict) else {}
    listed = {TopicPartition(topic, number): offset for topic, of in named.items() for number, offset in of.items()}
    for partition in listed.keys() - extents.keys():
        raise BadOption(f"offsets are given for {partition}, which is not among what is read")
    usual = EARLIEST if (offsets if isinstance(offsets, str) else default) == "earliest" else LATEST
    return {partition: _meant(listed.get(partition, usual), extent) for partition, extent in extents.items()}


def _meant(offset: int, extent: PartitionExtent) -> int:
    return {EARLIEST: extent.first, LATEST: extent.next}.get(offset, offset)


def checked(
    positions: Positions, extents: Mapping[TopicPartition, PartitionExtent], *, fail_on_data_loss: bool
) -> Positions:
    """Return positions that are in the logs: moved there if they are not, or raises DataLost."""
    inside = {each: min(max(offset, extents[each].first), extents[each].next) for each, offset in positions.items()}
    for partition, offset in positions.items():
        if fail_on_data_loss and offset != inside[partition]:
            first, end = extents[partition]
            raise DataLost(f"{partition} holds the offsets from {first} up to {end}, and {offset} was asked for")
    return inside


def limited(start: Positions, end: Positions, most: int) -> Positions:
    """Return positions of which `most` rows lie behind the start: a share of them in each partition, as it has rows."""
    rows = {each: max(offset - start.get(each, 0), 0) for each, offset in end.items()}
    total = sum(rows.values())
    if total <= most:
        return end
    shares = {each: most * count // total for each, count in rows.items()}
    left = most - sum(shares.values())
    for each in sorted(rows, key=lambda each: (-(most * rows[each] % total), each))[:left]:
        shares[each] += 1
    return {each: start.get(each, 0) + shares[each] if rows[each] else offset for each, offset in end.items()}


def ranges(start: Positions, end: Positions) -> list[OffsetRange]:
    """Return what lies between; a partition that was not there at the start is read from its first message on.

    An end before the start means that the topic was made anew: then it is read from its first message on, too.
    """
    begins = {each: start.get(each, 0) for each in end}
    between = [OffsetRange(each, at if at <= end[each] else 0, end[each]) for each, at in begins.items()]
    return [each for each in sorted(between) if each.rows > 0]


def split(
    whole: Collection[OffsetRange], rows_each: int | None = None, at_least: int | None = None
) -> list[OffsetRange]:
    """Return the ranges cut so that none has more than `rows_each` rows, and so that there are `at_least` of them.

    There cannot be more of them than there are rows.
    """
    most = rows_each or ROWS_PER_TASK
    if at_least is not None and at_least > len(whole):
        most = min(most, max(sum(each.rows for each in whole) // at_least, 1))
    return [piece for each in whole for piece in _pieces(each, -(-each.rows // most))]


def _pieces(whole: OffsetRange, count: int) -> list[OffsetRange]:
    """Return the range in so many pieces of about the same size."""
    cuts = [whole.start + whole.rows * number // count for number in range(count + 1)]
    return [OffsetRange(whole.partition, start, end) for start, end in pairwise(cuts)]
