"""Subscriptions as lists and descriptions show them, gathered in portions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from qb.core.pacing import portions
from qb.core.push.active_subscription import ActiveSubscription
from qb.core.subscriptions.subscription_report import PartitionReport, SubscriptionTotals
from qb.core.wire.clock import now_ms

TOTALS_AT_ONCE = 50  # subscriptions whose numbers are added up between two checkpoints
PARTITIONS_AT_ONCE = 500  # that are described between two checkpoints


def summary_of(active: ActiveSubscription) -> dict[str, Any]:
    """Return what a list says of a subscription."""
    return {
        "subscription_id": active.name,
        "topic": active.topic,
        "created_ms": active.created_ms,
        "paused": active.subscription.paused,
        "subscribers": len(active.sinks),
        "options": msgspec.to_builtins(active.subscription.options),
    }


async def summaries_of(subscriptions: Iterable[ActiveSubscription]) -> list[dict[str, Any]]:
    """Return what a list says of these, without those that were removed meanwhile."""
    listed: list[dict[str, Any]] = []
    async for some in portions(subscriptions):
        listed += [summary_of(active) for active in some if not active.gone]
    return listed


async def totals_of(
    subscriptions: Iterable[ActiveSubscription],
) -> list[tuple[ActiveSubscription, SubscriptionTotals]]:
    """Return the numbers of all partitions of these together, without those that were removed meanwhile."""
    found: list[tuple[ActiveSubscription, SubscriptionTotals]] = []
    ends: dict[str, int] = {}  # of a topic, added up once
    async for some in portions(subscriptions, TOTALS_AT_ONCE):
        for active in some:
            if active.topic not in ends:
                ends[active.topic] = sum(log.end_offset for log in active.logs.values())
            if not active.gone:
                found.append((active, active.subscription.totals(ends[active.topic])))
    return found


async def description_of(active: ActiveSubscription) -> dict[str, Any]:
    """Return a subscription with all its partitions and subscribers."""
    ends = active.ends()
    partitions: list[PartitionReport] = []
    async for some in portions(active.subscription.partitions(ends), PARTITIONS_AT_ONCE):
        partitions += some
    numbers = msgspec.to_builtins(active.subscription.describe(ends, partitions))
    oldest = await _oldest_unacked_ms(active, partitions)
    age = None if oldest is None else max(0, now_ms() - oldest) / 1000
    return {**summary_of(active), **numbers, "oldest_unacked_age": age, "fault": active.fault}


async def _oldest_unacked_ms(active: ActiveSubscription, partitions: Iterable[PartitionReport]) -> int | None:
    """Return the time of the oldest message that is not settled, or None."""
    times = []
    for each in partitions:
        log = active.logs[each.partition]
        floor = max(each.floor, log.first_offset)
        if floor < log.end_offset:
            chunk = await log.read(floor, 1)
            times.append(int.from_bytes(chunk.frames[16:24], "big"))  # the frame's timestamp
    return min(times, default=None)
