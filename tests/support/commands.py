"""The command line `qb` in tests: what a command left behind, and commands as processes of their own."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.support.brokers import ROOT


class Done(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str


Run = Callable[..., Done]


def start_process(*argv: str, **streams: Any) -> subprocess.Popen[bytes]:
    """Start `python client.py ...` with a clean environment."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("QB_")}
    environment["COLUMNS"] = "200"  # of the terminal, if there is one
    return subprocess.Popen([sys.executable, str(ROOT / "client.py"), *argv], env=environment, **streams)


def on_terminal(*argv: str) -> str:
    """Run a command on a terminal of its own and return all that it showed there."""
    ours, theirs = pty.openpty()
    with start_process(*argv, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        try:
            while chunk := os.read(ours, 65536):
                shown += chunk
        except OSError:  # Linux says so when the terminal is not open any more
            pass
    os.close(ours)
    assert process.returncode == 0, shown
    return shown.decode()
