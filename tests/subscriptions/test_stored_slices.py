"""The stored bytes of chosen messages."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from qb.core.push.stored_slices import KnownKeys, collect_recent, cut
from qb.core.wire.frames import MessageType, data_frames, decode_properties, encode_frame
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
    assert KnownKeys().of(0, a_chunk(0, batches), len(bodies)) == [body.hex() if body else None for body in bodies]


class NoLog:
    """Has nothing in memory."""

    def read_recent(self, offset, max_bytes):
        return None


class Log:
    """Has one chunk after the other in memory."""

    def __init__(self, *chunks):
        self.chunks = chunks

    def read_recent(self, offset, max_bytes):
        return next(chunk for chunk in self.chunks if chunk.first_offset <= offset < chunk.next_offset)


@given(batches, batches, st.data())
def test_runs_of_several_chunks_are_collected_in_the_order_in_which_they_are_named(one, other, data):
    first = a_chunk(7, one)
    second = a_chunk(first.next_offset, other)
    bodies = [body for batch in [*one, *other] for body in batch]
    starts = st.tuples(st.integers(7, second.next_offset - 1), st.integers(1, 4), st.integers(1, 3))
    named = data.draw(st.lists(starts, min_size=1, max_size=8))
    runs = [range(start, min(start + count * step, second.next_offset), step) for start, count, step in named]
    frames = collect_recent(Log(first, second), runs, data.draw(st.sampled_from([None, first, second])))
    found = [(frame.sequence_number, frame.body) for frame in data_frames(frames)]
    assert found == [(offset, bodies[offset - 7]) for run in runs for offset in run]


@given(batches, st.integers(0, 100), st.data())
def test_scattered_runs_are_cut_in_one_go_and_in_order(batches, base, data):
    chunk = a_chunk(base, batches)
    bodies = [body for batch in batches for body in batch]
    chosen = data.draw(st.lists(st.booleans(), min_size=len(bodies), max_size=len(bodies)).filter(any))
    runs = [range(base + at, base + at + 1) for at, taken in enumerate(chosen) if taken]
    frames = collect_recent(NoLog(), runs, chunk)
    found = [(frame.sequence_number, frame.body) for frame in data_frames(frames)]
    assert found == [(run.start, bodies[run.start - base]) for run in runs]


def test_runs_that_reach_beyond_the_chunk_are_read():
    chunk = a_chunk(5, [[b"a", b"b", b"c"]])
    assert collect_recent(NoLog(), [range(5, 6), range(7, 9)], chunk) is None
    assert collect_recent(NoLog(), [range(4, 6), range(7, 8)], chunk) is None


names = st.sampled_from(["key", "kei", "key2", "monkey", "topic"])
values = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=5)


@given(st.lists(st.tuples(names, values), max_size=5))
def test_the_key_is_the_one_that_decoding_all_properties_gives(properties):
    encoded = b"".join(f"{name}={value}\0".encode() for name, value in properties)
    frame = encode_frame(MessageType.DATA, 0, 1, encoded, b"body")
    assert KnownKeys().of(0, StoredChunk(0, frame, [0], len(frame)), 1) == [decode_properties(encoded).get("key")]


@given(st.lists(st.lists(st.tuples(names, values), max_size=3), min_size=1, max_size=6), st.data())
def test_keys_are_the_same_whichever_messages_were_asked_for_together_and_before(messages, data):
    frames, positions, keys = b"", [], []
    for offset, properties in enumerate(messages):
        encoded = b"".join(f"{name}={value}\0".encode() for name, value in properties)
        positions.append(len(frames))
        frames += encode_frame(MessageType.DATA, offset, 1, encoded, b"body")
        keys.append(decode_properties(encoded).get("key"))
    known = KnownKeys()
    for _ in range(3):
        start = data.draw(st.integers(0, len(messages) - 1))
        count = data.draw(st.integers(1, len(messages) - start))
        partition = data.draw(st.integers(0, 1))
        chunk = StoredChunk(start, frames, positions[start:], len(frames))
        assert known.of(partition, chunk, count) == keys[start : start + count]


def test_keys_of_messages_that_are_asked_for_again_are_not_read_again():
    chunk, known = a_chunk(5, [[b"a", b"b", b"c"]]), KnownKeys()
    assert known.of(0, chunk, 3) == ["61", "62", "63"]
    unreadable = StoredChunk(6, b"", [0, 0], 0)
    assert known.of(0, unreadable, 2) == ["62", "63"]
