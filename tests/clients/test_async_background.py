"""The block that an async client's tasks live in ends when it is left, whatever its tasks do meanwhile."""

from __future__ import annotations

import trio
import trio.testing

from qb.clients.aio.background import AsyncBackground


async def test_a_shielded_task_that_starts_while_the_block_is_left_ends_too() -> None:
    background = AsyncBackground()
    began: list[str] = []

    async def shielded(name: str) -> None:
        with background.shield():
            began.append(name)
            await trio.sleep_forever()

    async def starts_another() -> None:
        try:
            await trio.sleep_forever()
        finally:
            background.start("late", shielded, "late")

    with trio.fail_after(5):
        await background.open()
        background.start("early", shielded, "early")
        background.start("starter", starts_another)
        await trio.testing.wait_all_tasks_blocked()
        await background.close()
    assert began == ["early", "late"]
