"""How `pytest -n` deals out tests: one worker for a file, one for all that share a Spark session, one for a wheel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xdist.scheduler import LoadScopeScheduling

if TYPE_CHECKING:
    import pytest

SPARK = "tests/spark/"
WHEEL = "tests/project/"
ALONE = {
    f"{SPARK}test_{name}.py" for name in ("cluster", "sink_kill", "sink_failover", "tokens")
}  # they start a Spark of their own


def share_of(nodeid: str) -> str:
    """Return the name of what a test belongs to; that is run by one worker, in order."""
    file = nodeid.partition("::")[0]
    return next((folder for folder in (SPARK, WHEEL) if file.startswith(folder) and file not in ALONE), file)


def turn_of(item: pytest.Item) -> int:
    """Return a number that is low for what takes long: no worker shall be left with it when the others are done."""
    if share_of(item.nodeid) == SPARK:
        return 0
    return 1 if item.get_closest_marker("kill") else 2


class Dealer(LoadScopeScheduling):
    """Shares are given out in the order of the tests (`--no-loadscope-reorder`)."""

    def _split_scope(self, nodeid: str) -> str:
        return share_of(nodeid)
