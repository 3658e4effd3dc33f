"""A slice of the damage campaign; `python -m tests.damage --count 2000` runs more of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.damage.__main__ import run
from tests.damage.trials import BAD

pytestmark = pytest.mark.timeout(300)


def test_no_damage_is_silent_crashes_the_start_or_spreads(tmp_path: Path) -> None:
    trials = list(run(tmp_path, range(100), processes=1))
    assert [trial for trial in trials if trial.outcome in BAD] == []
    assert len({trial.outcome for trial in trials}) >= 3
    assert {trial.directory for trial in trials} == {"clean", "killed"}
