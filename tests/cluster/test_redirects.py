"""A client follows redirects at once, and brokers that name each other do not keep it busy."""

from __future__ import annotations

import pytest

from qb.clients.protocol.client_errors import NotOwner
from qb.clients.protocol.conversation import Conversation, Goodbye, PushedFrame, TurnedAway, Welcome
from qb.clients.protocol.reconnecting import ConnectionTrouble, ReconnectBackoff
from qb.core.wire.addresses import DEFAULT_HOST, addresses_of
from qb.core.wire.frames import MessageType, decode_frame, encode_frame

WELCOME = {"status": "success", "server": "qb/1", "max_message_size": "1000"}


def trouble_with(*servers: str) -> ConnectionTrouble:
    return ConnectionTrouble(addresses_of(DEFAULT_HOST, None, servers))


def not_owner(owner: str = "") -> NotOwner:
    error = NotOwner("NOT_OWNER", "another one has it")
    error.owner = owner
    return error


def test_the_owner_that_is_named_comes_next_and_at_once() -> None:
    trouble = trouble_with("a:1", "b:2", "c:3")
    trouble.note(not_owner("c:3"))
    assert (str(trouble.server), trouble.pause(ReconnectBackoff()), trouble.failures) == ("c:3", 0, 0)


def test_an_owner_outside_the_list_is_followed_too_with_tls_as_the_list_has_it() -> None:
    trouble = ConnectionTrouble(addresses_of(DEFAULT_HOST, None, ["qbs://ops@a:1"]))
    trouble.note(not_owner("d:4"))
    assert str(trouble.server) == "qbs://ops@d:4"


def test_after_an_owner_that_does_not_answer_the_next_of_the_list_is_tried() -> None:
    trouble = trouble_with("a:1", "b:2", "c:3")
    trouble.note(not_owner("z:9"))
    trouble.note(ConnectionRefusedError())
    assert str(trouble.server) == "b:2"
    assert trouble.pause(ReconnectBackoff()) == 0


def test_brokers_that_name_each_other_are_not_asked_without_a_pause_for_ever() -> None:
    trouble, backoff = trouble_with("a:1", "b:2"), ReconnectBackoff()
    pauses = []
    for number in range(20):
        trouble.note(not_owner("ba"[number % 2] + ":1"))
        pauses.append(trouble.pause(backoff))
    assert pauses[0] == 0
    assert sum(pause > 0 for pause in pauses) >= 8
    assert trouble.failures > 0, "open() must not wait for ever"


def test_goodbye_with_an_owner_sends_the_client_there() -> None:
    trouble = trouble_with("a:1", "b:2", "c:3")
    trouble.welcomed()
    trouble.moved("c:3")
    trouble.note(ConnectionError("it moves"))
    assert (str(trouble.server), trouble.pause(ReconnectBackoff())) == ("c:3", 0)


def test_each_of_several_brokers_is_tried_for_a_second_and_longer_only_in_later_rounds() -> None:
    trouble = trouble_with("a:1", "b:2")
    assert trouble.connect_timeout == 1
    for _ in range(2 * 8):
        trouble.note(TimeoutError())
    assert trouble.connect_timeout == 3
    assert trouble_with("a:1").connect_timeout == 5


# The conversation


def opened(**welcome: str) -> tuple[Conversation, object]:
    talk = Conversation(idempotent=False)
    return talk, welcomed(talk, **welcome)


def welcomed(talk: Conversation, **welcome: str) -> object:
    hello = decode_frame(talk.open())
    assert hello.properties["features"] == "redirect,publish_runs"
    talk.receive(encode_frame(MessageType.ACK, hello.sequence_number, 0, WELCOME | welcome))
    return talk.next_event()


def test_a_refusal_with_an_owner_is_a_redirect() -> None:
    talk = Conversation(idempotent=False)
    hello = decode_frame(talk.open())
    refused = {"status": "error", "code": "NOT_OWNER", "error": "no", "owner": "b:2", "cell": "main", "epoch": "4"}
    talk.receive(encode_frame(MessageType.ACK, hello.sequence_number, 0, refused))
    event = talk.next_event()
    assert isinstance(event, TurnedAway)
    assert isinstance(event.error, NotOwner)
    assert event.error.owner == "b:2"


def test_a_broker_with_an_epoch_that_is_over_is_not_believed() -> None:
    talk, event = opened(epoch="7")
    assert isinstance(event, Welcome)
    event = welcomed(talk, epoch="6")
    assert isinstance(event, TurnedAway)
    assert isinstance(event.error, NotOwner)
    assert isinstance(welcomed(talk, epoch="8"), Welcome)


def test_a_delivery_with_an_epoch_that_is_over_ends_the_connection() -> None:
    talk, _ = opened(epoch="7")
    talk.receive(encode_frame(MessageType.DELIVER, 0, 0, {"epoch": "7"}))
    assert isinstance(talk.next_event(), PushedFrame)
    talk.receive(encode_frame(MessageType.DELIVER, 0, 0, {"epoch": "6"}))
    with pytest.raises(NotOwner, match="epoch 6, which is over"):
        talk.next_event()


def test_a_client_of_a_cluster_asks_sooner_for_a_sign_of_life() -> None:
    assert opened(lease_ttl="15")[0].silence == 5
    assert opened()[0].silence == float("inf")


def test_goodbye_names_the_owner() -> None:
    talk, _ = opened()
    talk.receive(encode_frame(MessageType.GOODBYE, 0, 0, {"reason": "it moves", "owner": "b:2"}))
    assert talk.next_event() == Goodbye("it moves", "b:2")
