"""Which dead letters are done is kept in blocks: a change rewrites the blocks that it touches, not all of them."""

from __future__ import annotations

from pathlib import Path

from qb.core.push.dead_letters import BLOCK, DeadLetterReader
from tests.support.stores import open_engine, opened, running

FAR = 50 * BLOCK


async def test_a_change_rewrites_only_the_blocks_that_it_touches(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        reader = DeadLetterReader(engine.metadata)
        await reader.note_done("s", range(1, FAR))  # letter 0 is not done, so the floor stays
        before = engine.metadata.under("dead/s")
        await reader.note_done("s", [FAR + 7])
        after = engine.metadata.under("dead/s")
        changed = {key for key in after if after[key] != before.get(key)}
        assert changed == {"dead/s", f"dead/s/{FAR // BLOCK}"}
        assert len(after) == 52


async def test_what_is_done_is_known_again_and_blocks_go_when_the_floor_has_passed_them(tmp_path: Path) -> None:
    numbers = {1, 2, BLOCK - 1, BLOCK, BLOCK + 5, 3 * BLOCK}
    async with opened(tmp_path) as engine:
        reader = DeadLetterReader(engine.metadata)
        await reader.note_done("s", numbers)
    async with running(open_engine(tmp_path)) as engine:
        reader = DeadLetterReader(engine.metadata)
        assert (reader.done("s").floor, reader.done("s").numbers) == (0, numbers)
        await reader.note_done("s", range(2 * BLOCK))
        assert (reader.done("s").floor, reader.done("s").numbers) == (2 * BLOCK, {3 * BLOCK})
        assert set(engine.metadata.under("dead/s")) == {"dead/s", "dead/s/3"} == set(reader.keys("s"))


async def test_what_a_broker_before_wrote_in_one_entry_is_kept(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        await engine.metadata.put("dead/s", {"floor": 4, "numbers": [7, 2 * BLOCK]})
        reader = DeadLetterReader(engine.metadata)
        assert {7, 2 * BLOCK, 3} <= {number for number in (3, 5, 7, 2 * BLOCK) if number in reader.done("s")}
        await reader.note_done("s", [4])
        assert (reader.done("s").floor, reader.done("s").numbers) == (5, {7, 2 * BLOCK})
