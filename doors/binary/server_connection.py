"""The conversation with one peer, bytes in and events out.

Requests come out as frames, a STAGE as the bytes that will be stored. Messages come out as runs: `PublishRun`
says that PUBLISH frames are next and which partition they want; `take_run` turns those with the same one into stored
DATA frames, in their buffer, in one pass.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from qb.core.wire.compression.compressed_frames import Inflater
from qb.core.wire.errors import BadRequest, BrokerError, PeerMisbehaved, UnknownType
from qb.core.wire.frames import (
    HEAD,
    LENGTH,
    MAX_PROPERTIES,
    OVERHEAD,
    TYPE_AND_SEQUENCE,
    Frame,
    MessageType,
    decode_frame,
    decode_properties,
    frame_length,
    too_large,
)
from qb.core.wire.message_rules import LATEST_MS, bad_timestamp
from qb.core.wire.runs.publish_table import MOST_BYTES, as_publishes, read_table
from qb.core.wire.runs.uniform_frames import UniformFrames
from qb.doors.binary.publish_columns import PublishColumns
from qb.doors.binary.publish_routes import PublishRoutes, Route
from qb.storage.engine import AppendRun

DATA, PUBLISH, STAGE = int(MessageType.DATA), int(MessageType.PUBLISH), int(MessageType.STAGE)
PUBLISH_RUN = int(MessageType.PUBLISH_RUN)
_TYPE_SEQUENCE_TIMESTAMP = struct.Struct(">IQQ")
_head_at, _length_at = HEAD.unpack_from, LENGTH.unpack_from  # looked up once: every message needs them
LONG = 16_384  # bytes of a run from which on copying it costs more than a new buffer

_REQUESTS = frozenset(MessageType) - {
    MessageType.DATA,
    MessageType.ACK,
    MessageType.GOODBYE,
    MessageType.DELIVER,
    MessageType.SEAL,
    MessageType.PUBLISH,
    MessageType.PUBLISH_RUN,
}
_COMPRESSIBLE = (PUBLISH, PUBLISH_RUN, STAGE)  # what a COMPRESSED frame may hold


class PublishRun(NamedTuple):
    """PUBLISH frames are next: answer with take_run() or skip_run()."""

    first_number: int
    route: Route


class StageFrame(NamedTuple):
    """A whole STAGE frame as it came; its body has not been looked at."""

    number: int
    properties: Mapping[str, str]
    data: bytes
    body_at: int  # where in `data` the body begins


class RefusedFrame(NamedTuple):
    """One frame that was passed over, and why; the conversation goes on."""

    number: int
    error: BrokerError


class InflatedPortion(NamedTuple):
    """A portion of a COMPRESSED frame was inflated: its frames are the next events."""

    size: int


Event = Frame | PublishRun | StageFrame | RefusedFrame | InflatedPortion


@lru_cache(maxsize=256)
def _head_with_properties(properties_length: int) -> struct.Struct:
    """Return a struct that unpacks a frame up to its body in one go."""
    return struct.Struct(f">IIQQI{properties_length}sI")


class ServerConnection:
    """One peer as we know it: its unread bytes, and whether anything after them can be trusted."""

    def __init__(self, max_message_size: int) -> None:
        self._max_body = max_message_size
        self._max_frame = max_message_size + MAX_PROPERTIES + OVERHEAD
        self._unread = bytearray()
        self._at = 0  # bytes of _unread before this are done with
        self._routes = PublishRoutes()
        self._last_route: tuple[bytes, Route | None] = b"", None  # properties of the last publish, and their route
        self._columns: PublishColumns | None = None  # of the PUBLISH_RUN at the front, which next_event() has checked
        self._closed = False
        self._inflater: Inflater | None = None  # of a COMPRESSED frame: `_unread` has what it gives, then `_behind`
        self._behind = bytearray()

    def receive(self, data: bytes | memoryview) -> None:
        """Keep bytes for next_event() to parse."""
        if self._inflater is not None:
            self._behind += data
            return
        self._append(data)

    def _append(self, data: bytes | memoryview) -> None:
        if self._at == len(self._unread):
            self._unread, self._at = bytearray(data), 0
            return
        if self._at:
            del self._unread[: self._at]
            self._at = 0
        self._unread += data

    @property
    def unread(self) -> int:
        """How many received or inflated bytes are not yet part of an event."""
        unread = len(self._unread) - self._at
        return unread if self._inflater is None else unread + self._inflater.left + len(self._behind)

    def discard(self) -> None:
        """Let go of what has come, and take nothing more."""
        self._unread, self._at, self._closed = bytearray(), 0, True
        self._behind, self._inflater, self._columns = bytearray(), None, None

    def inflate(self, inflater: Inflater) -> None:
        """Return the frames of a COMPRESSED frame, which was the last event, before what was received behind it."""
        self._behind = self._unread[self._at :]
        self._unread, self._at, self._inflater = bytearray(), 0, inflater

    def _inflate_more(self) -> Event | None:
        """The frames that are here are done with: inflate more of them, or go on with what was received behind."""
        if self._inflater is None or self._closed:
            return None
        try:
            if self._inflater.left:
                portion = self._inflater.read()
                self._append(portion)
                return InflatedPortion(len(portion))
            if self._at < len(self._unread):
                raise PeerMisbehaved("a compressed frame does not hold whole frames")
        except PeerMisbehaved:
            self._closed = True
            raise
        self._unread, self._at, self._inflater, self._behind = self._behind, 0, None, bytearray()
        return self.next_event()

    def peek_number(self) -> int:
        """Return the sequence number of the frame at the front, or 0 if it has not arrived."""
        return HEAD.unpack_from(self._unread, self._at)[2] if len(self._unread) - self._at >= HEAD.size else 0

    def next_event(self) -> Event | None:
        """Return the next event, or None if it needs more bytes.

        Raises PeerMisbehaved, and then stays closed.
        """
        buffer, at = self._unread, self._at
        unread = len(buffer) - at
        if unread < LENGTH.size or self._closed:
            return self._inflate_more()
        if unread >= OVERHEAD:
            # A publish with properties that were seen before, which most frames are.
            total, kind, number, timestamp, length = _head_at(buffer, at)
            body_length = total - OVERHEAD - length
            if kind == PUBLISH and total <= unread and 0 <= body_length <= self._max_body and timestamp <= LATEST_MS:
                properties_at = at + HEAD.size
                known, route = self._last_route
                if len(known) != length or not buffer.startswith(known, properties_at):
                    known = bytes(buffer[properties_at : properties_at + length])
                    route = self._routes.get(known)
                    if route is not None:
                        self._last_route = known, route
                if route is not None and _length_at(buffer, properties_at + length)[0] == body_length:
                    return PublishRun(number, route)
        try:
            (total,) = LENGTH.unpack_from(buffer, at)
            if not OVERHEAD <= total <= self._max_frame:
                raise PeerMisbehaved(f"total_length {total} is not between {OVERHEAD} and {self._max_frame}")
            return self._event() if unread >= total else self._inflate_more()
        except PeerMisbehaved:
            self._closed = True
            raise

    def _event(self) -> Event:
        """Return what the whole frame at the front is."""
        total, kind, number, timestamp, properties_length = HEAD.unpack_from(self._unread, self._at)
        body_length = total - OVERHEAD - properties_length
        if self._inflater is not None and kind not in _COMPRESSIBLE:
            raise PeerMisbehaved(
                f"a compressed frame holds a frame of type {kind}, not publishes or STAGE frames alone"
            )
        if kind == STAGE and properties_length <= MAX_PROPERTIES:
            return self._stage_frame(total, number, properties_length, body_length)  # its messages have the limit
        if kind == PUBLISH_RUN:
            return self._publish_run(total)
        excess = too_large(body_length, properties_length, self._max_body)
        if excess:
            return self._pass_over(excess)
        if kind == PUBLISH:
            if timestamp > LATEST_MS:
                return self._pass_over(BadRequest(bad_timestamp(timestamp)))
            return self._publishes(number, properties_length, body_length)
        frame = decode_frame(self._unread, self._at)
        if kind not in _REQUESTS:
            return self._pass_over(UnknownType(f"a peer cannot send a frame of type {kind}"))
        self._at += total
        return frame

    def _pass_over(self, error: BrokerError) -> RefusedFrame:
        decode_frame(self._unread, self._at)  # its lengths must add up even so
        total, _, number, _, _ = HEAD.unpack_from(self._unread, self._at)
        self._at += total
        return RefusedFrame(number, error)

    def _publishes(self, number: int, properties_length: int, body_length: int) -> Event:
        properties_at = self._at + HEAD.size
        body_length_at = properties_at + properties_length
        if body_length < 0 or LENGTH.unpack_from(self._unread, body_length_at)[0] != body_length:
            decode_frame(self._unread, self._at)  # raises, with the words
        encoded = bytes(self._unread[properties_at:body_length_at])
        try:
            return PublishRun(number, self._routes[encoded])
        except BadRequest as error:
            return self._pass_over(error)

    def _publish_run(self, total: int) -> Event:
        """Return the publishes of a PUBLISH_RUN as one run if they are one, else what the first of them is."""
        if total > MOST_BYTES:
            raise PeerMisbehaved(f"a PUBLISH_RUN frame has {total} bytes, and {MOST_BYTES} at most are allowed")
        with memoryview(self._unread)[self._at : self._at + total] as frame:
            table = read_table(frame)
            columns = PublishColumns.of(frame, table, self._max_body)
        if columns is not None and (route := self._shared_route(columns)) is not None:
            self._columns = columns
            return PublishRun(table.first_number, route)
        self._take_apart(total)
        event = self.next_event()
        assert event is not None, "its frames are whole"
        return event

    def _shared_route(self, columns: PublishColumns) -> Route | None:
        """Return the route of the first message, if all others go the same way."""
        routes, found = self._routes, columns.all_properties()
        try:
            route = routes[columns.first_properties()]
            others = {routes[each] for each in found or ()}
        except (BadRequest, PeerMisbehaved):
            return None
        columns.has_one_key = len(others) == 1
        return route if {each[:2] for each in others} == {route[:2]} else None

    def _take_apart(self, total: int) -> None:
        """Have the PUBLISH frames of the PUBLISH_RUN at the front come one by one."""
        with memoryview(self._unread)[self._at : self._at + total] as frame:
            publishes = as_publishes(frame)
        self._unread[self._at : self._at + total] = publishes

    def _stage_frame(self, total: int, number: int, properties_length: int, body_length: int) -> StageFrame:
        data = bytes(memoryview(self._unread)[self._at : self._at + total])
        body_at = OVERHEAD + properties_length
        if body_length < 0 or LENGTH.unpack_from(data, body_at - LENGTH.size)[0] != body_length:
            decode_frame(data)  # raises, with the words
        properties = decode_properties(data[HEAD.size : HEAD.size + properties_length])
        self._at += total
        return StageFrame(number, properties, data, body_at)

    def take_run(
        self,
        route: Route,
        first_offset: int,
        now_ms: int,
        by_key: bool = False,
        limit: int | None = None,
        producer_id: int = 0,
    ) -> AppendRun:
        """Return the PUBLISH frames at the front as DATA frames with offsets from `first_offset` on.

        Call it when next_event() has returned a PublishRun, with its route. A run goes on while the numbers follow by
        one and topic and partition (and with `by_key` also the key) stay the same.
        """
        if self._columns is not None and (run := self._take_columns(first_offset, now_ms, by_key, limit, producer_id)):
            return run
        start, end = self._at, len(self._unread)
        total, _, first_number, timestamp, _ = _head_at(self._unread, start)
        if end - start == total:  # one alone, which next_event() has looked at
            return AppendRun(
                self._take_one(first_offset, timestamp or now_ms), (0,), first_offset, producer_id, first_number
            )
        stop = first_number + (limit or end)  # the number of a frame that surely does not belong to the run
        uniform = self._take_uniform(first_offset, now_ms, limit)
        others = self._take_others(
            route, first_number + len(uniform), stop, first_offset - first_number, now_ms, by_key
        )
        positions = [*uniform, *(others if not start else [each - start for each in others])] if others else uniform
        return AppendRun(self._give_away(start), positions, first_offset, producer_id, first_number)

    def _take_columns(
        self, first_offset: int, now_ms: int, by_key: bool, limit: int | None, producer_id: int
    ) -> AppendRun | None:
        """Return the whole PUBLISH_RUN at the front as a run; None: its frames were taken apart and come one by one."""
        columns, self._columns = self._columns, None
        assert columns is not None
        total = frame_length(self._unread, self._at)
        if (limit and columns.count > limit) or (by_key and not columns.has_one_key):
            self._take_apart(total)
            return None
        self._at += total
        return columns.numbered(first_offset, now_ms, producer_id)

    def _take_one(self, offset: int, timestamp: int) -> bytes | bytearray:
        """Return the one frame that is there as a DATA frame."""
        start = self._at
        _TYPE_SEQUENCE_TIMESTAMP.pack_into(self._unread, start + 4, DATA, offset, timestamp)
        self._at = len(self._unread)
        return self._give_away(start)

    def _take_uniform(self, first_offset: int, now_ms: int, limit: int | None) -> Sequence[int]:
        """Number the frames at the front that have one length and one head, all at once; returns their positions."""
        buffer, at = self._unread, self._at
        rows = UniformFrames.at(buffer, at, len(buffer), limit)
        total, _, _, timestamp, length = _head_at(buffer, at)
        if not rows or not (rows := rows.sharing_head(_head_with_properties(length).size)):
            return ()
        rows.give_head(HEAD.pack(total, DATA, first_offset, timestamp or now_ms, length))
        self._at = rows.end
        return rows.positions

    def _take_others(
        self, route: Route, first_number: int, stop: int, shift: int, now_ms: int, by_key: bool
    ) -> list[int]:
        """Number the frames at the front that belong to a run, one by one; returns where in the buffer they are.

        The first has this number, and the last one below `stop`; offsets are numbers and `shift`.
        """
        buffer, at, end, max_body = self._unread, self._at, len(self._unread), self._max_body
        publish, data, latest = PUBLISH, DATA, LATEST_MS
        patch, patch_with_time = TYPE_AND_SEQUENCE.pack_into, _TYPE_SEQUENCE_TIMESTAMP.pack_into
        routes, same = self._routes, route[:2]
        first, known = b"", set[bytes]()  # properties that belong to the run
        length, head = -1, _head_with_properties(0)
        unpack, size = head.unpack_from, head.size
        found: list[int] = []
        keep = found.append
        for expected in range(first_number, stop):
            if end - at < size:
                break
            total, kind, number, timestamp, properties_length, properties, body_length = unpack(buffer, at)
            following = at + total
            if number != expected or kind != publish or following > end:
                break
            if properties_length != length:
                if properties_length > min(total - OVERHEAD, MAX_PROPERTIES):
                    break
                length = properties_length
                head = _head_with_properties(length)
                unpack, size = head.unpack_from, head.size
                _, _, _, _, _, properties, body_length = unpack(buffer, at)
            if properties != first and properties not in known:  # still the same run if they have the same route
                try:
                    other = routes[properties]
                except (BadRequest, PeerMisbehaved):
                    break  # next_event() refuses it
                if other[:2] != same or (by_key and other.key != route.key):
                    break
                known.add(properties)
                first = first or properties
            if total != size + body_length or body_length > max_body:
                break  # next_event() finds the words for it
            if not timestamp:
                patch_with_time(buffer, at + 4, data, number + shift, now_ms)
            elif timestamp <= latest:
                patch(buffer, at + 4, data, number + shift)
            else:
                break
            keep(at)
            at = following
        self._at = at
        return found

    def _give_away(self, start: int) -> bytes | bytearray:
        """Return the bytes from `start` to the current position. A long run is not copied; what follows it is."""
        buffer, end = self._unread, self._at
        if start or end < LONG:
            return bytes(memoryview(buffer)[start:end])
        self._unread, self._at = buffer[end:], 0
        del buffer[end:]
        return buffer

    def skip_run(self, route: Route, limit: int | None = None) -> int:
        """Pass over the run that take_run() would return; returns how many frames it had."""
        return len(self.take_run(route, 0, 0, limit=limit).positions)
