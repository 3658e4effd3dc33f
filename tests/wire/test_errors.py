"""Failures are types, and one table turns them into answers."""

from __future__ import annotations

from qb.core.wire.errors import REPLIES, BrokerError, Code


def subclasses(kind):
    for child in kind.__subclasses__():
        yield child
        yield from subclasses(child)


def test_every_failure_has_a_row():
    assert set(subclasses(BrokerError)) == set(REPLIES)


def test_every_code_belongs_to_one_failure():
    assert sorted(reply.code for reply in REPLIES.values()) == sorted(Code)
