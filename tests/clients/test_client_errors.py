"""The client's types of refusals are those of the broker."""

from __future__ import annotations

import inspect

import pytest

import qb
from qb.cli.terminal.command import reason
from qb.clients.protocol.client_errors import PublishFailed, RequestRefused, refusal, without_calls
from qb.core.wire.errors import REPLIES, BrokerError, Code, UnknownSubscription, UnknownTopic, UnknownTransaction

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


HINTS = [(UnknownTopic("a"), "create_topic"), (UnknownSubscription("a"), "create_subscription")]
HINTS += [(UnknownTransaction("a"), "list_transactions")]


@pytest.mark.parametrize(("failure", "call"), HINTS)
def test_a_refusal_that_names_a_command_names_the_call_too_but_not_on_the_command_line(
    failure: BrokerError, call: str
) -> None:
    raised = refusal(REPLIES[type(failure)].code, str(failure))
    assert str(raised).startswith(f"{failure} (in a program: client.{call}(")
    assert raised.text == reason(raised) == str(failure)
    assert reason(PublishFailed(f"body 0 failed: {raised}")) == f"body 0 failed: {failure}"


@pytest.mark.parametrize("client", [qb.BrokerClient, qb.AsyncBrokerClient])
@pytest.mark.parametrize("kind", [kind for kind in RequestRefused.__subclasses__() if kind.in_a_program])
def test_a_call_that_a_refusal_names_is_one_of_the_client(kind: type[RequestRefused], client: type) -> None:
    name, _, arguments = kind.in_a_program.rstrip(")").partition("(")
    parameters = inspect.signature(getattr(client, name)).parameters
    assert set(filter(None, arguments.split(", "))) <= set(parameters)
    assert without_calls(str(kind(Code.INTERNAL, "do: qb x"))) == "do: qb x"
