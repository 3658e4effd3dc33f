"""How many connections there may be: in all, by door and by address. Pure: addresses in, slots out.

The last few slots are for loopback alone. A door with something urgent to answer (`/health`, and whatever a client on
this machine asks, for that may be the operator's) has a few brief slots beyond them. So others, also on this machine,
keep neither out. The limit of one address holds for those of other machines in any case.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from qb.core.rights.address_quotas import source_of
from qb.core.wire.errors import TooManyConnections
from qb.doors.brief_session import Urgent

RESERVED = 16  # slots for loopback, but never more than a tenth of all


class ConnectionSlot(NamedTuple):
    """What a connection has been given."""

    door: str
    address: str
    refusal: TooManyConnections | None  # why it may only ask for something urgent
    is_loopback: bool


class ConnectionLimits:
    """The connections that there are, and whether there may be one more."""

    def __init__(self, total: int, per_address: int = 0, by_door: Mapping[str, tuple[int, str]] | None = None) -> None:
        """`by_door` gives the limit of a door and the setting that it comes from.

        `per_address` 0 means a tenth of all, and no limit for loopback.
        """
        self._total = total
        self._per_address = per_address
        self._by_door = by_door or {}
        self._shared = total - min(RESERVED, total // 10)
        self.count = 0
        self._doors: Counter[str] = Counter()
        self._addresses: Counter[str] = Counter()

    def admit(self, door: str, host: str, urgent: Urgent | None = None) -> ConnectionSlot:
        """Return a slot for a peer from that address. Raises TooManyConnections.

        A door that has something `urgent` to answer gets a slot with a refusal instead, for that alone.
        """
        address, is_loopback = source_of(host)
        if not is_loopback:
            self._check_address(address, is_loopback)
        refusal = None
        try:
            self._check_address(address, is_loopback)
            self._check_room(door, is_loopback)
        except TooManyConnections as error:
            if urgent is None or (urgent.loopback_only and not is_loopback):
                raise
            refusal = error
        slot = ConnectionSlot(door, address, refusal, is_loopback)
        self._note(slot, 1)
        return slot

    def leave(self, slot: ConnectionSlot) -> None:
        """A connection has ended."""
        self._note(slot, -1)

    def _note(self, slot: ConnectionSlot, change: int) -> None:
        if slot.refusal is None or not slot.is_loopback:
            self._addresses[slot.address] += change
            if not self._addresses[slot.address]:
                del self._addresses[slot.address]
        if slot.refusal is None:
            self.count += change
            self._doors[slot.door] += change

    def _check_address(self, address: str, is_loopback: bool) -> None:
        most = self._per_address or (self._total if is_loopback else max(1, self._total // 10))
        if self._addresses[address] >= most and (self._per_address or not is_loopback):
            what = f"this broker allows {most} connections from one address and has them from {address}"
            raise TooManyConnections(f"{what} (QB_MAX_CONNECTIONS_PER_ADDRESS)")

    def _check_room(self, door: str, is_loopback: bool) -> None:
        if door in self._by_door:
            most, setting = self._by_door[door]
            most = min(most, max(1, self._shared))
            if self._doors[door] >= most:
                raise TooManyConnections(f"this broker allows {most} connections of this kind and has them ({setting})")
        most = self._total if is_loopback else self._shared
        if self.count >= most:
            raise TooManyConnections(f"this broker allows {most} connections and has them (QB_MAX_CONNECTIONS)")
