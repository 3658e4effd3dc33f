"""The threads that a client runs beside those of its caller. qb.clients.aio.background is the same with tasks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Background:
    """Starts threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def open(self) -> None:
        """Threads need no block to live in."""

    def start(self, name: str, function: Callable[..., Any], *arguments: Any, finish: bool = False) -> None:
        """Call a function in a thread of its own. With `finish` the program does not end before the thread does."""
        thread = threading.Thread(target=function, args=arguments, name=name, daemon=not finish)
        thread.start()
        with self._lock:
            self._threads = [each for each in self._threads if each.is_alive()] + [thread]

    def join(self) -> None:
        """Return when all of them have ended."""
        for thread in self._threads:
            thread.join()

    def close(self, error: BaseException | None = None) -> None:
        """Threads end by themselves."""
