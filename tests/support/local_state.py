"""What clients see of a local data directory, to compare two of them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from tests.damage.client_state import look


def state(directory: Path, copy: Path) -> dict[str, Any]:
    """Return what clients see of a directory, without its unique ids; a copy of it is asked."""
    shutil.copytree(directory, copy)
    seen = look(copy)
    assert [line for line in seen.logged if not line.startswith("the event loop was held")] == []
    return {about: _without_uids(answer) for about, answer in seen.answers.items()}


def _without_uids(answer: Any) -> Any:
    if isinstance(answer, dict):
        return {key: _without_uids(value) for key, value in answer.items() if key != "uid"}
    return [_without_uids(each) for each in answer] if type(answer) is list else answer
