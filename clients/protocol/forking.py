"""What happens to clients in a child of os.fork().

A child inherits the memory and the descriptors of its parent, but only the thread that forked: connections, producer
ids and what is in flight go on being the parent's. Each object that has to know of it says so here once; nothing is
looked up while it is used.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from qb.clients.protocol.client_errors import UsedAfterFork

T = TypeVar("T")

_living: WeakKeyDictionary[Any, Callable[[Any], None]] = WeakKeyDictionary()


def call_in_child(thing: T, function: Callable[[T], None]) -> None:
    """Call function(thing) in every child that is forked while `thing` is alive.

    Other threads may have stopped anywhere: it must take no lock that existed before the fork.
    """
    _living[thing] = function


def _in_child() -> None:
    for thing, function in list(_living.items()):
        function(thing)


os.register_at_fork(after_in_child=_in_child)


def used_after_fork() -> UsedAfterFork:
    """For whatever was opened in the parent and is used in the child."""
    return UsedAfterFork("this was opened before os.fork(), by the parent process, which goes on with it: open another")
