"""The roles of a broker in its cell, as a table."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class Role(StrEnum):
    """What a broker is to its cell."""

    FOLLOWER = "follower"  # applies the journal, and would take the lease
    CANDIDATE = "candidate"  # has the lease, and takes the journal over
    OWNER = "owner"  # answers
    LEAVING = "leaving"  # has stopped answering, or is about to
    LOST = "lost"  # has found that the journal has lost records: an operator must look


class RoleEvent(StrEnum):
    """What changes the role. Whatever else happens to a broker ends its process."""

    CLAIMED = "claimed"  # the lease is ours
    CONFIRMED = "confirmed"  # the fence is committed, and a renewal that was sent after it has succeeded
    STOPPED = "stopped"  # by the operator, or to let another broker take over
    LOST = "lost"  # the journal does not hold what it held before


ROLES: Mapping[tuple[Role, RoleEvent], Role] = {
    (Role.FOLLOWER, RoleEvent.CLAIMED): Role.CANDIDATE,
    (Role.CANDIDATE, RoleEvent.CONFIRMED): Role.OWNER,
    (Role.FOLLOWER, RoleEvent.STOPPED): Role.LEAVING,
    (Role.CANDIDATE, RoleEvent.STOPPED): Role.LEAVING,
    (Role.OWNER, RoleEvent.STOPPED): Role.LEAVING,
    (Role.FOLLOWER, RoleEvent.LOST): Role.LOST,
    (Role.CANDIDATE, RoleEvent.LOST): Role.LOST,
    (Role.LOST, RoleEvent.STOPPED): Role.LEAVING,
}  # a pair that is not here is a fault of ours


def next_role(role: Role, event: RoleEvent) -> Role:
    """Return the role after an event. Raises RuntimeError if the event cannot happen in this role."""
    try:
        return ROLES[role, event]
    except KeyError:
        raise RuntimeError(f"a broker that is {role} cannot be: {event}") from None
