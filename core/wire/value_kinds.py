"""How the value of a setting is written and read."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Kind:
    """One way to write a value, and the bounds that a number must keep."""

    noun: str
    convert: Callable[[str], Any]  # raises ValueError
    show: Callable[[Any], str] = str  # the inverse of convert
    least: float = -math.inf
    most: float = math.inf

    def within(self, least: float, most: float = math.inf) -> Kind:
        """Return this kind with bounds, both of them included."""
        return replace(self, least=least, most=most)

    def parse(self, text: str) -> Any:
        """Return the value. Raises ValueError when it is not of this kind or out of bounds."""
        value = self.convert(text)
        if isinstance(value, int | float) and not self.least <= value <= self.most:
            raise ValueError(text)
        return value

    @property
    def must_be(self) -> str:
        """What a good value looks like, in words."""
        if self.most < math.inf:
            return f"{self.noun} ({self.show(self.least)} to {self.show(self.most)})"
        if self.least > -math.inf:
            return f"{self.noun} (at least {self.show(self.least)})"
        return self.noun


TRUE_WORDS = ("true", "yes", "on", "1")
FALSE_WORDS = ("false", "no", "off", "0")
SIZE_UNITS: dict[str, int] = {
    prefix + unit: base**power
    for power, prefix in enumerate(("k", "m", "g", "t"), 1)
    for unit, base in (("", 1024), ("ib", 1024), ("b", 1000))
} | {"": 1, "b": 1}


def parse_size(text: str) -> int:
    """Return the bytes meant by `4096`, `512k`, `64MiB` or `1GB`. Raises ValueError."""
    match = re.fullmatch(r"(\d+)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in SIZE_UNITS:
        raise ValueError(text)
    return int(match[1]) * SIZE_UNITS[match[2]]


def show_size(size: int) -> str:
    """Return the size in the largest unit that divides it, so that parse_size() gives it back exactly."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        whole, rest = divmod(size, SIZE_UNITS[unit.lower()])
        if whole and not rest:
            return f"{whole}{unit}"
    return str(size)


def _to_boolean(text: str) -> bool:
    word = text.strip().lower()
    if word not in TRUE_WORDS + FALSE_WORDS:
        raise ValueError(text)
    return word in TRUE_WORDS


def _to_number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


def _show_number(number: float) -> str:
    return str(number).removesuffix(".0")


def _to_text(text: str) -> str:
    if not text.strip():
        raise ValueError(text)
    return text


def one_of(*words: str) -> Kind:
    """Return the kind of value that is one of these words."""

    def convert(text: str) -> str:
        return words[words.index(text.strip().lower())]

    return Kind("one of " + ", ".join(words), convert)


def _to_names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, map(str.strip, text.split(","))))


def _to_word(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,100}", text):
        raise ValueError(text)
    return text


TEXT = Kind("text", _to_text)
WORD = Kind("a name of up to 100 characters of A-Z a-z 0-9 _ -", _to_word)
OPTIONAL_TEXT = Kind("text, or nothing", str)
NAMES = Kind("names, separated by commas", _to_names, ", ".join)
INTEGER = Kind("a whole number", int)
SIZE = Kind("a size such as 4096, 512k, 64MiB or 1GB", parse_size, show_size)
SECONDS = Kind("a number of seconds", _to_number, _show_number)
HOURS = Kind("a number of hours", _to_number, _show_number)
BOOLEAN = Kind("true or false", _to_boolean, lambda value: "true" if value else "false")
LOG_LEVEL = one_of("debug", "info", "warning", "error")
