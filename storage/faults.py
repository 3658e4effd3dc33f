"""One fault ends one thing: it is logged when it begins, and what failed is tried again, later and later.

Only exceptions that are an Exception are faults: being cancelled and being interrupted are not.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import trio

from qb.core.wire.errors import BrokerError

log = logging.getLogger("qb.faults")
FIRST_DELAY, LONGEST_DELAY = 1.0, 5.0  # seconds until what failed is tried again


class Fault:
    """What is wrong with one thing, if anything is."""

    def __init__(self, what: str, first_delay: float | None = None) -> None:
        self._what = what  # for people
        self._first_delay = FIRST_DELAY if first_delay is None else first_delay
        self.text: str | None = None  # None: nothing is wrong
        self._last: tuple[type[Exception], str] | None = None
        self._delay = 0.0

    def note(self, error: Exception) -> float:
        """The thing has failed; returns in how many seconds to try again. The same fault is logged once."""
        same = (type(error), str(error))
        if same != self._last:
            ours = None if isinstance(error, BrokerError) else error
            log.error("%s failed, and is tried again: %s", self._what, error or repr(error), exc_info=ours)
        self._last, self.text = same, in_words(error)
        self._delay = min(2 * self._delay or self._first_delay, LONGEST_DELAY)
        return self._delay

    def end(self) -> None:
        """All is well with the thing."""
        self.text, self._last, self._delay = None, None, 0.0


def in_words(error: Exception) -> str:
    """Return the text for users: of a fault of ours no details."""
    if isinstance(error, BrokerError):
        return str(error)
    return f"internal error ({type(error).__name__}); the broker's log has the details"


class Faults:
    """The faults of several things that are served in turn."""

    def __init__(self) -> None:
        self._known: dict[str, Fault] = {}

    def __bool__(self) -> bool:
        return bool(self._known)

    def text(self, what: str) -> str | None:
        """Return what is wrong with this thing, or None."""
        return self._known[what].text if what in self._known else None

    @contextmanager
    def contained(self, what: str) -> Iterator[None]:
        """What is raised inside ends this block and is noted for this thing; the caller tries it again later."""
        try:
            yield
        except Exception as error:
            self.note(what, error)
        else:
            self._known.pop(what, None)

    def note(self, what: str, error: Exception) -> None:
        """This thing has failed. The same fault is logged once."""
        self._known.setdefault(what, Fault(what)).note(error)


async def keep_running(what: str, service: Callable[[], Awaitable[None]], first_delay: float | None = None) -> None:
    """Run a service until it returns; when it fails, begin it anew, the first time after `first_delay` seconds."""
    fault = Fault(what, first_delay)
    while True:
        began = trio.current_time()
        try:
            return await service()
        except Exception as error:
            if trio.current_time() - began > LONGEST_DELAY:
                fault.end()  # it has worked meanwhile
            delay = fault.note(error)
        await trio.sleep(delay)
