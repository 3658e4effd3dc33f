"""The tables behind a client's connection: every state with every event."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qb.clients.blocking.connection.reading_duty import ALONE, ASIDE, DUTIES, Duty, DutyEvent, ReadingDuty
from qb.clients.protocol.connection_phases import PHASES, Phase, PhaseEvent, next_phase

# For each phase what ATTEMPT, CONNECTED, WELCOMED, LOST, ENDED make of it; a dash: it cannot happen.
PHASE_TABLE = """
down:          connecting   -           -    -             -
connecting:    -            greeting    -    backing_off   -
greeting:      -            -           up   backing_off   -
up:            -            -           -    backing_off   -
backing_off:   connecting   -           -    -             down
"""
# For each duty what TURN, ELAPSED, CALLER_READ, NEED, BULK_BEGAN, BULK_ENDED, PUSHED, GIVEN, SPREAD, HANDLER_WAITS and
# LOST make of it.
DUTY_TABLE = """
reads:     reads    reads     may_leave needed    bulk   reads     pushes   reads     reads     reads     reads
needed:    reads    needed    needed    needed    bulk   needed    pushes   needed    needed    needed    reads
may_leave: aside    may_leave may_leave needed    bulk   may_leave pushes   may_leave may_leave may_leave reads
aside:     aside    reads     in_use    reads     bulk   aside     pushes   aside     aside     aside     reads
in_use:    in_use   aside     in_use    may_leave bulk   in_use    pushes   in_use    in_use    in_use    reads
bulk:      bulk     bulk      bulk      bulk      bulk   reads     pushes   bulk      bulk      bulk      reads
pushes:    pushes   pushes    pushes    pushes    pushes pushes    pushes   given     spread    pushes    reads
given:     handlers given     given     pushes    pushes given     given    given     spread    pushes    reads
handlers:  handlers pushes    handlers  pushes    pushes handlers  handlers handlers  spread    pushes    reads
spread:    spread   spread    spread    spread    spread spread    spread   spread    spread    spread    reads
"""


def rows(table: str) -> dict[str, list[str]]:
    lines = (line.split() for line in table.strip().splitlines())
    return {state.rstrip(":").replace("_", " "): [each.replace("_", " ") for each in row] for state, *row in lines}


@pytest.mark.parametrize(("phase", "event"), list(product(Phase, PhaseEvent)))
def test_a_phase_and_an_event_give_the_next_phase_or_are_a_fault(phase: Phase, event: PhaseEvent) -> None:
    expected = rows(PHASE_TABLE)[phase][list(PhaseEvent).index(event)]
    if expected == "-":
        with pytest.raises(RuntimeError, match=f"a connection that is {phase} cannot be: {event}"):
            next_phase(phase, event)
    else:
        assert next_phase(phase, event) == expected


@pytest.mark.parametrize(("duty", "event"), list(product(Duty, DutyEvent)))
def test_a_duty_and_an_event_give_the_next_duty(duty: Duty, event: DutyEvent) -> None:
    assert DUTIES[duty, event] == rows(DUTY_TABLE)[duty][list(DutyEvent).index(event)]


def test_a_connection_is_up_only_after_it_was_connected_and_welcomed() -> None:
    assert [pair for pair, phase in PHASES.items() if phase is Phase.UP] == [(Phase.GREETING, PhaseEvent.WELCOMED)]
    assert [pair for pair, phase in PHASES.items() if phase is Phase.GREETING] == [
        (Phase.CONNECTING, PhaseEvent.CONNECTED)
    ]


def test_every_phase_is_reached_from_the_first_one() -> None:
    reached = {Phase.DOWN}
    for _ in Phase:
        reached |= {after for (before, _), after in PHASES.items() if before in reached}
    assert reached == set(Phase)


def after(*events: DutyEvent) -> Duty:
    duty = ReadingDuty()
    for event in events:
        duty.on(event)
    return duty.state


def test_the_thread_stands_aside_while_callers_read_and_comes_back_when_none_has() -> None:
    assert after(DutyEvent.CALLER_READ) not in ASIDE
    assert after(DutyEvent.CALLER_READ, DutyEvent.TURN) in ASIDE
    assert after(DutyEvent.CALLER_READ, DutyEvent.TURN, DutyEvent.CALLER_READ, DutyEvent.ELAPSED) in ASIDE
    assert after(DutyEvent.CALLER_READ, DutyEvent.TURN, DutyEvent.ELAPSED) is Duty.READS


def test_a_thread_that_is_needed_reads_once_before_it_stands_aside_again() -> None:
    needed = (DutyEvent.CALLER_READ, DutyEvent.TURN, DutyEvent.CALLER_READ, DutyEvent.NEED)
    assert after(*needed) not in ASIDE
    assert after(*needed, DutyEvent.TURN) in ASIDE
    assert after(DutyEvent.CALLER_READ, DutyEvent.NEED, DutyEvent.TURN) not in ASIDE


def test_callers_do_not_read_while_anything_is_pushed_until_the_connection_ends() -> None:
    assert after(DutyEvent.PUSHED) in ALONE
    assert after(DutyEvent.PUSHED, DutyEvent.BULK_BEGAN, DutyEvent.BULK_ENDED, DutyEvent.CALLER_READ) in ALONE
    assert after(DutyEvent.PUSHED, DutyEvent.LOST) is Duty.READS


def test_callers_do_not_read_while_one_waits_for_many_answers_on_whatever_connection() -> None:
    duty = ReadingDuty()
    duty.begin_bulk()
    duty.begin_bulk()
    duty.end_bulk()
    assert duty.state is Duty.BULK
    duty.on(DutyEvent.PUSHED)
    duty.lost()
    assert duty.state is Duty.BULK
    duty.end_bulk()
    assert duty.state is Duty.READS
    duty.lost()
    assert duty.state is Duty.READS


def test_the_thread_leaves_the_socket_to_the_handlers_until_their_thread_waits_without_reading() -> None:
    given_one = (DutyEvent.PUSHED, DutyEvent.GIVEN)
    assert after(*given_one) in ALONE
    assert after(*given_one, DutyEvent.TURN) is Duty.HANDLERS
    assert after(*given_one, DutyEvent.HANDLER_WAITS, DutyEvent.TURN) is Duty.PUSHES
    for event in (DutyEvent.HANDLER_WAITS, DutyEvent.NEED, DutyEvent.ELAPSED, DutyEvent.BULK_BEGAN):
        assert after(*given_one, DutyEvent.TURN, event) is Duty.PUSHES


def test_the_thread_reads_alone_while_several_handle_what_is_pushed_or_a_caller_waits_for_many_answers() -> None:
    assert after(DutyEvent.PUSHED, DutyEvent.SPREAD, DutyEvent.GIVEN, DutyEvent.TURN) in ALONE
    duty = ReadingDuty()
    duty.begin_bulk()
    duty.on(DutyEvent.PUSHED)
    duty.given(alone=True)
    duty.on(DutyEvent.TURN)
    assert duty.state in ALONE
    duty.end_bulk()
    duty.given(alone=True)
    duty.on(DutyEvent.TURN)
    assert duty.state is Duty.HANDLERS
    duty.given(alone=False)
    assert duty.state is Duty.SPREAD


@given(st.lists(st.sampled_from(DutyEvent)))
def test_an_event_that_changes_nothing_may_be_skipped(events: list[DutyEvent]) -> None:
    one, other = ReadingDuty(), ReadingDuty()
    for event in events:
        one.on(event)
        if other.changes_at(event):
            other.on(event)
    assert one.state is other.state


@given(st.lists(st.sampled_from(DutyEvent)))
def test_from_wherever_it_is_a_thread_that_no_caller_minds_reads_again(events: list[DutyEvent]) -> None:
    assert after(*events, DutyEvent.TURN, DutyEvent.ELAPSED, DutyEvent.ELAPSED) not in ASIDE
