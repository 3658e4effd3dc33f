"""An Arrow record batch, read as messages to be."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_qb.arrow.row_columns import Columns
from pyspark_qb.options.spark_errors import BadColumns

BYTES = pa.large_binary()  # 64-bit positions: the frames of a batch may be longer than the batch
JSON = msgspec.json.Encoder(decimal_format="number")


@dataclass(frozen=True)
class Rows:
    """The same rows column by column. None: there is no such column; null in one: this row does not say."""

    bodies: pa.LargeBinaryArray
    keys: pa.LargeBinaryArray | None
    partitions: np.ma.MaskedArray | None
    timestamps: np.ma.MaskedArray | None  # milliseconds
    properties: pa.MapArray | None
    topics: list[str]
    topic_of: np.ndarray | None  # for each row its index in `topics`; None: they all go to the only one

    def __len__(self) -> int:
        return len(self.bodies)


def read_rows(batch: pa.RecordBatch, columns: Columns, topic: str | None) -> Rows:
    """Return the rows of a batch; `topic` is for those that name none. Raises BadColumns."""

    def column(position: int | None) -> pa.Array | None:
        return None if position is None else batch.column(position)

    topics, topic_of = _topics(column(columns.topic), topic)
    return Rows(
        bodies=_json(batch) if columns.value is None else _bodies(batch.column(columns.value)),
        keys=_keys(column(columns.key)),
        partitions=_numbers(column(columns.partition)),
        timestamps=_milliseconds(column(columns.timestamp)),
        properties=column(columns.properties),
        topics=topics,
        topic_of=topic_of,
    )


def _bodies(values: pa.Array) -> pa.LargeBinaryArray:
    if values.null_count:
        raise BadColumns("a row has no value: column value is null; filter such rows out, or coalesce it")
    return values.cast(BYTES)


def _json(batch: pa.RecordBatch) -> pa.LargeBinaryArray:
    """Return each row as a JSON object that has all its columns, null ones included."""
    rows = batch.to_pylist(maps_as_pydicts="strict")
    try:
        return pa.array([JSON.encode(row) for row in rows], BYTES)
    except (TypeError, msgspec.MsgspecError) as error:
        raise BadColumns(f"a row cannot be written as JSON: {error}") from None


def _keys(keys: pa.Array | None) -> pa.LargeBinaryArray | None:
    if keys is None:
        return None
    try:
        return keys.cast(pa.large_string()).cast(BYTES)
    except pa.ArrowInvalid:
        raise BadColumns("column key holds bytes that are not UTF-8 text") from None


def _numbers(numbers: pa.Array | None) -> np.ma.MaskedArray | None:
    """Return whole numbers, masked where they are null."""
    if numbers is None:
        return None
    absent = numbers.is_null().to_numpy(zero_copy_only=False)
    return np.ma.array(numbers.cast(pa.int64()).fill_null(0).to_numpy(), mask=absent)


def _milliseconds(times: pa.Array | None) -> np.ma.MaskedArray | None:
    if times is not None and pa.types.is_timestamp(times.type):
        times = times.cast(pa.timestamp("ms", times.type.tz), safe=False)  # what is finer than a ms is cut off
    found = _numbers(times)
    if found is not None and (found < 0).any():
        raise BadColumns("column timestamp holds a time before 1970")
    return found


def _topics(names: pa.Array | None, topic: str | None) -> tuple[list[str], np.ndarray | None]:
    """Return the topics that the rows name, and for each row which of them."""
    if names is None:
        assert topic is not None, "columns_of() has seen to it"
        return [topic], None
    if names.null_count:
        if topic is None:
            raise BadColumns('a row has no topic: column topic is null, and there is no option("topic", ...)')
        names = pc.fill_null(names, topic)
    coded = names.dictionary_encode()
    return coded.dictionary.to_pylist(), coded.indices.to_numpy()
