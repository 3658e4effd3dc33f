"""The stored bytes of chosen messages."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from qb.core.push.stored_slices import cut, keys_of
from qb.core.wire.frames import MessageType, data_frames, encode_frame
from qb.storage.engine import StoredChunk


def a_chunk(first_offset, batches):
    """Return stored frames: each batch is a list of bodies, and ends with a seal."""
    data, positions, offset = b"", [], first_offset
    for bodies in batches:
        for body in bodies:
            positions.append(len(data))
            key = {"key": body.hex()} if body else {}
            data += encode_frame(MessageType.DATA, offset, 1, {"topic": "t", **key}, body)
            offset += 1
        data += encode_frame(MessageType.SEAL, offset, 1, b"", b"seal")
    return StoredChunk(first_offset, data, positions, len(data))


batches = st.lists(st.lists(st.binary(max_size=9), min_size=1, max_size=6), min_size=1, max_size=5)


@given(batches, st.integers(0, 100), st.data())
def test_a_cut_holds_exactly_the_messages_of_the_run_in_order(batches, base, data):
    chunk = a_chunk(base, batches)
    start = data.draw(st.integers(base, chunk.next_offset - 1))
    stop = data.draw(st.integers(start + 1, chunk.next_offset))
    run = range(start, stop, data.draw(st.integers(1, 4)))
    bodies = [body for batch in batches for body in batch]
    found = [(frame.sequence_number, frame.body) for frame in data_frames(cut(chunk, run))]
    assert found == [(offset, bodies[offset - base]) for offset in run]


@given(batches)
def test_keys_come_in_the_order_of_the_messages(batches):
    bodies = [body for batch in batches for body in batch]
    assert keys_of(a_chunk(0, batches)) == [body.hex() if body else None for body in bodies]
