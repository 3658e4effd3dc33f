"""Quotas: what is decided, without a broker and without a clock of its own."""

from __future__ import annotations

import gc
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qb.core.rights import known_users
from qb.core.rights.address_quotas import AddressQuotas, quotas_of
from qb.core.rights.known_users import KnownUsers
from qb.core.rights.principals import Principal, Quotas
from qb.core.rights.quotas import BURST, Allowance, RateBucket
from qb.core.rights.users_file import (
    UsersFile,
    UsersFileError,
    line_of_address,
    parse_address_quotas,
    parse_users,
    read_users,
    write_users,
)
from qb.core.subscriptions.subscription import Subscription
from qb.core.subscriptions.subscription_options import SubscriptionOptions
from qb.core.wire.errors import REPLIES, QuotaExceeded

HASH = "9f" * 32


@given(st.integers(1_024, 10**9), st.lists(st.integers(1, 10**7), max_size=50), st.integers(0, 2**32))
def test_what_passes_never_exceeds_the_rate_by_more_than_a_burst_and_the_last_piece(
    rate: int, sizes: list[int], seed: int
) -> None:
    bucket, now, passed, chance = RateBucket(rate), 100.0, 0, random.Random(seed)
    for size in sizes:
        now += bucket.wait(now) + chance.choice([0.0, 0.001, 3.0])
        assert bucket.wait(now) < 1e-6
        bucket.take(size, now)
        passed += size
        assert passed <= rate * (BURST + now - 100.0) * 1.000001 + size


def test_a_bucket_lets_pass_at_once_and_waits_afterwards_for_as_long_as_it_takes() -> None:
    bucket = RateBucket(1_000)
    bucket.take(4_000, 10.0)  # more than a burst: no peer is cut off for it
    assert bucket.wait(10.0) == 3.0
    assert bucket.wait(12.0) == 1.0
    assert bucket.wait(13.0) == 0.0
    bucket.take(500, 5.0)  # a clock that goes back gives nothing
    assert bucket.wait(13.0) == 0.5
    assert bucket.wait(1_000.0) == 0.0
    bucket.take(1_500, 1_000.0)  # a long pause is worth one burst
    assert bucket.wait(1_000.0) == 0.5


def test_connections_are_counted_and_one_more_is_refused_with_a_time_to_ask_again() -> None:
    allowance = Allowance("user 'a'", Quotas(connections=2))
    allowance.connect()
    allowance.connect()
    with pytest.raises(QuotaExceeded, match="user 'a' has 2 connections, and may have 2") as caught:
        allowance.connect()
    assert caught.value.retry_after > 0
    assert REPLIES[QuotaExceeded].http_status == 429
    assert REPLIES[QuotaExceeded].survives
    allowance.disconnect()
    allowance.connect()


@pytest.mark.parametrize("what", ["topics", "partitions", "subscriptions"])
def test_what_stays_is_refused_beyond_its_quota_and_not_what_needs_no_more(what: str) -> None:
    allowance = Allowance("user 'a'", Quotas(**{what: 3}))
    allowance.check(what, 2, 1)
    allowance.check(what, 7, 0)  # it had more before the quota came
    with pytest.raises(QuotaExceeded, match=f"has 2 {what}, and may have 3"):
        allowance.check(what, 2, 2)
    Allowance("user 'b'", Quotas()).check(what, 10**9, 1)


def test_storage_is_refused_from_the_quota_on() -> None:
    allowance = Allowance("user 'a'", Quotas(storage=1_000))
    allowance.check_storage(999)
    with pytest.raises(QuotaExceeded, match="1000 bytes of storage"):
        allowance.check_storage(1_000)


def test_subscribers_share_what_may_be_in_flight_and_more_than_that_are_refused() -> None:
    allowance, windows = Allowance("user 'a'", Quotas(in_flight=5)), dict[str, int | None]()

    def note(name: str) -> None:
        windows[name] = allowance.window

    for name in "xyz":
        allowance.join(name, lambda name=name: note(name))  # type: ignore[misc]
    assert windows == {"x": 1, "y": 1, "z": 1}
    allowance.leave("y")
    allowance.leave("y")
    assert (windows["x"], windows["z"]) == (2, 2)
    allowance.change(Quotas(in_flight=100))
    assert (windows["x"], windows["z"]) == (50, 50)
    allowance.change(Quotas(in_flight=2))
    with pytest.raises(QuotaExceeded, match="2 subscribers"):
        allowance.join("w", lambda: None)
    allowance.change(Quotas())
    assert windows["x"] is None


def test_a_limit_is_below_every_window_of_a_subscriber_and_can_be_lifted() -> None:
    subscription = Subscription("s", SubscriptionOptions(), {0: 0}, random.Random(1))
    subscription.join("a", 500)
    subscription.limit("a", 7)
    assert subscription.window("a") == 7
    subscription.offer(0, 0, 100)
    (decision,) = subscription.decide(0.0)
    assert sum(map(len, decision.runs)) == 7  # type: ignore[union-attr]
    subscription.join("b", 500)
    assert subscription.window("a") == 7
    subscription.limit("a", None)
    assert subscription.window("a") == subscription.window("b") == 500


def test_the_narrowest_network_counts_and_a_star_is_not_loopback() -> None:
    lines = [
        AddressQuotas("*", Quotas(connections=1)),
        AddressQuotas("10.0.0.0/8", Quotas(connections=2)),
        AddressQuotas("10.1.0.0/16", Quotas(connections=3)),
        AddressQuotas("10.1.2.3", Quotas(connections=4)),
        AddressQuotas("2001:db8::/32", Quotas(connections=5)),
    ]
    found = {
        source: quotas_of(lines, source).connections
        for source in ("192.0.2.1", "10.9.9.9", "10.1.9.9", "10.1.2.3", "2001:db8:0:7::/64", "127.0.0.1", "::1")
    }
    assert list(found.values()) == [1, 2, 3, 4, 5, None, None]
    known = KnownUsers(known=UsersFile({}, tuple(lines)))
    assert known.of_address("::ffff:10.1.2.3") is known.of_address("10.1.2.3")
    assert known.of_address("2001:db8:0:7::1") is known.of_address("2001:db8:0:7::2")
    assert known.of_address("2001:db8:0:7::1").quotas.connections == 5


def test_connections_of_a_user_share_one_allowance_which_follows_the_users() -> None:
    def users(**quotas: int) -> UsersFile:
        return UsersFile({"a": Principal(name="a", tokens=(HASH,), quotas=Quotas(**quotas))})

    known = KnownUsers(known=users(rate=1_024))
    first = known.of_user("a")
    assert known.of_user("a") is first
    assert known.of_user("b") is not first
    assert first.incoming is not None
    known.replace(users(rate=2_048, connections=1))
    assert (first.incoming.rate, first.quotas.connections) == (2_048, 1)
    known.replace(UsersFile({}))
    assert (first.incoming, first.quotas) == (None, Quotas())


def test_a_user_that_connects_anew_has_no_new_burst(monkeypatch: pytest.MonkeyPatch) -> None:
    quotas = Quotas(rate=1_024)
    known = KnownUsers(known=UsersFile({"a": Principal(name="a", tokens=(HASH,), quotas=quotas)}))
    spent = known.of_user("a").incoming
    assert spent is not None
    spent.take(10_000, 0.0)
    gc.collect()
    assert known.of_user("a").incoming is spent
    monkeypatch.setattr(known_users, "RECENT", 3)
    for number in range(10):
        known.of_address(f"10.0.0.{number}")
    assert len(known._recent) == 3


@given(
    st.sampled_from(["*", "10.0.0.0/8", "192.0.2.7", "2001:db8::/32"]),
    st.integers(1_024, 2**40),
    st.none() | st.integers(1, 10**6),
)
def test_a_line_for_an_address_is_read_as_it_is_written(network: str, rate: int, connections: int | None) -> None:
    line = AddressQuotas(network, Quotas(rate=rate, connections=connections))
    assert parse_address_quotas(line_of_address(line).split()) == line


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("address 10.0.0.1", "such a line is `address NETWORK`"),
        ("address 10.0.0.300 connections:1", "is no address"),
        ("address 10.0.0.1/8 connections:1", "is no address"),
        ("address 10.0.0.1 storage:1GiB", "has no meaning here"),
        ("address 10.0.0.1 publish:orders", "has no meaning here"),
        ("address 10.0.0.1 connections:1 connections:2", "stands twice"),
        ("address 10.0.0.1 connections:none", "connections must be"),
        ("address 2001:db8::1 connections:1", "a /64 of IPv6"),
        ("address 10.0.0.1 connections:1\naddress 10.0.0.1/32 connections:2", "two lines for address"),
    ],
)
def test_a_line_for_an_address_that_cannot_be_meant_is_refused(line: str, reason: str) -> None:
    with pytest.raises(UsersFileError, match=reason):
        parse_users(line.encode(), "f")


def test_the_command_line_keeps_the_lines_of_addresses(tmp_path: object) -> None:
    path = f"{tmp_path}/users"
    lines = (AddressQuotas("*", Quotas(connections=50)),)
    write_users(path, [Principal(name="a", tokens=(HASH,))], lines)
    assert read_users(path).addresses == lines
