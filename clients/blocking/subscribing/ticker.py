"""A thread that looks after things every now and then."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic

from qb.clients.blocking.background import Background


class Ticker:
    """Calls `look`, which returns after how many seconds it must be called again; None: after the next wake()."""

    def __init__(self, look: Callable[[float], float | None], background: Background) -> None:
        self._look = look
        self._alarm = threading.Event()
        self._dozing = False  # does it sleep until the alarm rings?
        self._stopped = False
        background.start("qb ticker", self._run)

    def wake(self) -> None:
        """There is something new to look at; costs next to nothing while the ticker is up anyway."""
        if self._dozing:
            self._alarm.set()

    def stop(self) -> None:
        """Look no more."""
        self._stopped = True
        self._alarm.set()

    def _run(self) -> None:
        while not self._stopped:
            self._dozing = True  # before the look: what comes meanwhile rings the alarm
            pause = self._look(monotonic())
            self._dozing = pause is None
            if not self._stopped and self._alarm.wait(pause):
                self._alarm.clear()
