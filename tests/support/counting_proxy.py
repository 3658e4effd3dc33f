"""A proxy between clients and a broker that counts what travels."""

from __future__ import annotations

from qb.testing.fault_proxy import FaultProxy


class CountingProxy(FaultProxy):
    """Passes whole frames on and counts their bytes: `sent` by clients, `received` by them."""

    def __init__(self, target: int) -> None:
        super().__init__()
        self.target, self.sent, self.received = target, 0, 0

    def _keeps_acks(self, frames: bytes) -> bool:
        self.sent += len(frames)
        return True

    def _waits(self, frames: bytes) -> bool:
        self.received += len(frames)
        return True
