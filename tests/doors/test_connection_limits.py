"""Connections are limited in all, by door and by address, and the operator always gets in."""

from __future__ import annotations

import pytest

from qb.core.wire.errors import TooManyConnections
from qb.doors.brief_session import Urgent
from qb.doors.connection_limits import ConnectionLimits
from qb.doors.listening import BinaryDoor

URGENT = {"http": Urgent(b"GET /health ")}
BY_DOOR = {"json": (30, "QB_JSON_MAX_CONNECTIONS"), "http": (30, "QB_HTTP_MAX_CONNECTIONS")}


def fill(limits: ConnectionLimits, door: str, host: str) -> tuple[int, str]:
    """Connect until that is refused; returns how many got in, and the refusal."""
    for number in range(10_000):
        try:
            slot = limits.admit(door, host, URGENT.get(door))
        except TooManyConnections as error:
            return number, str(error)
        if slot.refusal is not None:
            return number, "only what is urgent"
    raise AssertionError("no limit")


def test_one_address_gets_a_tenth_and_loopback_all():
    limits = ConnectionLimits(100)
    got, refusal = fill(limits, "frames", "10.0.0.1")
    assert got == 10
    assert "10 connections from one address" in refusal
    assert "QB_MAX_CONNECTIONS_PER_ADDRESS" in refusal
    assert fill(limits, "frames", "10.0.0.2")[0] == 10
    got, refusal = fill(limits, "frames", "127.0.0.1")
    assert got == 80
    assert "QB_MAX_CONNECTIONS" in refusal


@pytest.mark.parametrize("host", ["10.0.0.1", "127.0.0.1", "::1"])
def test_a_limit_that_is_set_holds_for_every_address(host):
    assert fill(ConnectionLimits(100, per_address=3), "frames", host)[0] == 3


def test_a_network_of_ipv6_is_one_address_and_a_mapped_address_is_the_address():
    limits = ConnectionLimits(100, per_address=2)
    limits.admit("frames", "2001:db8::1")
    limits.admit("frames", "2001:db8::ffff:2")
    with pytest.raises(TooManyConnections, match="2001:db8::/64"):
        limits.admit("frames", "2001:db8::3")
    limits.admit("frames", "2001:db8:0:1::3")
    limits.admit("frames", "10.0.0.1")
    limits.admit("frames", "::ffff:10.0.0.1")
    with pytest.raises(TooManyConnections):
        limits.admit("frames", "10.0.0.1")


def test_the_last_slots_are_for_loopback():
    limits = ConnectionLimits(100, per_address=1_000)
    assert fill(limits, "frames", "10.0.0.1")[0] == 90
    assert fill(limits, "frames", "127.0.0.1")[0] == 10


@pytest.mark.parametrize("host", ["127.0.0.1", "10.0.0.1"])
def test_no_other_door_takes_the_connections_of_all_doors(host):
    limits = ConnectionLimits(100, 1_000, BY_DOOR)
    got, refusal = fill(limits, "json", host)
    assert got == 30
    assert "QB_JSON_MAX_CONNECTIONS" in refusal
    assert fill(limits, "http", host) == (30, "only what is urgent")
    assert fill(limits, "frames", host)[0] >= 30


def test_a_small_broker_keeps_its_reserve_from_the_other_doors_too():
    limits = ConnectionLimits(20, by_door={"json": (5_000, "QB_JSON_MAX_CONNECTIONS")})
    assert fill(limits, "json", "127.0.0.1")[0] == 18
    assert fill(limits, "frames", "127.0.0.1")[0] == 2


def test_when_all_slots_are_taken_a_peer_may_ask_for_what_is_urgent_and_takes_no_slot():
    limits = ConnectionLimits(100, 1_000, BY_DOOR)
    fill(limits, "frames", "127.0.0.1")
    slot = limits.admit("http", "10.0.0.1", URGENT["http"])
    assert "QB_MAX_CONNECTIONS" in str(slot.refusal)
    assert limits.count == 100
    limits.leave(slot)
    assert limits.count == 100


def test_a_slot_that_is_left_can_be_taken():
    limits = ConnectionLimits(1)
    slot = limits.admit("frames", "127.0.0.1")
    with pytest.raises(TooManyConnections):
        limits.admit("frames", "127.0.0.1")
    limits.leave(slot)
    limits.admit("frames", "127.0.0.1")


@pytest.mark.parametrize("per_address", [0, 10])
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_peers_on_this_machine_do_not_keep_the_operator_out(host, per_address):
    limits = ConnectionLimits(100, per_address, BY_DOOR)
    for door in ("frames", "http", "json"):
        fill(limits, door, host)
    for _ in range(1_000):  # as many as come: the oldest makes way
        operator = limits.admit("frames", host, BinaryDoor.urgent)
        assert operator.refusal is not None
        limits.leave(operator)
        assert limits.admit("http", host, URGENT["http"]).refusal is not None
    limits = ConnectionLimits(10)
    fill(limits, "frames", host)
    with pytest.raises(TooManyConnections):
        limits.admit("frames", "10.0.0.1", BinaryDoor.urgent)
