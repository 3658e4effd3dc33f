"""The default window follows the pace of its subscriber; one that a user has set does not move."""

from __future__ import annotations

from random import Random

import pytest

from qb.core.subscriptions.messages.adaptive_window import AHEAD, LEAST, MOST, MOST_BYTES, AdaptiveWindow
from qb.core.subscriptions.subscription import Subscription
from qb.core.subscriptions.subscription_options import parse_options


def after(pace: float, seconds: float, size: float = 100, window: AdaptiveWindow | None = None) -> AdaptiveWindow:
    """Return a window whose subscriber has acked so many messages a second, in portions of 100."""
    window = window or AdaptiveWindow()
    for number in range(int(pace * seconds / 100)):
        window.acked(100, size, number * 100 / pace)
    return window


def test_it_begins_as_narrow_as_it_ever_is() -> None:
    assert AdaptiveWindow().size == LEAST


@pytest.mark.parametrize(("pace", "size"), [(1_000, LEAST), (200_000, 200_000 * AHEAD), (5_000_000, MOST)])
def test_it_holds_what_is_acked_in_a_moment_within_bounds(pace: float, size: float) -> None:
    assert after(pace, 60 if pace < 10_000 else 1).size == pytest.approx(size, rel=0.05)


def test_a_large_message_keeps_it_narrow() -> None:
    assert after(5_000_000, 0.1, size=1_000).size == MOST_BYTES // 1_000
    assert after(5_000_000, 0.1, size=1_000_000).size == LEAST


def test_it_grows_by_no_more_than_a_factor_of_two_in_a_window_of_acks() -> None:
    window = AdaptiveWindow()
    window.acked(1, 100, 0)
    sizes = []
    for _ in range(4):
        window.acked(window.size, 100, 0)
        sizes.append(window.size)
    assert sizes == [2 * LEAST, 4 * LEAST, 8 * LEAST, MOST]


def test_it_shrinks_when_the_subscriber_becomes_slow() -> None:
    window = after(5_000_000, 0.1)
    for number in range(40):
        window.acked(LEAST, 100, 1 + number)
    assert window.size == LEAST


def joined(window: int | None = None, **options: object) -> Subscription:
    subscription = Subscription("s", parse_options(options), {0: 0}, Random(1))
    subscription.join("a", window)
    return subscription


def pushed_to_a_quick_one(subscription: Subscription, acked: int) -> int:
    """Return the window after so many messages were pushed and acked at once."""
    now = settled = 0.0
    while settled < acked:
        subscription.offer(0, int(settled), subscription.room())
        for push in subscription.decide(now):
            settled += subscription.ack("a", 0, push.runs, now)  # type: ignore[union-attr]
        subscription.saved(subscription.changes().number)
        now += 0.0001
    return subscription.window("a")


def test_the_default_window_of_a_quick_subscriber_grows() -> None:
    assert pushed_to_a_quick_one(joined(), 60_000) == MOST


def test_a_window_that_was_set_stays() -> None:
    assert pushed_to_a_quick_one(joined(max_in_flight=1_500), 20_000) == 1_500
    assert pushed_to_a_quick_one(joined(window=1_200), 20_000) == 1_200


def test_a_subscriber_may_ask_for_fewer_than_the_limit_and_not_for_more() -> None:
    assert joined(window=50, max_in_flight=100).window("a") == 50
    assert joined(window=5_000, max_in_flight=100).window("a") == 100
    assert joined(window=50_000).window("a") == MOST


def test_what_is_in_flight_never_exceeds_the_window_while_it_grows() -> None:
    subscription = joined()
    now, first = 0.0, 0
    for _ in range(200):
        subscription.offer(0, first, subscription.room())
        for push in subscription.decide(now):
            assert subscription.describe({0: 0}).in_flight <= subscription.window("a")
            first += subscription.ack("a", 0, push.runs, now)  # type: ignore[union-attr]
        subscription.saved(subscription.changes().number)
        now += 0.001


def test_explain_says_that_a_window_adapts_itself() -> None:
    subscription = joined()
    subscription.offer(0, 0, LEAST)
    subscription.decide(0)
    assert f"a ({LEAST} of {LEAST} in flight, a window that adapts itself)" in subscription.explain(0, LEAST, 2_000, 1)


def test_it_grows_if_a_full_window_was_handled_before_it_was_saved_however_long_the_save_takes() -> None:
    subscription = joined()
    for number in range(10):
        now = float(number)
        window = subscription.describe({0: 10**6}).subscribers[0].window
        wanted = subscription.wanted(0)
        subscription.offer(0, wanted.start, window)
        pushed = [run for each in subscription.decide(now) for run in each.runs]  # type: ignore[union-attr]
        subscription.ack("a", 0, pushed, now + 0.5)
        subscription.saved(subscription.changes().number)
    assert subscription.describe({0: 10**6}).subscribers[0].window == MOST


def test_it_stays_narrow_if_a_slow_subscriber_always_has_something_to_handle() -> None:
    subscription = joined()
    pushed: list[int] = []
    for number in range(40):
        wanted = subscription.wanted(0)
        subscription.offer(0, wanted.start, len(wanted))
        for each in subscription.decide(float(number)):
            pushed += [offset for run in each.runs for offset in run]  # type: ignore[union-attr]
        acked, pushed = pushed[:500], pushed[500:]
        subscription.ack("a", 0, [range(acked[0], acked[-1] + 1)], number + 0.5)
        subscription.saved(subscription.changes().number)
    assert subscription.describe({0: 10**6}).subscribers[0].window == LEAST
