"""The shares of a step: several accounts have equal parts of it, and one that is alone has no limit of this kind."""

from __future__ import annotations

from qb.doors.step_shares import LEAST_SHARE, SERVED, ActiveAccounts, StepShares


def test_an_account_is_alone_until_another_one_speaks_and_again_when_that_has_been_silent():
    accounts = ActiveAccounts()
    accounts.heard("a", 1.0)
    assert accounts.is_alone(1.0), "a is the first"
    accounts.heard("b", 1.01)
    assert not accounts.is_alone(1.01)
    for now in (1.05, 1.1):
        accounts.heard("b", now)
    assert not accounts.is_alone(1.0 + SERVED / 2)
    assert accounts.is_alone(1.01 + SERVED), "a has been silent"


def test_one_that_speaks_long_after_another_is_alone():
    accounts = ActiveAccounts()
    accounts.heard("a", 1.0)
    accounts.heard("b", 2.0)
    assert accounts.is_alone(2.0)


def test_accounts_that_speak_in_turn_are_never_alone():
    accounts = ActiveAccounts()
    for number in range(1, 10):
        accounts.heard(number % 2, number * SERVED / 2)
        assert number == 1 or not accounts.is_alone(number * SERVED / 2)


def test_each_account_may_bring_an_equal_part_of_the_step():
    shares = StepShares(4 * LEAST_SHARE, 2)
    shares.take("a", LEAST_SHARE)
    assert (shares.left("a"), shares.left("b")) == (LEAST_SHARE, 2 * LEAST_SHARE)
    shares.take("a", 2 * LEAST_SHARE)
    assert (shares.left("a"), shares.left("b")) == (0, 2 * LEAST_SHARE)


def test_a_share_is_never_so_small_that_the_step_would_cost_more():
    assert StepShares(4 * LEAST_SHARE, 1_000).left("a") == LEAST_SHARE


def test_those_that_had_their_whole_share_are_known():
    shares = StepShares(4 * LEAST_SHARE, 2)
    shares.take("a", LEAST_SHARE)
    shares.take("b", LEAST_SHARE)
    shares.take("b", LEAST_SHARE)
    assert shares.used_up == {"b"}
