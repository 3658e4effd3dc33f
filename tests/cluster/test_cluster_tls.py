"""Relays between brokers with certificates of the cluster; and the rights of users, with and without them."""

from __future__ import annotations

import json
import socket
import ssl
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
import trustme

from qb.cluster import cluster_port
from qb.cluster.cluster_port import dial
from qb.cluster.cluster_tls import ClusterTls, cluster_tls
from qb.cluster.relays.relay_protocol import RelayPreamble, encode_data, encode_preamble
from qb.core.rights.users_file import hash_of, parse_users, write_users
from qb.core.settings import ClusterSettings, Settings, StorageSettings
from qb.core.wire.frames import MessageType as T
from qb.core.wire.frames import encode_frame
from qb.doors.exposure import refusal_of_cluster_port
from tests.support.relayed_brokers import EPOCH, opened_pair

PREAMBLE = encode_preamble(RelayPreamble("main", EPOCH, "json", "10.0.0.9", 50_000))
LINE = b'{"type":"listTopics"}\n'
USERS = f"""
user reader sha256:{hash_of("reader")} read:other
user writer sha256:{hash_of("writer")} publish:a manage:a
user anonymous read:public
"""
Certificates = Callable[[str], ClusterSettings]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Returns the settings of a broker whose certificate is of a named authority, and that believes `ours`."""
    directory, authorities = tmp_path_factory.mktemp("cluster-tls"), dict[str, trustme.CA]()

    def made(name: str) -> ClusterSettings:
        for each in ("ours", name):
            if each not in authorities:
                authorities[each] = trustme.CA()
                authorities[each].cert_pem.write_to_path(directory / f"{each}-ca.pem")
        file = str(directory / f"{name}.pem")
        authorities[name].issue_cert("broker").private_key_and_cert_chain_pem.write_to_path(file)
        return ClusterSettings(tls_cert=file, tls_key=file, tls_ca=str(directory / "ours-ca.pem"))

    return made


async def test_all_doors_are_served_through_an_encrypted_relay(tmp_path: Path, certificates: Certificates) -> None:
    async with opened_pair(tmp_path, cluster=certificates("ours")) as pair:
        pair.announce()
        peer = await pair.follower()
        await peer.ask(T.CREATE_TOPIC, 1, topic="a")
        body = b"x" * 1_000_000
        assert (await peer.publish("a", body)).properties["offset"] == "0"
        await peer.ask(T.CREATE_SUBSCRIPTION, 3, subscription_id="s", topic="a")
        await peer.ask(T.SUBSCRIBE, 4, subscription_id="s")
        pushed = await peer.receive()
        assert pushed is not None
        assert pushed.body == body
        lines = await pair.follower.lines()
        await lines.send(type="listTopics")
        assert (await lines.receive())["ok"]
        http = await pair.follower.http()
        assert (await http.ask("GET", "/topics")).status == 200


@pytest.mark.parametrize("encrypted", [False, True])
async def test_a_peer_that_sends_no_more_still_gets_its_answers(
    tmp_path: Path, certificates: Certificates, encrypted: bool
) -> None:
    async with opened_pair(tmp_path, cluster=certificates("ours") if encrypted else None) as pair:
        pair.announce()
        peer = await pair.follower()
        await peer.stream.send_all(encode_frame(T.CREATE_TOPIC, 1, 0, {"topic": "a"}))
        await peer.stream.send_eof()
        with trio.fail_after(20):
            answer = await peer.receive()
            assert answer is not None
            assert answer.properties["status"] == "success"
            assert await peer.receive() is None


async def said_to(address: str, tls: ClusterTls | None, data: bytes) -> bytes:
    """Return the first bytes that a cluster port answers; b"" if it refuses."""
    with trio.fail_after(20):
        try:
            async with await dial(address, tls) as stream:
                await stream.send_all(data)
                return bytes(await stream.receive_some(1_000))
        except (OSError, trio.BrokenResourceError):
            return b""


async def test_a_preamble_is_believed_only_from_a_peer_with_a_certificate_of_the_cluster(
    tmp_path: Path, certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    data = PREAMBLE + encode_data(LINE)
    bare = object.__new__(ClusterTls)
    bare._client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare._client.check_hostname, bare._client.verify_mode = False, ssl.CERT_NONE
    async with opened_pair(tmp_path, cluster=certificates("ours")) as pair:
        for stranger in (None, bare, cluster_tls(certificates("theirs"))):
            assert await said_to(pair.cluster_address, stranger, data) == b""
        assert json.loads(await said_to(pair.cluster_address, cluster_tls(certificates("ours")), data))["ok"]
    assert sum("no certificate of the cluster" in text for text in caplog.messages) == 3


async def test_a_peer_that_does_not_finish_what_it_begins_is_closed_and_relays_go_on(
    tmp_path: Path, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_port, "PREAMBLE_SECONDS", 0.2)
    ours = cluster_tls(certificates("ours"))
    with trio.fail_after(60):
        async with opened_pair(tmp_path, cluster=certificates("ours")) as pair:
            for tls, said in ((None, b"\x16"), (ours, PREAMBLE[:5])):
                async with await dial(pair.cluster_address, tls) as stream:
                    await stream.send_all(said)
                    assert not await stream.receive_some(1)
            for said in (b"\x16", b"\x16\x03\x01" + bytes(100)):  # and one that is reset in the midst of it
                async with await dial(pair.cluster_address, None) as plain:
                    assert isinstance(plain, trio.SocketStream)
                    await plain.send_all(said)
                    plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            assert json.loads(await said_to(pair.cluster_address, ours, PREAMBLE + encode_data(LINE)))["ok"]


@pytest.mark.parametrize("encrypted", [False, True])
async def test_rights_hold_through_a_follower_as_at_the_owner(
    tmp_path: Path, certificates: Certificates, encrypted: bool
) -> None:
    users = tmp_path / "users"
    write_users(str(users), parse_users(USERS.encode(), "users").users.values())
    cluster = certificates("ours") if encrypted else None
    async with opened_pair(tmp_path, users_file=str(users), cluster=cluster) as pair:
        pair.announce()
        http = await pair.owner.http()
        made = await http.ask("POST", "/topics", {"name": "a"}, headers={"authorization": "Bearer writer"})
        assert made.status == 201
        for doors in (pair.owner, pair.follower):
            peer = await doors()  # of types 1 to 9: anonymous
            assert (await peer.publish("a")).properties["code"] == "UNKNOWN_TOPIC"
            lines = await doors.lines()
            await lines.send(type="auth", token="reader")
            assert (await lines.receive())["ok"]
            await lines.send(type="produce", topic="a", value="x")
            assert not (await lines.receive())["ok"]
            http = await doors.http()
            for token, status in (("reader", 404), ("wrong", 401), ("writer", 200)):
                answer = await http.ask("GET", "/topics/a", headers={"authorization": f"Bearer {token}"})
                assert answer.status == status
            lines = await doors.lines()
            await lines.send(type="auth", token="writer")
            assert (await lines.receive())["ok"]
            await lines.send(type="produce", topic="a", value="x")
            assert (await lines.receive())["ok"]


@pytest.mark.parametrize("encrypted", [False, True])
async def test_the_certificate_of_a_peer_that_is_passed_on_is_believed_from_a_certified_broker_alone(
    tmp_path: Path, certificates: Certificates, encrypted: bool
) -> None:
    users = tmp_path / "users"
    users.write_text("user edge cert:CN=edge manage:a\n")
    users.chmod(0o600)
    cluster = certificates("ours") if encrypted else ClusterSettings()
    claimed = encode_preamble(RelayPreamble("main", EPOCH, "json", "10.0.0.9", 50_000, "edge"))
    async with opened_pair(tmp_path, users_file=str(users), cluster=cluster) as pair:
        line = b'{"type":"createTopic","topic":"a"}\n'
        answer = json.loads(await said_to(pair.cluster_address, cluster_tls(cluster), claimed + encode_data(line)))
        assert answer["ok"] == encrypted


def test_a_cluster_port_beyond_loopback_needs_certificates() -> None:
    storage = StorageSettings(engine="jetstream")
    bare, secured = ClusterSettings(host="0.0.0.0"), ClusterSettings(host="0.0.0.0", tls_cert="c", tls_ca="a")
    assert "QB_CLUSTER_TLS_CERT" in refusal_of_cluster_port(Settings(storage=storage, cluster=bare))
    assert refusal_of_cluster_port(Settings(storage=storage, cluster=secured)) == ""


def test_certificates_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="missing"):
        cluster_tls(ClusterSettings(tls_cert=str(tmp_path / "missing.pem"), tls_ca="ca.pem"))
    with pytest.raises(OSError, match="QB_CLUSTER_TLS_CA"):
        cluster_tls(ClusterSettings(tls_cert="cert.pem"))
