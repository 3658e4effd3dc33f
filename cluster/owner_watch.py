"""A connection to the owner's cluster port, which ends when the owner's process does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import trio

from qb.cluster.cluster_port import connect
from qb.replication.lease.lease_keeper import LeaseKeeper

PAUSE = 0.2  # seconds between two attempts


async def owner_refuses(keeper: LeaseKeeper) -> bool:
    """Say whether the cluster port of the owner in the lease refuses connections, or did so. Takes at most a second.

    The process that has refused once is gone, even if another one listens there now: its lease need not run out
    because NATS was slow when the other one was started.
    """
    record = keeper.watcher.record
    if record is None or record.released or not record.cluster_address:
        return False
    if keeper.refused != record.owner:
        try:
            await (await connect(record.cluster_address)).aclose()
        except ConnectionRefusedError:
            keeper.refused = record.owner
        except (OSError, ValueError):
            pass
    return keeper.refused == record.owner


async def watch_owner(keeper: LeaseKeeper, gone: Callable[[str], None]) -> None:
    """Have the lease looked at when the owner's process ends, for ever; `gone` is called with its cluster port."""
    while True:
        record = keeper.watcher.record
        if record is not None and not record.released and record.cluster_address:
            try:
                await _watch(record.cluster_address)
                continue  # it has closed: does it still listen?
            except ConnectionRefusedError:
                keeper.refused = record.owner
            except (OSError, ValueError):
                pass
            gone(record.cluster_address)
            keeper.look_soon()
        await trio.sleep(PAUSE)


async def _watch(address: str) -> None:
    """Return when a connection to a cluster port has ended. Raises OSError, ValueError if there is none."""
    async with await connect(address) as stream:
        with suppress(trio.BrokenResourceError):
            await stream.receive_some(1)
