"""What all peers together hold unfinished is bounded, and those that mean well finish."""

from __future__ import annotations

import pytest

from qb.core.wire.errors import BrokerError, LimitReached, PeerMisbehaved
from qb.doors.unfinished_input import FREE, InputBudget, UnfinishedInput


class SendingPeer:
    """A peer that keeps what it is refused with."""

    def __init__(self, budget: InputBudget, *, known: bool = True) -> None:
        self.input = UnfinishedInput(budget)
        self.input.refuse = self.refuse
        self.refused: BrokerError | None = None
        if known:
            self.input.hold(0, anew=True)

    def refuse(self, error: BrokerError) -> None:
        self.refused = error


@pytest.fixture
def budget() -> InputBudget:
    return InputBudget(limit=1_000, deadline=10)


def test_whole_input_costs_nothing(budget):
    peer = SendingPeer(budget)
    peer.input.hold(300, anew=True)
    assert budget.held == 300
    peer.input.hold(0, anew=True)
    assert budget.held == 0


def test_past_the_limit_the_peer_that_began_first_is_refused_and_the_setting_is_named(budget):
    slow, quick = SendingPeer(budget), SendingPeer(budget)
    slow.input.hold(400, anew=True)
    quick.input.hold(500, anew=True)
    slow.input.hold(450, anew=False)
    assert (slow.refused, quick.refused) == (None, None)
    quick.input.hold(600, anew=False)
    assert isinstance(slow.refused, LimitReached)
    assert "QB_MAX_UNFINISHED_BYTES" in str(slow.refused)
    assert quick.refused is None
    assert budget.held == 600


def test_a_peer_that_has_finished_something_meanwhile_did_not_begin_first(budget):
    busy, stuck = SendingPeer(budget), SendingPeer(budget)
    busy.input.hold(400, anew=True)
    stuck.input.hold(400, anew=True)
    busy.input.hold(400, anew=True)
    busy.input.hold(700, anew=False)
    assert stuck.refused is not None
    assert busy.refused is None


def test_one_that_is_larger_than_the_limit_by_itself_is_refused(budget):
    peer = SendingPeer(budget)
    peer.input.hold(1_001, anew=True)
    assert peer.refused is not None
    assert budget.held == 0
    peer.input.hold(5_000, anew=False)
    assert budget.held == 0


def test_an_unknown_peer_holds_a_little_outside_the_budget_and_the_rest_in_it(budget):
    strangers = [SendingPeer(budget, known=False) for _ in range(5)]
    for stranger in strangers:
        stranger.input.hold(FREE, anew=False)
    assert budget.held == 0
    strangers[0].input.hold(FREE + 900, anew=False)
    assert budget.held == 900
    strangers[0].input.hold(500, anew=True)  # its first frame is whole, and 500 bytes of the next one are here
    assert budget.held == 500
    assert [stranger.refused for stranger in strangers] == [None] * 5


def test_the_time_for_one_frame_is_over_but_a_peer_may_send_frames_for_ever(budget):
    stuck, busy = SendingPeer(budget), SendingPeer(budget, known=False)
    stuck.input.hold(5, anew=True)
    for now in range(40):
        busy.input.hold(5, anew=True)
        if now == 20:
            assert stuck.refused is not None
        budget.look(now)
        stuck.input.hold(5 + now, anew=False)
    assert isinstance(stuck.refused, PeerMisbehaved)
    assert "QB_FRAME_DEADLINE" in str(stuck.refused)
    assert busy.refused is None


def test_a_peer_that_has_gone_holds_nothing(budget):
    peer = SendingPeer(budget)
    peer.input.hold(300, anew=True)
    peer.input.close()
    assert budget.held == 0
    budget.look(0)
    budget.look(100)
    assert peer.refused is None


def test_whole_input_that_waits_for_the_broker_is_refused_to_no_peer_but_little_is_read_then(budget):
    peers = [SendingPeer(budget) for _ in range(3)]
    for peer in peers[:2]:
        peer.input.postpone(500)
    assert not budget.is_tight()
    peers[2].input.postpone(1)
    assert budget.is_tight()
    assert [peer.refused for peer in peers] == [None] * 3
    peers[0].input.postpone(0)
    assert not budget.is_tight()
    peers[1].input.close()
    peers[2].input.close()
    assert budget.postponed == 0
