"""However many cursors there are, a full garbage collection walks few of them."""

from __future__ import annotations

import gc

from qb.core.push import kept_cursors
from tests.support.push_peers import a_topic


async def test_cursors_are_taken_out_of_the_sight_of_the_garbage_collector_when_many_have_come(a_broker, monkeypatch):
    frozen: list[str] = []
    monkeypatch.setattr(kept_cursors, "FREEZE_AT", 10)
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append("once"))
    async with a_broker() as connect:
        peer = await a_topic(connect, partitions="4")
        for number in range(2):
            await peer.call("create_subscription", subscription_id=f"s{number}", topic="a")
        assert not frozen
        await peer.call("fork", subscription_id="s0", new_id="s2")
        assert len(frozen) == 1
        await peer.call("add_partitions", topic="a", partitions=8)
        assert len(frozen) == 2
