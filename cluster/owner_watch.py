"""A connection to the owner's cluster port, which ends when the owner's process does."""

from __future__ import annotations

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


async def watch_owner(keeper: LeaseKeeper) -> None:
    """Have the lease looked at as soon as the owner's process ends, for ever."""
    while True:
        record = keeper.watcher.record
        if record is not None and not record.released and record.cluster_address:
            try:
                async with await connect(record.cluster_address) as stream:
                    while await stream.receive_some(1024):
                        pass
            except (OSError, ValueError, trio.BrokenResourceError):
                pass
            keeper.look_soon()
        await trio.sleep(PAUSE)
