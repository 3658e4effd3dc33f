"""The bodies of one publish_many spread over the partitions of a topic, in long runs for each.

Runs that name their partition are what makes it fast. A message with a key goes to `crc32(key) % partitions`, as the
broker has it; those without take the next partition in turn. If there are many partitions and messages, one block of
messages is spread over some of the partitions, and the next block over those after them: each run costs the broker a
batch and a sync, and a message must not cost more because there are more partitions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple, overload
from zlib import crc32

from qb.clients.protocol.client_errors import PublishFailed, UnknownPartition, UnknownTopic, refusal
from qb.clients.protocol.publish_frames import PORTION, Body, FormParts, MixedPublishForm, PublishForm
from qb.clients.protocol.publish_tally import PublishTally
from qb.clients.protocol.receipts import Offsets
from qb.core.wire.errors import Code
from qb.core.wire.errors import UnknownPartition as Refusal
from qb.core.wire.runs.publish_table import MOST_MESSAGES

RUN = 1024 * 1024  # bytes of frames for one partition: each run costs the broker an fsync of that partition's log
LEAST_RUN = 512 * 1024  # bytes of a run without keys that is worth its sync, if there are more than FEW partitions
FEW = 16  # partitions: so many are always used evenly, however small the runs
BLOCK = 16 * 1024 * 1024  # bytes that are gathered at most before they are sent, however many partitions there are
SAMPLE = 256  # bodies of which the size is looked at
KEYS_REMEMBERED = 50_000
_overhead = itemgetter(1)  # of FormParts
_partition, _form = itemgetter(0), itemgetter(1)  # of what _KeyRoutes knows
PARTITIONS_KNOWN_FOR = 60.0  # seconds until a topic is asked again how many partitions it has


class TopicRoutes:
    """What a client knows of its topics: how many partitions each has, and whose turn it is."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, float]] = {}  # partitions, and when that was learnt
        self._turns: dict[str, int] = {}

    def partitions(self, topic: str, now: float) -> int | None:
        """Return how many there are, or None: ask the broker."""
        count, learnt = self._known.get(topic, (None, 0.0))
        return count if now - learnt < PARTITIONS_KNOWN_FOR else None

    def learn(self, topic: str, count: int, now: float) -> None:
        """Note what the broker says."""
        self._known[topic] = count, now

    def forget(self, topic: str) -> None:
        """What was learnt about this topic was wrong."""
        self._known.pop(topic, None)

    def choose(self, topic: str, partition: int | None, key: str | None, partitions: int) -> int:
        """Return where one message goes. Raises UnknownPartition."""
        if partition is not None:
            if not 0 <= partition < partitions:
                raise refusal(Code.UNKNOWN_PARTITION, str(Refusal(topic, partition, partitions)))
            return partition
        if key is not None:
            return partition_of(key, partitions)
        turn = self.turn(topic) % partitions
        self.pass_turn(topic, turn + 1)
        return turn

    def turn(self, topic: str) -> int:
        """Return whose turn it is; messages without a key begin there."""
        return self._turns.get(topic, 0)

    def pass_turn(self, topic: str, turn: int) -> None:
        """The next message without a key goes there."""
        self._turns[topic] = turn

    def checked(self, topic: str, tally: PublishTally) -> Offsets:
        """Return the offsets of what was published. Raises as Tally.offsets(), and forgets what was wrong."""
        try:
            return tally.offsets()
        except PublishFailed as error:
            if isinstance(error.__cause__, UnknownPartition | UnknownTopic):
                self.forget(topic)
            raise


class SpreadPiece(NamedTuple):
    """Bodies for one partition, and which of all bodies they are."""

    partition: int
    indexes: Sequence[int]
    form: PublishForm
    bodies: Sequence[bytes]


class _KeyRoutes(dict[str | None, tuple[int, FormParts]]):
    """Where the messages of each key go, and their form, made when a key is looked up first; None is not kept."""

    def __init__(self, route: Callable[[str | None], tuple[int, FormParts]]) -> None:
        self._route = route

    def __missing__(self, key: str | None) -> tuple[int, FormParts]:
        route = self._route(key)
        if key is not None:
            if len(self) >= KEYS_REMEMBERED:
                self.clear()
            self[key] = route
        return route


class PartitionSpread:
    """How one publish_many spreads its bodies."""

    def __init__(
        self, topic: str, partitions: int, routes: TopicRoutes, properties: Mapping[str, str] | None, timestamp_ms: int
    ) -> None:
        self.topic, self._partitions, self._routes = topic, partitions, routes
        self._properties, self._timestamp_ms = properties, timestamp_ms
        self._forms = [self._form(partition, None) for partition in range(partitions)]
        self._of_keys = _KeyRoutes(self._route)
        self._keys: list[str | None] | None = None  # of the bodies that are being gathered
        self._all_keys: list[str | None] | None = None  # of all bodies, if they are known
        self._turn = routes.turn(topic) % partitions
        self.next_index = 0  # of the first body that is not sent yet
        self.overhead = self._forms[0].overhead
        self.block_bytes = min(max(PORTION, partitions * RUN), BLOCK)

    @overload
    def with_keys(self, bodies: Iterable[Body], keys: Iterable[str | None]) -> Iterable[Body]: ...
    @overload
    def with_keys(
        self, bodies: Iterable[Body] | AsyncIterable[Body], keys: Iterable[str | None]
    ) -> Iterable[Body] | AsyncIterable[Body]: ...
    def with_keys(
        self, bodies: Iterable[Body] | AsyncIterable[Body], keys: Iterable[str | None]
    ) -> Iterable[Body] | AsyncIterable[Body]:
        """Return the bodies; the key of each is kept when it is taken. Too few keys are a ValueError then."""
        self._keys = []
        if isinstance(bodies, list) and isinstance(keys, list) and len(keys) >= len(bodies):
            self._all_keys = keys
            return bodies
        if isinstance(bodies, AsyncIterable):
            return _Watched(bodies, partial(self._keep, iter(keys)))
        return self._each_with_key(bodies, iter(keys))

    def _each_with_key(self, bodies: Iterable[Body], keys: Iterator[str | None]) -> Iterator[Body]:
        for body in bodies:
            self._keep(keys)
            yield body

    def _keep(self, keys: Iterator[str | None]) -> None:
        assert self._keys is not None
        for key in keys:
            self._keys.append(key)
            return
        raise ValueError("there are fewer keys than bodies")

    def pieces(self, block: Sequence[bytes]) -> Iterator[SpreadPiece]:
        """Yield what to send for the next bodies, those with the lowest index first."""
        start = self.next_index
        for piece in self._without_keys(block, start) if self._keys is None else self._by_key(block, start):
            self.next_index = piece.indexes[0]
            yield piece
        self.next_index = start + len(block)
        self._routes.pass_turn(self.topic, self._turn)

    def _without_keys(self, block: Sequence[bytes], start: int) -> Iterator[SpreadPiece]:
        turn, count = self._turn, self._used_by(block)
        self._turn = (turn + (len(block) if count == self._partitions else min(count, len(block)))) % self._partitions
        for first in range(min(count, len(block))):
            indexes = range(start + first, start + len(block), count)
            partition = (turn + first) % self._partitions
            yield SpreadPiece(partition, indexes, self._forms[partition], block[first::count])

    def _used_by(self, block: Sequence[bytes]) -> int:
        """Return over how many partitions a block without keys is spread."""
        if self._partitions <= FEW:
            return self._partitions
        runs = (len(block) * self.overhead + sum(map(len, block))) // LEAST_RUN
        return min(self._partitions, max(FEW, runs))

    def _by_key(self, block: Sequence[bytes], start: int) -> list[SpreadPiece]:
        routes = list(map(self._of_keys.__getitem__, self._take_keys(start, len(block))))
        positions: list[list[int]] = [[] for _ in range(self._partitions)]  # in the block, by partition
        deque(map(list.append, map(positions.__getitem__, map(_partition, routes)), range(len(routes))), maxlen=0)
        pieces: list[SpreadPiece] = []
        for partition, mine in enumerate(positions):
            forms, bodies = list(map(_form, _picked(routes, mine))), _picked(block, mine)
            indexes = list(map(start.__add__, mine)) if start else mine
            pieces += [
                SpreadPiece(partition, indexes[some], MixedPublishForm(forms[some]), bodies[some])
                for some in _cuts(forms, bodies)
            ]
        return sorted(pieces, key=lambda piece: piece.indexes[0])

    def _take_keys(self, start: int, count: int) -> list[str | None]:
        if self._all_keys is not None:
            return self._all_keys[start : start + count]
        keys, self._keys = self._keys or [], []
        return keys

    def _route(self, key: str | None) -> tuple[int, FormParts]:
        """Return where a message goes, and its form; without a key to the next partition in turn."""
        if key is not None:
            partition = partition_of(key, self._partitions)
            return partition, self._form(partition, key).parts
        partition, self._turn = self._turn, (self._turn + 1) % self._partitions
        return partition, self._forms[partition].parts

    def _form(self, partition: int, key: str | None) -> PublishForm:
        return PublishForm(self.topic, partition, key, self._properties, self._timestamp_ms)


def _picked(items: Sequence[Any], positions: Sequence[int]) -> Sequence[Any]:
    """Return the items at these positions."""
    if len(positions) < 2:
        return [items[position] for position in positions]
    return itemgetter(*positions)(items)  # type: ignore[no-any-return]  # a tuple of them


def _cuts(forms: Sequence[FormParts], bodies: Sequence[bytes]) -> Iterator[slice]:
    """Yield how to cut what goes to one partition into pieces of about RUN bytes: all may have the same key."""
    step = len(bodies) // SAMPLE + 1  # the size of some says how long all are, nearly enough
    size = step * (sum(map(_overhead, forms[::step])) + sum(map(len, bodies[::step])))
    count = min(len(bodies) * RUN // max(size, RUN) + 1, MOST_MESSAGES)
    for first in range(0, len(bodies), count):
        yield slice(first, first + count)


class _Watched:
    """An asynchronous iterator that calls `taken` for each item. Not a generator: those have to be closed."""

    def __init__(self, items: AsyncIterable[Body], taken: Callable[[], None]) -> None:
        self._items, self._taken = aiter(items), taken

    def __aiter__(self) -> _Watched:
        return self

    async def __anext__(self) -> Body:
        item = await anext(self._items)
        self._taken()
        return item


class SinglePartition:
    """How one publish_many sends all its bodies to one partition."""

    def __init__(self, form: PublishForm, partition: int) -> None:
        self._form, self._partition = form, partition
        self.topic, self.overhead, self.block_bytes = form.topic, form.overhead, RUN

    def pieces(self, block: Sequence[bytes]) -> Iterator[SpreadPiece]:
        """Yield what to send for the next bodies."""
        yield SpreadPiece(self._partition, range(len(block)), self._form, block)


def partition_of(key: str, partitions: int) -> int:
    """Return the partition to which a key belongs."""
    return crc32(key.encode()) % partitions


def check_keys(partition: int | None, key: str | None, keys: object) -> None:
    """Raise ValueError for what contradicts itself."""
    if keys is not None and not (partition is None and key is None):
        raise ValueError("give either keys, or a key or partition for all bodies")
