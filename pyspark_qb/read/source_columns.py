"""The columns of what is read."""

from __future__ import annotations

from pyspark.sql import types as t

from pyspark_qb.options.spark_errors import BadColumns

PROPERTIES = "properties"
COLUMNS: dict[str, t.DataType] = {
    "key": t.StringType(),  # null for a message without one
    "value": t.BinaryType(),
    "topic": t.StringType(),
    "partition": t.IntegerType(),
    "offset": t.LongType(),
    "timestamp": t.TimestampType(),  # the publisher's, as in the stored frame
    PROPERTIES: t.MapType(t.StringType(), t.StringType()),
}


def full_schema(include_properties: bool) -> t.StructType:
    """Return the schema of what is read when the user names none."""
    names = [name for name in COLUMNS if include_properties or name != PROPERTIES]
    return t.StructType([t.StructField(name, COLUMNS[name]) for name in names])


def wanted_columns(schema: t.StructType) -> tuple[str, ...]:
    """Return the names of the columns that a schema asks for: any of them in any order. Raises BadColumns."""
    for field in schema.fields:
        if field.name not in COLUMNS:
            raise BadColumns(f"there is no column {field.name!r} to read; there are {', '.join(COLUMNS)}")
        if field.dataType != COLUMNS[field.name] or not field.nullable:
            right = COLUMNS[field.name].simpleString()
            raise BadColumns(f"column {field.name} is read as {right}, nullable; cast it afterwards")
    return tuple(schema.fieldNames())
