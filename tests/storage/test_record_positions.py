"""Positions kept as the bytes of an index are the same numbers."""

from __future__ import annotations

import struct

from hypothesis import given
from hypothesis import strategies as st

from qb.storage.log.record_positions import RecordPositions, words
from qb.storage.log.segment_index import encode

POSITIONS = st.lists(st.integers(0, 2**40), max_size=30).map(sorted)


@given(positions=POSITIONS, data=st.data())
def test_positions_are_the_numbers_that_the_index_was_made_of(positions: list[int], data: st.DataObject) -> None:
    base = data.draw(st.integers(0, positions[0] if positions else 0))
    found, numbers = RecordPositions(encode(positions, 7)).since(base), [position - base for position in positions]
    assert (len(found), list(found)) == (len(numbers), numbers)
    assert [found[place] for place in range(-len(numbers), len(numbers))] == numbers + numbers
    assert [found.time(place) for place in range(len(numbers))] == [7] * len(numbers)
    borders = st.none() | st.integers(-31, 31)
    cut = slice(data.draw(borders), data.draw(borders), data.draw(st.sampled_from([None, 1, 2, -1])))
    assert list(found[cut]) == numbers[cut]
    count = data.draw(st.integers(0, len(numbers)))
    assert list(found.first(count)) == numbers[:count]


@given(positions=POSITIONS)
def test_words_say_how_far_each_is_from_the_first(positions: list[int]) -> None:
    for kept in (RecordPositions(encode(positions, 7)), [position % 2**32 for position in positions]):
        found = struct.unpack(f">{len(positions)}I", words(kept))
        assert [(word - found[0]) % 2**32 for word in found] == [(each - positions[0]) % 2**32 for each in positions]
