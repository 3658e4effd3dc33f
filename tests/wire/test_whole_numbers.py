"""What is a number, and what only looks like one."""

from __future__ import annotations

import pytest

from qb.core.wire.whole_numbers import whole_number


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
