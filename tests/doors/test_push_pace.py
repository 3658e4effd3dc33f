"""Deliveries that are compressed hold the event loop for a while only: beyond that they are sent as they are."""

from __future__ import annotations

from math import inf

import pytest

from qb.core.broker.broker_metrics import BrokerMetrics
from qb.core.pacing import current
from qb.core.wire.frames import Frame, MessageType
from qb.doors.binary import peer_compression
from qb.doors.binary.peer_compression import MOST_PUSHED, PeerCompression, PushPace

SIZE = 1 << 20


@pytest.mark.parametrize(("measured", "expected"), [(True, MOST_PUSHED // SIZE), (False, 40)])
def test_so_many_bytes_are_compressed_in_a_pass_for_all_peers_together(monkeypatch, measured, expected):
    monkeypatch.setattr(peer_compression, "_pace", PushPace())
    peers = [PeerCompression(BrokerMetrics(), ("zstd",), SIZE) for _ in range(4)]
    for peer in peers:
        hello = Frame(MessageType.HELLO, 1, 0, {"compression": "zstd", "compressed_answers": "zstd"}, b"")
        assert peer.agree(hello) == {"compression": "zstd", "compressed_answers": "zstd"}
    for now in (1.0, 2.0):
        monkeypatch.setattr(current, "pass_began", now if measured else inf)
        sent = [peer.pushed(bytes(SIZE)) for _ in range(10) for peer in peers]
        assert [len(parts[0]) < SIZE for parts in sent] == [True] * expected + [False] * (40 - expected)
