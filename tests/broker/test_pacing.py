"""Loops over what a peer sent leave room for others, and are counted."""

from __future__ import annotations

import pytest
import trio

from qb.core import pacing
from qb.core.pacing import Turn, counted, portions, spend


async def test_others_run_between_two_portions() -> None:
    turns: list[str] = []

    async def other() -> None:
        turns.append("other")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(other)
        async for portion in portions(range(5), size=2):
            turns += [str(portion)]
    assert turns[0] == "[0, 1]"
    assert turns[-1] == "[4]"
    assert "other" in turns[1:-1]


@pytest.mark.parametrize(("items", "expected"), [((), []), ((1,), [[1]]), ({1: 0, 2: 0, 3: 0}, [[1, 2], [3]])])
async def test_portions_hold_every_item_once_in_order(items, expected) -> None:
    assert [portion async for portion in portions(items, size=2)] == expected


async def test_a_step_counts_what_it_spent_since_its_last_checkpoint() -> None:
    with counted() as step:
        spend(3)
        spend(4)
        assert step.most == 7
        await trio.lowlevel.checkpoint()
        spend(5)
    assert step.most == 7


async def test_a_loop_in_portions_never_counts_more_than_one_of_them() -> None:
    with counted() as step:
        async for _ in portions(range(100), size=10):
            pass
    assert step.most == 10


async def test_what_another_task_does_meanwhile_is_not_counted_against_this_one() -> None:
    async def busy() -> None:
        for _ in range(10):
            spend(6)
            await trio.lowlevel.checkpoint()

    with counted() as step:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(busy)
            nursery.start_soon(busy)
    assert step.most == 6


async def test_a_cancelled_loop_ends_between_two_portions() -> None:
    seen = []
    with trio.CancelScope() as scope:
        async for portion in portions(range(6), size=2):
            seen.append(portion)
            scope.cancel()
    assert seen == [[0, 1]]


@pytest.mark.parametrize(
    ("seconds", "peers_wait", "expected"),
    [
        (pacing.SHARED_TURN / 2, True, False),
        (pacing.SHARED_TURN * 1.1, True, True),
        (pacing.SHARED_TURN * 1.1, False, False),
        (pacing.TURN * 1.1, False, True),
    ],
)
def test_a_turn_is_a_short_one_while_peers_wait_to_be_read(seconds, peers_wait, expected, monkeypatch) -> None:
    assert pacing.is_over(seconds, lambda: peers_wait) is expected
    monkeypatch.setattr(pacing, "perf_counter", lambda: 0.0)
    turn = Turn()
    monkeypatch.setattr(pacing, "perf_counter", lambda: seconds)
    with pacing.asking(lambda: peers_wait):
        assert turn.is_over is expected
    assert turn.is_over is pacing.is_over(seconds, lambda: False), "peers are not asked for any more"


def test_peers_are_not_looked_for_when_the_time_alone_decides() -> None:
    def look() -> bool:
        raise AssertionError("it costs a system call")

    assert not pacing.is_over(pacing.SHARED_TURN / 2, look)
    assert pacing.is_over(pacing.TURN * 1.1, look)
