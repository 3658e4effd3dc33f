"""The ledger's own judgement: what is lost, doubled, torn or stale does not pass."""

from __future__ import annotations

import pytest

from tests.support.cluster_ledger import Findings, Ledger


@pytest.fixture
def ledger() -> Ledger:
    ledger = Ledger()
    for offset, body in enumerate([b"p0", b"p1"]):
        ledger.note(0, offset, body)
    ledger.begun, ledger.committed = {0, 1, 2}, {0, 1}
    return ledger


PLAIN = ([b"p0", b"p1"], [])
STAGED = ([b"t0", b"t1"], [b"t1", b"t0"])


def test_what_is_right_passes(ledger: Ledger) -> None:
    assert not any(ledger.judge(PLAIN, STAGED))
    assert not any(ledger.judge(([*PLAIN[0], b"not acked"], []), ([*STAGED[0], b"t2"], [*STAGED[1], b"t2"])))


@pytest.mark.parametrize(
    ("plain", "staged", "kind"),
    [
        (([b"p0"], []), STAGED, "lost"),
        (([b"p0", b"x", b"p1"], []), STAGED, "lost"),
        (([b"p1", b"p0"], []), STAGED, "lost"),
        (PLAIN, ([b"t0"], [b"t0"]), "lost"),
        (([b"p0", b"p1", b"p1"], []), STAGED, "doubled"),
        (PLAIN, ([b"t0", b"t1", b"t1"], STAGED[1]), "doubled"),
        (PLAIN, ([b"t0", b"t1", b"t2"], STAGED[1]), "torn"),
        (PLAIN, ([*STAGED[0], b"t9"], [*STAGED[1], b"t9"]), "torn"),
    ],
)
def test_what_is_wrong_is_named(ledger: Ledger, plain: list[list[bytes]], staged: list[list[bytes]], kind: str) -> None:
    found = ledger.judge(plain, staged)
    assert [name for name, words in zip(Findings._fields, found, strict=True) if words] == [kind]


def test_an_offset_that_was_acked_for_two_messages_is_doubled(ledger: Ledger) -> None:
    ledger.note(0, 1, b"another")
    assert ledger.judge(PLAIN, STAGED).doubled == ("offset 1 of partition 0 was acked twice",)


def test_an_answer_without_what_was_acked_before_is_stale(ledger: Ledger) -> None:
    ledger.check_read(0, 1, "", {1: b"p1"})
    ledger.check_read(0, 1, "NOT_OWNER", {})
    ledger.check_committed(5, 6)
    assert ledger.stale == []
    ledger.check_read(0, 1, "", {})
    ledger.check_read(0, 1, "OFFSET_OUT_OF_RANGE", {})
    ledger.check_committed(5, 4)
    assert len(ledger.stale) == 3
    ledger.clocks_differ = True
    ledger.check_read(0, 1, "", {})
    ledger.check_committed(5, 4)
    assert (len(ledger.stale), len(ledger.outdated)) == (3, 2)
    ledger.check_read(0, 1, "", {}, consistent=True)
    ledger.check_committed(5, 4, consistent=True)
    assert len(ledger.stale) == 5
    assert ledger.judge(PLAIN, STAGED).stale == tuple(ledger.stale)
