"""Who owns the cell, as far as announcements say; a broker's role changes only as the table says."""

from __future__ import annotations

import pytest

from qb.cluster.members import Announcement, Members
from qb.cluster.roles import ROLES, Role, RoleEvent, next_role


def said(name: str, role: Role, epoch: int, applied: int = 0) -> Announcement:
    return Announcement(name, f"{name}:9999", f"{name}:9989", role, epoch, applied, "1", 1)


def test_the_owner_is_the_one_with_the_highest_epoch() -> None:
    members = Members(patience=15)
    members.hear(0, said("a", Role.OWNER, 3))
    members.hear(0, said("b", Role.OWNER, 4))
    owner = members.owner(1)
    assert owner is not None
    assert (owner.name, members.epoch()) == ("b", 4)


def test_an_owner_that_leaves_or_is_silent_is_not_named() -> None:
    members = Members(patience=15)
    members.hear(0, said("a", Role.OWNER, 3))
    assert members.owner(15) is not None
    assert members.owner(15.1) is None
    members.hear(20, said("a", Role.LEAVING, 3))
    assert members.owner(20) is None


def test_an_owner_whose_process_has_ended_is_not_named_until_it_speaks_again() -> None:
    members = Members(patience=15)
    members.hear(0, said("a", Role.OWNER, 3))
    members.gone(1, "b:9989")
    assert members.owner(1) is not None
    members.gone(1, "a:9989")
    assert members.owner(1) is None
    members.hear(2, said("a", Role.OWNER, 3))
    assert members.owner(2) is not None


def test_only_a_change_of_role_or_epoch_is_news() -> None:
    members = Members(patience=15)
    assert members.hear(0, said("a", Role.FOLLOWER, 3))
    assert not members.hear(1, said("a", Role.FOLLOWER, 3, applied=9))
    assert members.hear(2, said("a", Role.OWNER, 4))


def test_the_lag_is_counted_from_the_owner() -> None:
    members = Members(patience=15)
    members.hear(0, said("b", Role.FOLLOWER, 3, applied=90))
    assert members.listed(1)[0]["lag"] is None
    members.hear(0, said("a", Role.OWNER, 3, applied=100))
    rows = {row["name"]: row for row in members.listed(2)}
    assert (rows["b"]["lag"], rows["b"]["silent_for"], rows["a"]["lag"]) == (10, 2, 0)


def test_one_broker_at_most_is_listed_as_owner_and_a_silent_one_as_gone() -> None:
    members = Members(patience=15)
    members.hear(0, said("a", Role.OWNER, 3))
    members.hear(0, said("c", Role.FOLLOWER, 3))
    assert [row["role"] for row in members.listed(6)] == ["owner", "gone"]
    members.hear(6, said("b", Role.OWNER, 4))
    assert [(row["name"], row["role"]) for row in members.listed(6)] == [("a", "gone"), ("b", "owner"), ("c", "gone")]
    members.hear(7, said("a", Role.FOLLOWER, 4))
    assert [row["role"] for row in members.listed(7)] == ["follower", "owner", "gone"]


def test_a_broker_that_was_silent_for_ten_minutes_is_not_listed() -> None:
    members = Members(patience=15)
    members.hear(0, said("a", Role.FOLLOWER, 3))
    assert len(members.listed(600)) == 1
    assert members.listed(600.1) == []


def test_no_broker_becomes_owner_without_the_lease_and_the_fence() -> None:
    assert [before for (before, _), after in ROLES.items() if after is Role.OWNER] == [Role.CANDIDATE]
    with pytest.raises(RuntimeError, match="follower cannot be: confirmed"):
        next_role(Role.FOLLOWER, RoleEvent.CONFIRMED)
