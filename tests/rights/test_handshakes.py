"""Handshakes that fail or end early, and log-ins that are tried often."""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trustme

from qb.core.rights import log_in_pace
from qb.core.rights.known_users import KnownUsers
from qb.core.rights.log_in_pace import LogInPace
from qb.core.rights.users_file import hash_of, parse_users
from qb.core.wire.errors import Unauthenticated
from qb.doors.peer_identity import PeerIdentity
from qb.doors.tls_session import TlsSession
from qb.doors.tls_transport import HANDSHAKE_BYTES, HANDSHAKE_SECONDS, TlsTransport
from tests.conftest import BrokerProcess
from tests.support.brokers import free_port
from tests.support.certificates import write_certificate
from tests.support.waiting import wait_until


class Pair:
    """A session behind a handshake, and the socket of its peer."""

    def __init__(self, ours: socket.socket, theirs: socket.socket, context: ssl.SSLContext) -> None:
        self.theirs, self.failures = theirs, list[str]()
        transport = TlsTransport(ours, context)
        self.session = TlsSession(transport, "peer", pytest.fail, lambda error: b"", lambda: self.failures.append("x"))


@pytest.fixture
def pair() -> Iterator[Pair]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("localhost").configure_cert(context)
    with ExitStack() as opened:
        ours, theirs = [opened.enter_context(each) for each in socket.socketpair()]
        yield Pair(ours, theirs, context)


@pytest.mark.parametrize("trickles", [False, True])
async def test_a_handshake_has_five_seconds_also_if_it_comes_byte_by_byte(
    autojump_clock: trio.testing.MockClock, pair: Pair, trickles: bool
) -> None:
    async def trickle() -> None:
        for byte in b"\x16\x03\x01\x02" + bytes(20):
            pair.theirs.send(bytes([byte]))
            await trio.sleep(1.0)

    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        if trickles:
            nursery.start_soon(trickle)
        await pair.session.run()
        nursery.cancel_scope.cancel()
    assert trio.current_time() - began == pytest.approx(HANDSHAKE_SECONDS)
    assert pair.failures == ["x"]
    pair.theirs.setblocking(False)
    with suppress(ConnectionResetError):  # what it had sent was not read
        assert pair.theirs.recv(1) == b"", "the connection is closed"


async def test_a_handshake_that_is_too_large_ends_at_once(pair: Pair) -> None:
    hello = b"\x16\x03\x01\x40\x00" + b"\x01\x03\xff\xff" + bytes(16_380)
    piece = hello + (b"\x16\x03\x01\x40\x00" + bytes(16_384)) * 5
    assert len(piece) > HANDSHAKE_BYTES
    pair.theirs.setblocking(False)
    pair.theirs.send(piece)
    with trio.fail_after(HANDSHAKE_SECONDS - 1):
        await pair.session.run()
    assert pair.failures == ["x"]


async def test_the_eleventh_wrong_token_of_an_address_waits_and_a_right_one_too(
    autojump_clock: trio.testing.MockClock,
) -> None:
    users = KnownUsers(known=parse_users(f"user ops sha256:{hash_of('right')} admin:*\n".encode(), "users"))
    noted: list[str] = []
    audit = SimpleNamespace(note=lambda *about: noted.append(about[-1]))
    broker: Any = SimpleNamespace(
        access=SimpleNamespace(users=users, audit=audit, log_ins=LogInPace()), engine=SimpleNamespace(stages=dict)
    )

    async def seconds(address: str, token: str) -> float:
        transport: Any = SimpleNamespace(common_name=None, gone=False, pace=None)
        began = trio.current_time()
        try:
            await PeerIdentity(broker, "frames", transport, address).log_in(token)
        except Unauthenticated:
            assert token == "wrong"
        return trio.current_time() - began

    assert [await seconds("10.0.0.7:1", "wrong") for _ in range(10)] == [0.0] * 10
    waits = [await seconds("10.0.0.7:2", "wrong") for _ in range(6)]
    assert waits == pytest.approx([0.1, 0.2, 0.4, 0.5, 0.5, 0.5])
    assert await seconds("10.0.0.7:3", "right") == pytest.approx(log_in_pace.LONGEST)
    assert await seconds("10.0.0.8:1", "right") == 0.0
    await trio.sleep(log_in_pace.FORGOTTEN + 1)
    assert await seconds("10.0.0.7:4", "wrong") == 0.0
    assert noted.count("UNAUTHENTICATED") == 17


@pytest.mark.process
def test_a_half_closed_peer_gets_its_answer_and_a_failed_handshake_a_line_of_the_audit(tmp_path: Path) -> None:
    authority = trustme.CA()
    write_certificate(tmp_path, authority)
    files = {"tls_cert": tmp_path / "cert.pem", "tls_key": tmp_path / "key.pem", "audit_file": tmp_path / "audit"}
    port = free_port()
    broker = BrokerProcess(tmp_path, json_port=port, **files)
    try:
        context = ssl.create_default_context()
        authority.configure_trust(context)
        with context.wrap_socket(
            socket.create_connection(("127.0.0.1", port), 20), server_hostname="localhost"
        ) as peer:
            peer.sendall(b'{"type":"listTopics"}\n')
            socket.socket.shutdown(peer, socket.SHUT_WR)  # of TCP alone: TLS goes on in the other direction
            assert json.loads(peer.recv(65_536))["ok"]
        for said in (b"not TLS at all\n", b"\x16\x03\x01\x00\x05hello"):
            with socket.create_connection(("127.0.0.1", port), 20) as peer:
                peer.sendall(said)
                while peer.recv(65_536):
                    pass

        def noted() -> list[dict[str, Any]]:
            return [json.loads(line) for line in (tmp_path / "audit").read_text().splitlines()]

        wait_until(lambda: len(noted()) >= 2)
        assert [(each["door"], each["action"], each["outcome"]) for each in noted()] == [
            ("json", "handshake", "FAILED")
        ] * 2
    finally:
        broker.kill()
