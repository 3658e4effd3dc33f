"""Decides whether other brokers have applied the same records as this one, and which broker reads the NATS nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from qb.cluster.members import Announcement
from qb.cluster.roles import Role
from qb.replication.journal.record_chain import ChainPoint


def answers_due(point: ChainPoint, names: Iterable[str], others: Sequence[Announcement]) -> bool:
    """Say whether one of these brokers, or of those heard since, is yet to say that it has come to the point."""
    applied = {each.name: each.applied for each in others}
    return any(applied.get(name, 0) < point.position for name in {*names, *applied})


def reader_of_nodes(role: Role, name: str, others: Sequence[Announcement]) -> str:
    """Return the one broker that reads the NATS nodes in the background: the first follower by name, or the owner."""
    roles = {each.name: each.role for each in others} | {name: role}
    followers = [each for each, its in roles.items() if its is Role.FOLLOWER]
    return min(followers or roles)


def chain_verdicts(
    point: ChainPoint, chains: Mapping[int, int], others: Sequence[Announcement], silent: Iterable[str] = ()
) -> dict[str, str]:
    """Return "same", "differs", or in words why it is not known, for each of the others and of the silent ones.

    `chains`: the checksum of the chain at each entry from the point on, as this broker reads it.
    """
    found = dict.fromkeys(silent, "not compared: it has fallen silent")
    for each in others:
        known = chains.get(each.applied)
        if each.applied < point.position:
            found[each.name] = f"not compared: it is {point.position - each.applied} records behind"
        elif known is None or not each.chain:
            found[each.name] = "not compared: it does not say its checksum at a position that is known"
        else:
            found[each.name] = "same" if known == each.chain else "differs"
    return found
