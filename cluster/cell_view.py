"""What this broker knows of its cell: its own state, and what the others announce."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import trio

from qb.cluster.members import Announcement, Members
from qb.cluster.roles import Role, RoleEvent, next_role
from qb.core.wire.version import __version__
from qb.replication.jetstream.jetstream_api import JetStreamRefused, call
from qb.replication.nats.nats_client import NatsClient
from qb.replication.nats.nats_protocol import NatsError, NatsMessage
from qb.storage.signals import Signal

INTERVAL = 1.0  # seconds between two announcements
ANSWER_WITHIN = 1.0  # seconds for NATS to say how its nodes are


class FollowedCell(Protocol):
    """The copy of the cell that this broker keeps."""

    @property
    def applied(self) -> int:
        """The position of the journal up to which it goes."""

    @property
    def epoch(self) -> int:
        """The epoch of the newest fence that it has read."""


class CellView:
    """The members of one cell. Belongs to the event loop's thread; `run()` announces and listens."""

    def __init__(
        self, client: NatsClient, cell: str, stream: str, name: str, address: str, cluster_address: str, patience: float
    ) -> None:
        """`patience`: seconds for which a silent owner is named."""
        self.cell, self.name, self.address, self.cluster_address = cell, name, address, cluster_address
        self.role = Role.FOLLOWER
        self.copy: FollowedCell | None = None  # once it is open
        self.changed = Signal()  # another owner, or none
        self._client, self._stream, self._subject = client, stream, f"qb-brokers.{cell}"
        self._members = Members(patience)
        self._news = Signal()

    # Telling and hearing

    async def run(self) -> None:
        """Announce this broker, and hear the others, for ever."""
        self._client.subscribe(self._subject, self._heard)
        while True:
            self._announce()
            with trio.move_on_after(INTERVAL):
                await self._news.wait()

    def advance(self, event: RoleEvent) -> None:
        """This broker has another role now."""
        self.role = next_role(self.role, event)
        self._announce()
        self._news.set()

    def _announce(self) -> None:
        epoch, applied = (self.copy.epoch, self.copy.applied) if self.copy is not None else (0, 0)
        said = Announcement(
            self.name, self.address, self.cluster_address, self.role, epoch, applied, __version__, os.getpid()
        )
        self._take(said)
        self._client.publish(self._subject, msgspec.json.encode(said))

    def _heard(self, message: NatsMessage) -> None:
        try:
            said = msgspec.json.decode(message.payload, type=Announcement)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return
        if said.name != self.name:
            self._take(said)

    def _take(self, said: Announcement) -> None:
        if self._members.hear(trio.current_time(), said):
            self.changed.set()

    # Asking

    def owner(self) -> Announcement | None:
        """Return who says that it owns the cell. It may be mistaken: then it refuses."""
        return self._members.owner(trio.current_time())

    @property
    def epoch(self) -> int:
        """The highest epoch that is known."""
        return self._members.epoch()

    def gone(self, cluster_address: str) -> None:
        """The process with this cluster port has ended."""
        self._members.gone(trio.current_time(), cluster_address)

    def named(self, name: str) -> Announcement | None:
        """Return what the broker of this name has said last."""
        return self._members.named(name)

    async def wait_for(self, found: Callable[[], Announcement | None], seconds: float) -> Announcement | None:
        """Return what is found now, or within so many seconds; else None."""
        with trio.move_on_after(seconds):
            while (each := found()) is None:
                await self.changed.wait()
            return each
        return None

    async def describe(self) -> dict[str, Any]:
        """Return the answer to the method `cluster`."""
        owner = self.owner()
        return {
            "engine": "jetstream",
            "cell": self.cell,
            "broker": self.name,
            "owner": owner.name if owner is not None else None,
            "epoch": self.epoch,
            "brokers": self._members.listed(trio.current_time()),
            "journal": await self._journal(),
        }

    async def _journal(self) -> dict[str, Any]:
        """Return how the nodes of NATS are that keep the journal, as their leader says."""
        try:
            found = await call(self._client, f"STREAM.INFO.{self._stream}", timeout=ANSWER_WITHIN)
        except (NatsError, JetStreamRefused, trio.TooSlowError) as error:
            return {"stream": self._stream, "error": str(error) or "NATS does not answer", "nodes": []}
        group = found.get("cluster", {})
        leader = group.get("leader", "")
        nodes = [{"name": leader, "role": "leader", "current": True, "lag": 0}] if leader else []
        for each in group.get("replicas", []):
            row = {"name": each["name"], "role": "replica", "current": bool(each.get("current"))}
            nodes.append(row | {"current": row["current"] and not each.get("offline"), "lag": each.get("lag", 0)})
        state = found["state"]
        about = {"messages": state["messages"], "bytes": state["bytes"], "last": state["last_seq"]}
        return {"stream": self._stream, "error": None, "nodes": nodes, **about}
