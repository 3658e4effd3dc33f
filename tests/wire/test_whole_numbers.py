"""What is a number, and what only looks like one."""

from __future__ import annotations

from typing import Annotated

import msgspec
import pytest

from qb.core.wire.whole_numbers import from_text, whole_number


@pytest.mark.parametrize(
    ("text", "number"), [("0", 0), ("-5", -5), ("007", 7), (str(2**63 - 1), 2**63 - 1), (str(-(2**63)), -(2**63))]
)
def test_digits_with_at_most_one_minus_are_a_number(text, number):
    assert whole_number(text) == number


@pytest.mark.parametrize(
    "text", ["", "-", "²", "٣", "--5", "+5", "5_0", " 5", "5 ", "5\n", "1e3", "0x10", "5.0", str(2**63), "9" * 5_000]
)
def test_what_only_looks_like_a_number_is_none(text):
    assert whole_number(text) is None


def test_bounds_belong_to_what_is_allowed():
    assert [whole_number(text, least=1, most=3) for text in ("0", "1", "3", "4")] == [None, 1, 3, None]


class Arguments(msgspec.Struct, kw_only=True):
    """What a peer may give as text."""

    whole: int = 0
    perhaps: Annotated[int | None, msgspec.Meta(description="or none")] = None
    bounded: Annotated[int, msgspec.Meta(ge=0, le=10)] = 0
    place: int | str = 0
    seconds: float = 0.0
    on: bool = False


@pytest.mark.parametrize("name", ["whole", "perhaps", "bounded"])
@pytest.mark.parametrize("text", ["1e0", "5.0", "", "²", "+5", "5_0", "0x1", "true", str(2**63), "9" * 5_000])
def test_arguments_in_text_take_what_is_a_whole_number_and_nothing_else(name: str, text: str) -> None:
    assert getattr(from_text(Arguments, {name: "7"}), name) == 7
    with pytest.raises(msgspec.ValidationError, match=rf"Expected `int`, got `str` - at `\$\.{name}`"):
        from_text(Arguments, {name: text})


def test_arguments_in_text_that_are_no_whole_numbers_are_read_as_ever() -> None:
    found = from_text(Arguments, {"place": "1e3", "seconds": "1e3", "on": "true"})
    assert (found.place, found.seconds, found.on) == ("1e3", 1000.0, True)
    with pytest.raises(msgspec.ValidationError, match="<= 10"):
        from_text(Arguments, {"bounded": "11"})
