"""What a relay says is understood however TCP cuts it, and nothing else is taken for a relay."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qb.cluster.relays.relay_protocol import (
    RelayPreamble,
    RelayReader,
    RelayRefused,
    decode_preamble,
    encode_acked,
    encode_data,
    encode_preamble,
)

PIECES = st.lists(st.binary(max_size=40) | st.integers(0, 2**63), max_size=8)


@given(pieces=PIECES, step=st.integers(1, 13))
def test_the_bytes_of_the_peer_come_out_whole_however_they_are_cut(pieces: list[bytes | int], step: int) -> None:
    sent = b"".join(encode_data(each) if isinstance(each, bytes) else encode_acked(each) for each in pieces)
    reader = RelayReader()
    received = b"".join(reader.take(sent[at : at + step]) for at in range(0, len(sent), step))
    assert received == b"".join(each for each in pieces if isinstance(each, bytes))
    assert reader.acked == next((each for each in reversed(pieces) if isinstance(each, int)), 0)


def test_a_piece_of_another_kind_ends_the_relay() -> None:
    with pytest.raises(RelayRefused, match="kind 7"):
        RelayReader().take(b"\7\0\0\0\1x")


def test_the_first_line_says_whom_the_relay_speaks_for() -> None:
    preamble = RelayPreamble("main", 7, "http", "10.0.0.9", 50123, "ops")
    line = encode_preamble(preamble)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert decode_preamble(line) == preamble


@pytest.mark.parametrize(
    "line", [b"GET / HTTP/1.1\r\n", b"QB-RELAY 2 {}\n", b"QB-RELAY 1 {]\n", b"QB-RELAY 1 {}\n", b"\xff"]
)
def test_any_other_first_line_is_refused(line: bytes) -> None:
    with pytest.raises(RelayRefused):
        decode_preamble(line)
