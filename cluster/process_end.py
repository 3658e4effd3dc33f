"""How the process of a broker ends that may not answer any more: as if it had been killed, and it comes back."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from typing import NoReturn

log = logging.getLogger("qb.cluster")

LEAST_LIFE = 2.0  # seconds: a process that lived shorter pauses before it begins anew
STOPS = {signal.SIGINT, signal.SIGTERM}
_began = time.monotonic()
_TOKEN = "_QB_LEASE_TOKEN"  # in the environment: what a process that begins anew leaves to the next one
hangup_ignored = False  # was the process started so, as under nohup?


def leave_token(token: str) -> None:
    """Have the process that follows this one by begin_anew() know under which token this one held the lease."""
    os.environ[_TOKEN] = token


def left_token() -> str:
    """Return the token of the process that this one follows; empty if there was none. A second time it is empty."""
    return os.environ.pop(_TOKEN, "")


def begin_anew(why: str) -> NoReturn:
    """Replace this process by a new one with the same id and arguments. Nothing is finished, flushed or answered.

    Sockets close as at a kill; the kernel says so to the peers.
    """
    log.warning("%s: this broker begins anew as a follower", why)
    if time.monotonic() - _began < LEAST_LIFE:
        time.sleep(1.0)
    if not hangup_ignored:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # what is ignored now would stay so
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)  # one that comes now waits for the process that follows
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def heed_stops() -> None:
    """Let signals come that have waited since begin_anew(): now there is who takes them."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)


def end(why: str) -> NoReturn:
    """End this process with an error that an operator must look at: nothing is finished, flushed or answered."""
    log.critical("%s", why)
    os._exit(1)
