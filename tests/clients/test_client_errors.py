"""The client's types of refusals are those of the broker."""

from __future__ import annotations

import pytest

import qb
from qb.clients.protocol.client_errors import RequestRefused, refusal
from qb.core.wire.errors import REPLIES, Code

# A well-behaved client never sees these, or can do nothing about them.
WITHOUT_A_TYPE = {Code.BAD_FRAME, Code.UNKNOWN_TYPE, Code.INTERNAL}


@pytest.mark.parametrize("failure", REPLIES)
def test_a_refusal_has_the_name_that_the_broker_has_for_it(failure: type) -> None:
    code = REPLIES[failure].code
    raised = refusal(code, "no")
    assert (raised.code, raised.text, str(raised)) == (code, "no", "no")
    if code in WITHOUT_A_TYPE:
        assert type(raised) is RequestRefused
    else:
        assert type(raised).__name__ == failure.__name__
        assert getattr(qb, failure.__name__) is type(raised)


def test_a_code_of_a_newer_broker_is_a_plain_refusal() -> None:
    assert type(refusal("OUT_OF_COFFEE", "no")) is RequestRefused
