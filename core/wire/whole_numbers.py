"""Whole numbers that peers write as text: the one place that says what is a number."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import TypeVar

import msgspec
from msgspec.inspect import IntType, Metadata, NoneType, StructType, Type, UnionType, type_info

T = TypeVar("T", bound=msgspec.Struct)
_WHOLE = re.compile(r"-?[0-9]{1,19}")
LEAST, MOST = -(2**63), 2**63 - 1


def whole_number(text: str, least: int = LEAST, most: int = MOST) -> int | None:
    """Return the number that a text is, or None if it is none or out of bounds.

    Only ASCII digits with at most one minus before them: `²`, `٣`, `--5`, `+5`, `5_0`, ` 5` and 5,000 digits are none.
    """
    if _WHOLE.fullmatch(text) is None:
        return None
    number = int(text)
    return number if least <= number <= most else None


def from_text(kind: type[T], texts: Mapping[str, str]) -> T:
    """Return arguments that came as text, as the properties of a frame and the query of a URL do.

    Raises msgspec.ValidationError, also for what msgspec takes for a whole number and is none, such as `1e3` and `5.0`.
    """
    values: dict[str, str | int] = {**texts}
    for name in _whole_fields(kind) & texts.keys():
        number = whole_number(texts[name])
        if number is None:
            raise msgspec.ValidationError(f"Expected `int`, got `str` - at `$.{name}`")
        values[name] = number
    return msgspec.convert(values, kind, strict=False)


@cache
def _whole_fields(kind: type[msgspec.Struct]) -> frozenset[str]:
    """Return the names, as they are written, of the fields that are whole numbers and nothing else."""
    info = type_info(kind)
    assert isinstance(info, StructType)
    kinds = {field.encode_name: _kinds_of(field.type) for field in info.fields}
    return frozenset(name for name, its in kinds.items() if IntType in its <= {IntType, NoneType})


def _kinds_of(info: Type) -> set[type[Type]]:
    """Return what a value may be."""
    if isinstance(info, Metadata):
        return _kinds_of(info.type)
    if isinstance(info, UnionType):
        return set().union(*map(_kinds_of, info.types))
    return {type(info)}
