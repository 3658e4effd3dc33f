"""The brokers of a cell as they announce themselves: a hint for redirects and for people; it decides nothing."""

from __future__ import annotations

from typing import Any

import msgspec

from qb.cluster.roles import Role

SILENT = 5.0  # seconds after which a broker that announces itself no more is taken for gone
FORGET = 600.0  # seconds after which a broker that announces itself no more is not listed any longer


class Announcement(msgspec.Struct, frozen=True):
    """What a broker says of itself, every second and whenever its role changes."""

    name: str
    address: str  # for clients
    cluster_address: str  # for brokers
    role: Role
    epoch: int  # of the newest fence that it has read
    applied: int  # the position of the journal up to which its copy goes
    version: str
    pid: int
    chain: int = 0  # checksum of the list of all valid records up to there
    damaged_files: int = 0  # of its copy, as its newest pass over them has found
    damaged_nodes: dict[str, int] = {}  # records of each NATS node, as its newest pass over them has found


class Members:
    """What was heard of the brokers of a cell, this one among them."""

    def __init__(self, patience: float) -> None:
        """`patience`: seconds of silence after which an owner is not named any more."""
        self._patience = patience
        self._heard: dict[str, tuple[float, Announcement]] = {}

    def hear(self, now: float, announcement: Announcement) -> bool:
        """Take note of an announcement; returns whether it may have changed the owner."""
        _, before = self._heard.get(announcement.name, (0.0, None))
        self._heard[announcement.name] = now, announcement
        return before is None or (before.role, before.epoch) != (announcement.role, announcement.epoch)

    def gone(self, now: float, cluster_address: str) -> None:
        """The process with this cluster port has ended: it counts as silent until it speaks again."""
        for name, (at, said) in self._heard.items():
            if said.cluster_address == cluster_address:
                self._heard[name] = min(at, now - self._patience - 1), said

    def owner(self, now: float) -> Announcement | None:
        """Return the broker that says that it owns the cell, with the highest epoch, unless a later one is known."""
        owners = [said for at, said in self._heard.values() if said.role is Role.OWNER and now - at <= self._patience]
        return max(owners, key=lambda said: said.epoch, default=None)

    def named(self, name: str) -> Announcement | None:
        """Return what a broker has said last."""
        return self._heard[name][1] if name in self._heard else None

    def present(self, now: float) -> list[Announcement]:
        """Return what those say that are there."""
        return [said for at, said in self._heard.values() if now - at <= SILENT]

    def epoch(self) -> int:
        """Return the highest epoch that any of them has read of."""
        return max((said.epoch for _, said in self._heard.values()), default=0)

    def listed(self, now: float) -> list[dict[str, Any]]:
        """Return one row for each broker: what it said, how far it is behind the owner, and how long it is silent.

        One that has said nothing for a while has the role "gone", and at most one row is that of an owner.
        """
        self._heard = {name: found for name, found in self._heard.items() if now - found[0] <= FORGET}
        owner = self.owner(now)
        rows = []
        for _, (at, said) in sorted(self._heard.items()):
            lag = max(0, owner.applied - said.applied) if owner is not None else None
            is_gone = said is not owner and (now - at > SILENT or said.role is Role.OWNER)
            row = msgspec.to_builtins(said) | {"lag": lag, "silent_for": round(now - at, 1)}
            rows.append(row | {"role": "gone"} if is_gone else row)
        return rows
