"""Peers that other brokers pass on, at the owner."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import trio

from qb.cluster.cluster_port import ClusterPort
from qb.cluster.relays.relay_protocol import RelayPreamble, RelayRefused
from qb.cluster.relays.relayed_transport import RelayedTransport
from qb.doors.listening import Door, Peers


class RelayedPeers:
    """Takes them from the cluster port while this broker owns the cell."""

    def __init__(self, port: ClusterPort, cell: str, epoch: int) -> None:
        self._port, self._cell, self._epoch = port, cell, epoch
        self._doors: dict[str, Door] = {}
        self._peers: Peers | None = None
        self._sessions: trio.Nursery | None = None

    def open(self, peers: Peers, doors: Sequence[Door], sessions: trio.Nursery) -> None:
        """Take them from now on, as tasks of `sessions`."""
        self._doors = {door.name: door for door in doors}
        self._peers, self._sessions = peers, sessions
        self._port.welcome = self._welcome

    def close(self) -> None:
        """Take no more."""
        self._port.welcome = None

    def _welcome(self, sock: socket.socket, preamble: RelayPreamble) -> None:
        """Begin the session of a peer. Raises RelayRefused."""
        if (preamble.cell, preamble.epoch) != (self._cell, self._epoch):
            raise RelayRefused(f"it means the owner of {preamble.cell} in epoch {preamble.epoch}, which is not we")
        door = self._doors.get(preamble.door)
        if door is None or self._peers is None or self._sessions is None:
            raise RelayRefused(f"there is no door {preamble.door} here")
        transport = self._peers.transport(RelayedTransport, sock)
        # Without certificates any program on this machine can connect here, and say that it passes on whom it likes.
        transport.common_name = preamble.principal if self._port.is_encrypted else None
        try:
            self._peers.admit(transport, preamble.host, f"{preamble.host}:{preamble.port}", door, self._sessions)
        except ValueError:
            transport.close()
