"""What msgspec finds wrong with a peer's arguments, in words for the person who sent them."""

from __future__ import annotations

import re

_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "object": "an object",
    "array": "a list",
}
_NO_NUMBER = re.compile(rb"NaN|-?Infinity")
_POSITION = re.compile(r"\(byte (\d+)\)")


def in_words(text: str) -> str:
    """Return what msgspec says of a value that is JSON, but not what was asked for."""
    what, _, where = text.partition(" - at `$")
    name = where.removesuffix("`").removeprefix(".")
    if what.startswith("Object missing required field "):
        missing = what.removeprefix("Object missing required field ")
        return f"{missing} is missing in `{name}`" if name else f"{missing} is missing"
    if what.startswith("Object contains unknown field "):
        what = what.removeprefix("Object contains ")
        return f"{what} in `{name}`" if name else what
    if what.startswith("Expected "):
        wanted = re.sub("`([^`]*)`", _kinds, what.removeprefix("Expected ")).replace(", got ", ", not ")
        return f"`{name}` must be {wanted}" if name else f"it must be {wanted}"
    return f"`{name}`: {what}" if name else what


def _kinds(found: re.Match[str]) -> str:
    return " or ".join([_KINDS.get(kind, kind) for kind in found[1].split(" | ")])


def why_no_json(error: Exception, data: bytes | memoryview) -> str:
    """Return why bytes are no JSON, given what msgspec raised for them and that is no ValidationError."""
    if isinstance(error, RecursionError):
        return "invalid JSON: too deeply nested"
    if isinstance(error, UnicodeDecodeError):
        return f"invalid JSON: not UTF-8 (byte {first_bad_byte(bytes(data))})"
    what = str(error).removeprefix("JSON is malformed: ")
    if what.startswith("Input data was truncated"):
        return f"invalid JSON: it ends too early (byte {len(data)})"
    position = _POSITION.search(what)
    number = _NO_NUMBER.match(data, int(position[1])) if position else None
    if position and number:
        return f"invalid JSON: it has no {number[0].decode()}, only finite numbers {position[0]}"
    return f"invalid JSON: {what}"


def first_bad_byte(data: bytes) -> int:
    """Return where bytes stop being UTF-8; msgspec counts from the start of one text in them."""
    try:
        return len(data.decode())
    except UnicodeDecodeError as error:
        return error.start
