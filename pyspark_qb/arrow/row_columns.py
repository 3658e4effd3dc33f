"""Which column of a DataFrame says what about a message."""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.sql import types as t

from pyspark_qb.options.spark_errors import BadColumns
from pyspark_qb.options.spark_options import SinkOptions

TEXT_OR_BYTES = (t.StringType, t.BinaryType, t.CharType, t.VarcharType)
WHOLE = (t.ByteType, t.ShortType, t.IntegerType, t.LongType)

# column -> (the types that it may have, the same in words)
KINDS: dict[str, tuple[tuple[type[t.DataType], ...], str]] = {
    "value": (TEXT_OR_BYTES, "string or binary"),
    "key": (TEXT_OR_BYTES, "string or binary (UTF-8)"),
    "partition": (WHOLE, "a whole number"),
    "timestamp": ((t.TimestampType, t.TimestampNTZType, t.LongType), "timestamp, or bigint (milliseconds since 1970)"),
    "properties": ((t.MapType,), "map<string,string>"),
    "topic": ((t.StringType, t.CharType, t.VarcharType), "string"),
}


@dataclass(frozen=True)
class Columns:
    """The position of each column in a row, or None where there is no such column.

    Without `value` the message is the whole row as JSON, and no column has a meaning of its own.
    """

    value: int | None = None
    key: int | None = None
    partition: int | None = None
    timestamp: int | None = None
    properties: int | None = None
    topic: int | None = None


def columns_of(schema: t.StructType, options: SinkOptions) -> Columns:
    """Return what the columns of a DataFrame mean. Raises BadColumns for one that cannot be published."""
    positions = {field.name.lower(): position for position, field in enumerate(schema.fields)}
    if len(positions) < len(schema.fields):
        raise BadColumns(f"two columns have the same name among {', '.join(schema.fieldNames())}")
    columns = Columns()
    if "value" in positions and options.value_format is None:
        for field in schema.fields:
            _check(field)
        columns = Columns(**positions)
    if options.topic is None and columns.topic is None:
        raise BadColumns('nothing says where the rows go: give option("topic", ...), or a column topic beside value')
    return columns


def _check(field: t.StructField) -> None:
    kind = KINDS.get(field.name.lower())
    if kind is None:
        raise BadColumns(
            f"column {field.name!r} has no meaning beside value; select {', '.join(KINDS)}, "
            'or publish whole rows with option("valueFormat", "json")'
        )
    types, words = kind
    if not isinstance(field.dataType, types) or not _is_text_map(field.dataType):
        raise BadColumns(f"column {field.name!r} must be {words}, not {field.dataType.simpleString()}")


def _is_text_map(kind: t.DataType) -> bool:
    """True for a map of text to text, and for everything that is no map."""
    if not isinstance(kind, t.MapType):
        return True
    return isinstance(kind.keyType, t.StringType) and isinstance(kind.valueType, t.StringType)
