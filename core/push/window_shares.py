"""The messages in flight that users and addresses may have: shared equally among their subscribers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from qb.core.push.active_subscription import ActiveSubscription
from qb.core.push.delivery_sinks import DeliverySink
from qb.core.rights.quotas import Allowance
from qb.core.wire.errors import QuotaExceeded


class WindowShares:
    """Which subscriber takes part in which allowances."""

    def __init__(self, serve_soon: Callable[[ActiveSubscription], None]) -> None:
        """`serve_soon` is called with a subscription of which a subscriber may have more, or less, in flight."""
        self._serve_soon = serve_soon
        self._allowances: dict[tuple[str, str], Sequence[Allowance]] = {}

    def join(self, active: ActiveSubscription, sink: DeliverySink, allowances: Sequence[Allowance]) -> None:
        """Give a subscriber, which has joined, its share of each. Raises QuotaExceeded; then it has none."""
        key = active.name, sink.name
        self._allowances[key] = allowances
        try:
            for allowance in allowances:
                allowance.join(key, partial(self._changed, active, sink.name, allowances))
        except QuotaExceeded:
            self.leave(active, sink)
            raise

    def leave(self, active: ActiveSubscription, sink: DeliverySink) -> None:
        """Share what a subscriber had among the others."""
        for allowance in self._allowances.pop((active.name, sink.name), ()):
            allowance.leave((active.name, sink.name))

    def _changed(self, active: ActiveSubscription, name: str, allowances: Sequence[Allowance]) -> None:
        windows = [allowance.window for allowance in allowances if allowance.window is not None]
        active.subscription.limit(name, min(windows, default=None))
        self._serve_soon(active)
