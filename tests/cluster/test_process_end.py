"""A process that replaces itself by a new one."""

from __future__ import annotations

import subprocess
import sys

import pytest

BEGINS_ANEW = """
import os, signal
from qb.cluster import process_end

if "BEGUN" not in os.environ:
    os.environ["BEGUN"] = "1"
    process_end.LEAST_LIFE = 0.0
    process_end.begin_anew("a test")
os.kill(os.getpid(), signal.SIGTERM)  # before anything takes it
signal.signal(signal.SIGTERM, lambda *_: print("stopped in good order"))
process_end.heed_stops()
"""


@pytest.mark.process
def test_a_stop_that_comes_while_a_broker_begins_anew_is_taken_by_the_one_that_follows() -> None:
    done = subprocess.run([sys.executable, "-c", BEGINS_ANEW], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "stopped in good order\n"), done.stderr
