"""What a broker of a cluster knows of its cell, for doors, metrics and the command line."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class NodeState(StrEnum):
    """How a NATS node keeps the journal."""

    CURRENT = "current"  # it has everything
    LAGS = "lags"  # it is behind the others
    LACKS = "lacks"  # records are missing in its copy
    DAMAGED = "damaged"  # records of its copy are not what the other nodes have, or cannot be read
    AWAY = "away"  # it does not answer


class JournalNode(msgspec.Struct, frozen=True, kw_only=True):
    """A NATS node that keeps the journal."""

    name: str
    role: str  # "leader" or "replica"
    state: NodeState = NodeState.CURRENT
    current: bool = True  # has it all of the journal, as far as is known?
    lag: int = 0  # records
    missing: int = 0  # records
    damaged: int = 0  # records, as the newest pass over its copy has found
    why: str = ""  # in words, if it is not current


class JournalState(msgspec.Struct, frozen=True, kw_only=True):
    """The stream of the journal and its nodes."""

    stream: str
    error: str | None = None  # why nothing can be stored
    nodes: list[JournalNode] = []
    notes: list[str] = []  # what else is wrong, as a monitor that never answered
    messages: int = 0
    bytes: int = 0
    last: int = 0


class CellBroker(msgspec.Struct, frozen=True, kw_only=True):
    """A broker of the cell, as it announces itself."""

    name: str
    address: str
    cluster_address: str
    role: str  # as in qb.cluster.roles, or "gone"
    epoch: int
    applied: int
    version: str
    pid: int
    lag: int | None  # records behind the owner; None: no owner is known
    silent_for: float
    chain: int = 0
    damaged_files: int = 0  # of its copy
    damaged_nodes: dict[str, int] = {}  # records of NATS nodes, as it has found


class CellReport(msgspec.Struct, frozen=True, kw_only=True):
    """A cell as one of its brokers sees it."""

    engine: str = "jetstream"
    cell: str
    broker: str  # who says this
    role: str  # of that one
    lost: str = ""  # JOURNAL_LOST, in words, if this broker has found that the journal has lost records
    owner: str | None
    epoch: int
    brokers: list[CellBroker]
    journal: JournalState
    verdict: str  # what would be lost if one more NATS node died
    spare_nodes: int  # how many more may die before work stops; below 0: it has stopped

    @property
    def troubles(self) -> list[str]:
        """What an operator should look at, in words."""
        nodes = [f"NATS node {each.name} {each.why}" for each in self.journal.nodes if not each.current]
        brokers = [f"broker {each.name} is gone" for each in self.brokers if each.role == "gone"]
        brokers += [f"broker {each.name} has a damaged copy" for each in self.brokers if each.damaged_files]
        return [*([self.journal.error] if self.journal.error else []), *nodes, *self.journal.notes, *brokers]
