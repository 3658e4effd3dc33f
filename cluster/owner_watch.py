"""A connection to the owner's cluster port, which ends when the owner's process does."""

from __future__ import annotations

from collections.abc import Callable

import trio

from qb.cluster.cluster_port import connect
from qb.replication.lease.lease_keeper import LeaseKeeper

PAUSE = 0.2  # seconds between two attempts


async def owner_refuses(keeper: LeaseKeeper) -> bool:
    """Say whether the cluster port of the owner in the lease refuses connections. Takes at most a second."""
    record = keeper.watcher.record
    if record is None or record.released or not record.cluster_address:
        return False
    try:
        stream = await connect(record.cluster_address)
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError):
        return False
    await stream.aclose()
    return False


async def watch_owner(keeper: LeaseKeeper, gone: Callable[[str], None]) -> None:
    """Have the lease looked at when the owner's process ends, for ever; `gone` is called with its cluster port."""
    while True:
        record = keeper.watcher.record
        if record is not None and not record.released and record.cluster_address:
            if await _watched(record.cluster_address):
                continue  # it has closed: does it still listen?
            gone(record.cluster_address)
            keeper.look_soon()
        await trio.sleep(PAUSE)


async def _watched(address: str) -> bool:
    """Return True when a connection to a cluster port has ended, False if there is none."""
    try:
        async with await connect(address) as stream:
            await stream.receive_some(1)
    except trio.BrokenResourceError:
        pass
    except (OSError, ValueError):
        return False
    return True
