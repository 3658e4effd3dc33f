"""Rows to stored DATA frames, in bulk.

No Python runs for a row: numpy fills the heads of all frames, and one join of Arrow's puts heads, properties and bodies
together. Frames that have their length and their properties in common are the rows of one table.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_qb.arrow.rows import BYTES, Rows
from pyspark_qb.options.spark_errors import BadColumns
from qb.clients.protocol.client_errors import MessageTooLarge
from qb.clients.protocol.publish_frames import check_size
from qb.core.wire.errors import BadRequest, Code
from qb.core.wire.frames import MAX_PROPERTIES, OVERHEAD, RESERVED, MessageType, encode_head, encode_properties
from qb.core.wire.message_rules import reserved_property

# qb.core.wire.frames.HEAD as numpy knows it
HEAD = np.dtype([("total", ">u4"), ("type", ">u4"), ("sequence", ">u8"), ("timestamp", ">u8"), ("properties", ">u4")])
LENGTH = np.dtype(">u4")
TIME, TIME_AT = ">u8", 16  # the timestamp, and where in a head it stands


def encode(rows: Rows, now_ms: int, limit: int, partitions: np.ndarray | None = None) -> pa.LargeBinaryArray:
    """Return the frame of each row; `now_ms` is for rows without a time, `limit` the longest body that is allowed.

    With `partitions` each frame says where it goes, as a PUBLISH has to. Raises BadColumns, MessageTooLarge.
    """
    texts, bodies = _properties(rows, partitions), rows.bodies
    text_lengths, body_lengths = _lengths(texts), _lengths(bodies)
    _check_sizes(text_lengths, bodies[int(body_lengths.argmax())], limit)
    if isinstance(texts, pa.Scalar) and 0 < body_lengths[0] == body_lengths.min() == body_lengths.max():
        return _uniform(rows, texts.as_py(), int(body_lengths[0]), now_ms)
    heads = np.zeros(len(rows), HEAD)
    heads["total"] = OVERHEAD + text_lengths + body_lengths
    heads["type"] = MessageType.DATA
    heads["timestamp"] = now_ms if rows.timestamps is None else rows.timestamps.filled(now_ms)
    heads["properties"] = text_lengths
    return _join(_column(heads), texts, _column(body_lengths.astype(LENGTH)), bodies)


def _uniform(rows: Rows, text: bytes, length: int, now_ms: int) -> pa.LargeBinaryArray:
    """Return the frames of rows with the same properties and bodies of one length."""
    same = np.frombuffer(encode_head(MessageType.DATA, 0, now_ms, text, length), np.uint8)
    before, behind = same[:TIME_AT], same[TIME_AT + 8 :]
    kinds = [("before", f"V{len(before)}"), ("timestamp", TIME), ("behind", f"V{len(behind)}"), ("body", f"V{length}")]
    frames = np.empty(len(rows), kinds)
    frames["before"], frames["behind"] = before.view(kinds[0][1]), behind.view(kinds[2][1])
    frames["timestamp"] = now_ms if rows.timestamps is None else rows.timestamps.filled(now_ms)
    _, ends, data = rows.bodies.buffers()
    start = int(np.frombuffer(ends, np.int64)[rows.bodies.offset])
    frames["body"] = np.frombuffer(data, kinds[3][1], len(rows), start)
    return _column(frames)


def _join(*parts: Any) -> Any:
    """Return what the rows of all parts are when they are put one behind the other; null where one of them is."""
    return pc.binary_join_element_wise(*parts, _scalar(b""))


def _scalar(text: bytes) -> pa.LargeBinaryScalar:
    return pa.scalar(text, BYTES)


def _column(records: np.ndarray) -> pa.LargeBinaryArray:
    """Return numpy's records as a column of their bytes."""
    ends = np.arange(len(records) + 1) * records.itemsize
    return pa.Array.from_buffers(BYTES, len(records), [None, pa.py_buffer(ends), pa.py_buffer(records)])


def _lengths(texts: Any) -> Any:
    """Return the length of each text of a column, or of the one text that all rows share."""
    lengths = pc.binary_length(texts)
    return lengths.as_py() if isinstance(lengths, pa.Scalar) else lengths.to_numpy()


def _check_sizes(text_lengths: Any, longest_body: pa.LargeBinaryScalar, limit: int) -> None:
    """Raise MessageTooLarge as a client does, before the broker sees anything."""
    longest = int(np.max(text_lengths))
    if longest > MAX_PROPERTIES:
        raise MessageTooLarge(Code.MESSAGE_TOO_LARGE, f"properties of {longest} bytes are over the limit of 64 KiB")
    check_size(longest_body.as_py(), limit)


def _properties(rows: Rows, partitions: np.ndarray | None) -> Any:
    """Return the encoded properties of each row, or a scalar if they all have the same; `topic` comes first."""
    names = [encode_properties({"topic": topic}) for topic in rows.topics]
    parts = [_scalar(names[0]) if rows.topic_of is None else pa.array(names, BYTES).take(pa.array(rows.topic_of))]
    if partitions is not None:
        parts.append(_join(_scalar(b"partition="), pa.array(partitions).cast(pa.string()).cast(BYTES), _scalar(b"\0")))
    if rows.keys is not None:
        _check_no_nul("key", rows.keys)
        parts.append(_or_nothing(_join(_scalar(b"key="), rows.keys, _scalar(b"\0"))))
    if rows.properties is not None:
        parts.append(_or_nothing(_own_properties(rows.properties)))
    return parts[0] if len(parts) == 1 else _join(*parts)


def _or_nothing(texts: pa.LargeBinaryArray) -> pa.LargeBinaryArray:
    return pc.fill_null(texts, _scalar(b""))


def _own_properties(maps: pa.MapArray) -> pa.LargeBinaryArray:
    """Return `name=value` NUL for each entry of each map, without those whose value is null."""
    for name in maps.keys.unique().to_pylist():
        _check_name(name)
    values = maps.items.cast(BYTES)
    _check_no_nul("properties", values)
    entries = _or_nothing(_join(maps.keys.cast(BYTES), _scalar(b"="), values, _scalar(b"\0")))
    texts = pc.binary_join(pa.ListArray.from_arrays(maps.offsets, entries), _scalar(b""))
    return pc.if_else(maps.is_valid(), texts, _scalar(b""))


def _check_name(name: str) -> None:
    if name in RESERVED:
        raise BadColumns(reserved_property(name))
    try:
        encode_properties({name: ""})
    except BadRequest as error:
        raise BadColumns(f"column properties: {error}") from None


def _check_no_nul(column: str, texts: pa.LargeBinaryArray) -> None:
    """Properties end with NUL, so they cannot hold one."""
    if pc.any(pc.match_substring(texts, "\0")).as_py():
        raise BadColumns(f"column {column} holds a NUL character, which a property cannot carry")
