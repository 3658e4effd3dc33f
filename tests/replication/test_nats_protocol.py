"""The NATS protocol without I/O: what is sent, what is read, and which server comes next."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qb.replication.nats.nats_conversation import NatsConversation, NatsDisconnected, NoResponders
from qb.replication.nats.nats_protocol import (
    LARGE,
    NatsCredentials,
    NatsMessage,
    NatsMisbehaved,
    NatsParser,
    NatsServerInfo,
    ServerPing,
    ServerPong,
    ServerRefusal,
    connect_command,
    publish_command,
)
from qb.replication.nats.server_pool import NatsAddress, ServerPool, parse_address

INFO = (
    b'INFO {"server_id":"A","version":"2.15.1","max_payload":1048576,"headers":true,"connect_urls":["b:1"],"new":1}\r\n'
)
SENT = (
    INFO
    + b"PING\r\n+OK\r\nMSG a.b 7 5\r\nhello\r\nMSG a.b 7 reply.to 0\r\n\r\n"
    + b"HMSG c 8 r 20 25\r\nNATS/1.0\r\nA: b c\r\n\r\nworld\r\n"
    + b"HMSG d 9 16 16\r\nNATS/1.0 503\r\n\r\n\r\n"
    + b"HMSG d 9 33 33\r\nNATS/1.0 404 No Messages\r\nX:1\r\n\r\n\r\n"
    + b"-ERR 'Authorization Violation'\r\npong\r\n"
)
EVENTS = [
    NatsServerInfo("A", "", "2.15.1", 1048576, True, connect_urls=("b:1",)),
    ServerPing(),
    NatsMessage("a.b", 7, "", {}, b"hello"),
    NatsMessage("a.b", 7, "reply.to", {}, b""),
    NatsMessage("c", 8, "r", {"A": "b c"}, b"world"),
    NatsMessage("d", 9, "", {}, b"", 503),
    NatsMessage("d", 9, "", {"X": "1"}, b"", 404, "No Messages"),
    ServerRefusal("Authorization Violation"),
    ServerPong(),
]


def parsed(pieces: list[bytes]) -> list[object]:
    parser, events = NatsParser(), []
    for piece in pieces:
        parser.receive(piece)
        events += parser.events()
    return events


@given(st.integers(1, 40))
def test_events_do_not_depend_on_how_tcp_cuts_the_bytes(step: int) -> None:
    assert parsed([SENT[at : at + step] for at in range(0, len(SENT), step)]) == EVENTS


LARGEST = bytes(range(256)) * (3 * LARGE // 256)
WITH_LARGE = (
    b"MSG a 1 x %d\r\n%b\r\n" % (len(LARGEST), LARGEST)
    + b"HMSG b 2 r 20 %d\r\nNATS/1.0\r\nA: b c\r\n\r\n%b\r\n" % (20 + LARGE, LARGEST[:LARGE])
    + b"MSG c 3 5\r\nhello\r\n"
    + b"MSG d 4 %d\r\n%b\r\n" % (LARGE - 1, LARGEST[: LARGE - 1])
)
LARGE_EVENTS = [
    NatsMessage("a", 1, "x", {}, LARGEST),
    NatsMessage("b", 2, "r", {"A": "b c"}, LARGEST[:LARGE]),
    NatsMessage("c", 3, "", {}, b"hello"),
    NatsMessage("d", 4, "", {}, LARGEST[: LARGE - 1]),
]


@pytest.mark.parametrize("step", [1, 7, 1000, LARGE - 1, LARGE, LARGE + 40, 2 * LARGE, 1 << 20])
@pytest.mark.parametrize("in_place", [True, False])
def test_large_payloads_do_not_depend_on_how_and_where_they_are_received(step: int, in_place: bool) -> None:
    parser, events, at = NatsParser(), [], 0
    while at < len(WITH_LARGE):
        room = min(step, len(parser.rest)) if in_place else 0
        parser.rest[:room] = WITH_LARGE[at : at + room]
        parser.filled(room)
        parser.receive(WITH_LARGE[at + room : at + step])
        events += parser.events()
        at += step
    assert events == LARGE_EVENTS
    assert not parser.rest


def test_the_rest_of_a_large_payload_is_known_from_its_head_on() -> None:
    parser = NatsParser()
    parser.receive(b"MSG a 1 %d\r\n12345" % LARGE)
    assert list(parser.events()) == []
    assert len(parser.rest) == LARGE + 2 - 5
    parser.receive(b"x" * (LARGE - 5) + b"\r\nPI")
    (message,) = parser.events()
    assert isinstance(message, NatsMessage)
    assert message.payload == b"12345" + b"x" * (LARGE - 5)
    assert not parser.rest
    parser.receive(b"NG\r\n")
    assert list(parser.events()) == [ServerPing()]


@pytest.mark.parametrize(
    "line",
    [
        b"HTTP/1.1 400 Bad Request\r\n",
        b"MSG a x 5\r\n",
        b"MSG a 1 -5\r\n",
        b"HMSG a 1 9 5\r\n",
        b"MSG a 1 99999999999\r\n",
        b"MSG a 1 b c 5\r\n",
        b"INFO nonsense\r\n",
        b"HMSG a 1 4 4\r\nHTTP\r\n",
        b"x" * (1 << 20) + b"x",
    ],
)
def test_bytes_that_are_not_the_protocol_are_an_error(line: bytes) -> None:
    with pytest.raises(NatsMisbehaved):
        parsed([line])


def test_a_message_with_headers_says_how_long_they_are() -> None:
    assert publish_command("a", b"xyz") == b"PUB a 3\r\nxyz\r\n"
    assert publish_command("a", b"xyz", reply="r") == b"PUB a r 3\r\nxyz\r\n"
    sent = publish_command("a", b"xyz", reply="r", headers={"N": 1})
    assert sent == b"HPUB a r 18 21\r\nNATS/1.0\r\nN: 1\r\n\r\nxyz\r\n"


def test_connect_carries_the_credentials_that_there_are() -> None:
    def options(credentials: NatsCredentials) -> dict:
        return msgspec.json.decode(connect_command("me", credentials, tls=False).removeprefix(b"CONNECT "))

    assert options(NatsCredentials("u", "p"))["user"] == "u"
    assert options(NatsCredentials(token="t"))["auth_token"] == "t"
    assert {"user", "pass", "auth_token"}.isdisjoint(options(NatsCredentials()))
    assert options(NatsCredentials())["no_responders"] is True


@pytest.mark.parametrize(
    ("text", "address", "credentials"),
    [
        ("nats://a:1", NatsAddress("a", 1), NatsCredentials()),
        ("a", NatsAddress("a", 4222), NatsCredentials()),
        ("tls://[::1]:5", NatsAddress("::1", 5, True), NatsCredentials()),
        ("nats://me:a%40b@c", NatsAddress("c", 4222), NatsCredentials("me", "a@b")),
        ("nats://secret@c", NatsAddress("c", 4222), NatsCredentials(token="secret")),
    ],
)
def test_an_address_is_read(text: str, address: NatsAddress, credentials: NatsCredentials) -> None:
    assert parse_address(text) == (address, credentials)


@pytest.mark.parametrize("text", ["http://a", "nats://", "nats://a/b", "nats://a:x"])
def test_a_wrong_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_address(text)


def test_servers_are_tried_in_turn_with_a_pause_before_every_round() -> None:
    a, b = NatsAddress("a", 1), NatsAddress("b", 1)
    pool = ServerPool([a, b])
    assert [pool.next() for _ in range(5)] == [(a, 0.0), (b, 0.0), (a, 0.05), (b, 0.0), (a, 0.1)]
    pool.connected()
    assert pool.next() == (b, 0.0)


def test_servers_that_the_cluster_names_are_tried_and_those_given_are_kept() -> None:
    a = NatsAddress("a", 1)
    pool = ServerPool([a])
    pool.discovered(["a:1", "b:2", "c:3"])
    assert {pool.next()[0] for _ in range(3)} == {a, NatsAddress("b", 2), NatsAddress("c", 3)}
    pool.discovered(["c:3"])
    assert {pool.next()[0] for _ in range(4)} == {a, NatsAddress("c", 3)}


@pytest.fixture
def talk() -> NatsConversation:
    talk = NatsConversation("me", NatsCredentials())
    connect(talk)
    return talk


def connect(talk: NatsConversation) -> bytes:
    talk.receive(INFO)
    talk.greet(tls=False)
    greeting = talk.take_output()
    talk.receive(b"PONG\r\n")
    return greeting


def reply_subject(sent: bytes) -> bytes:
    return sent.split(b" ")[2]


def test_answers_find_their_requests_and_come_once(talk: NatsConversation) -> None:
    answers: list[tuple[str, object]] = []
    for name in ("one", "two"):
        talk.request("service", b"", lambda answer, it=name: answers.append((it, answer)))
    first, second = (reply_subject(line) for line in talk.take_output().split(b"\r\n") if line)
    for subject, body in ((second, b"2"), (first, b"1"), (first, b"again")):
        talk.receive(b"MSG %s 1 %d\r\n%s\r\n" % (subject, len(body), body))
    assert [(name, answer.payload) for name, answer in answers] == [("two", b"2"), ("one", b"1")]


def test_a_request_for_many_answers_gets_them_until_it_is_forgotten(talk: NatsConversation) -> None:
    answers: list[bytes] = []
    token = talk.request("service", b"", lambda answer: answers.append(answer.payload), many=True)
    subject = reply_subject(talk.take_output())
    for body in (b"1", b"2"):
        talk.receive(b"MSG %s 1 1\r\n%s\r\n" % (subject, body))
    assert token is not None
    talk.forget(token)
    talk.receive(b"MSG %s 1 1\r\n3\r\n" % subject)
    assert answers == [b"1", b"2"]


def test_no_responders_is_an_error(talk: NatsConversation) -> None:
    answers: list[object] = []
    talk.request("service", b"", answers.append)
    talk.receive(b"HMSG %s 1 16 16\r\nNATS/1.0 503\r\n\r\n\r\n" % reply_subject(talk.take_output()))
    assert [type(each) for each in answers] == [NoResponders]


def test_a_lost_connection_answers_open_requests_and_subscribes_again(talk: NatsConversation) -> None:
    answers: list[object] = []
    received: list[NatsMessage] = []
    talk.request("service", b"", answers.append)
    kept = talk.subscribe("events.*", received.append)
    talk.unsubscribe(talk.subscribe("gone", received.append))
    talk.disconnected()
    assert [type(each) for each in answers] == [NatsDisconnected]
    assert talk.request("service", b"", answers.append) is None
    greeting = connect(talk)
    assert b"SUB events.* %d\r\n" % kept in greeting
    assert b"gone" not in greeting
    talk.receive(b"MSG events.1 %d 1\r\nx\r\n" % kept)
    assert [message.payload for message in received] == [b"x"]


def test_pings_are_answered_and_a_server_that_answers_none_is_given_up(talk: NatsConversation) -> None:
    talk.receive(b"PING\r\n")
    assert talk.take_output() == b"PONG\r\n"
    assert [talk.ping() for _ in range(3)] == [True, True, False]
    talk.receive(b"PONG\r\n")
    assert talk.ping()


def test_a_callback_that_fails_harms_no_other(talk: NatsConversation, caplog: pytest.LogCaptureFixture) -> None:
    def fail(message: NatsMessage) -> None:
        raise RuntimeError("a fault")

    received: list[NatsMessage] = []
    talk.subscribe("a", fail)
    talk.subscribe("b", received.append)
    talk.receive(b"MSG a 2 1\r\nx\r\nMSG b 3 1\r\nx\r\n")
    assert len(received) == 1
    assert "a callback of the NATS client failed" in caplog.text
