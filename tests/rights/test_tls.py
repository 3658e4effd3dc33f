"""TLS on every door: real sockets, real certificates."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import pytest
import trustme

from qb import AsyncBrokerClient, BrokerClient, BrokerUnavailable
from qb.cli.main import main
from qb.core.rights.users_file import hash_of, parse_user, write_users
from qb.core.wire.frames import MessageType, encode_frame
from tests.support.brokers import BrokerProcess, free_port, run_server
from tests.support.certificates import write_certificate
from tests.support.peers import Peer
from tests.support.waiting import wait_until

TOKEN = "qb_secret-of-ops"
pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


class Site(NamedTuple):
    broker: BrokerProcess
    authority: trustme.CA
    directory: Path
    json_port: int
    http_port: int

    def context(self, client: trustme.LeafCert | None = None) -> ssl.SSLContext:
        context = ssl.create_default_context()
        self.authority.configure_trust(context)
        if client is not None:
            client.configure_cert(context)
        return context

    def connect(self, port: int, client: trustme.LeafCert | None = None) -> ssl.SSLSocket:
        plain = socket.create_connection(("127.0.0.1", port), timeout=20)
        return self.context(client).wrap_socket(plain, server_hostname="localhost")

    def peer(self, client: trustme.LeafCert | None = None) -> Peer:
        peer = Peer(self.broker.port)
        peer.socket = self.context(client).wrap_socket(peer.socket, server_hostname="localhost")
        return peer


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory, authority = tmp_path_factory.mktemp("tls"), trustme.CA()
    write_certificate(directory, authority)
    authority.cert_pem.write_to_path(directory / "ca.pem")
    users = [["anonymous", "read:*", "manage:*"], ["edge", "cert:CN=edge.example", "admin:*"]]
    users.append(["ops", f"sha256:{hash_of(TOKEN)}", "admin:*"])
    (directory / "tokens").write_text(f"other qb_wrong\nops {TOKEN}\n")
    write_users(str(directory / "users"), [parse_user(["user", *words]) for words in users])
    files = {
        "tls_cert": directory / "cert.pem",
        "tls_key": directory / "key.pem",
        "tls_client_ca": directory / "ca.pem",
    }
    json_port, http_port = free_port(), free_port()
    broker = BrokerProcess(directory, **files, users_file=directory / "users", json_port=json_port, http_port=http_port)
    yield Site(broker, authority, directory, json_port, http_port)
    broker.kill()


def of_client(site: Site, **more: Any) -> dict[str, Any]:
    """Return the arguments of a client of the site."""
    return {"host": f"qbs://localhost:{site.broker.port}", "ca_file": str(site.directory / "ca.pem"), **more}


def received(sock: socket.socket) -> bytes:
    """Return all that comes until the other side closes."""
    found = b""
    try:
        while data := sock.recv(65_536):
            found += data
    except (ConnectionResetError, ssl.SSLError):
        pass
    return found


def test_frames_json_lines_and_http_are_answered_over_tls(site: Site) -> None:
    with site.peer() as peer:
        assert peer.hello().properties["status"] == "success"
        assert peer.call("create_topic", topic="over-tls")["topic"] == "over-tls"
    with site.connect(site.json_port) as lines:
        lines.sendall(b'{"type":"listTopics"}\n')
        assert json.loads(lines.recv(65_536))["ok"]
    with site.connect(site.http_port) as http:
        http.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        assert received(http).startswith(b"HTTP/1.1 200")


def test_a_plain_peer_gets_a_sentence_that_says_so_in_the_words_of_its_door(site: Site) -> None:
    hello = encode_frame(MessageType.HELLO, 1, properties={"protocol": "1"})
    asked = {
        site.broker.port: hello,
        site.json_port: b'{"type":"listTopics"}\n',
        site.http_port: b"GET / HTTP/1.1\r\n\r\n",
    }
    for port, request in asked.items():
        with socket.create_connection(("127.0.0.1", port), timeout=20) as plain:
            plain.sendall(request)
            assert b"this port speaks TLS" in received(plain)


def test_a_certificate_is_its_user_and_one_of_a_foreign_authority_is_refused(site: Site) -> None:
    with site.peer(site.authority.issue_cert(common_name="edge.example")) as edge:
        assert edge.call("list_transactions")["stages"] == []  # without a HELLO, too
    with site.peer(site.authority.issue_cert(common_name="other.example")) as other:
        answer = other.ask(MessageType.REQUEST, 1, b"{}", method="list_transactions")
        assert answer.properties["code"] == "FORBIDDEN"
    foreign = trustme.CA().issue_cert(common_name="edge.example")
    with pytest.raises((ssl.SSLError, ConnectionError)), site.connect(site.broker.port, foreign) as refused:
        refused.sendall(encode_frame(MessageType.HELLO, 1, properties={"protocol": "1"}))
        assert received(refused) == b""
        raise ConnectionError
    past = datetime(2001, 1, 1, tzinfo=UTC)
    expired = site.authority.issue_cert(common_name="edge.example", not_after=past)
    with pytest.raises((ssl.SSLError, ConnectionError)), site.connect(site.broker.port, expired) as refused:
        assert received(refused) == b""
        raise ConnectionError


def test_a_handshake_that_is_cut_off_or_too_long_ends_and_others_are_served(site: Site) -> None:
    for sent in (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", b"\x16", b"\x16\x03\x01\xff\xff" + bytes(200_000)):
        with socket.create_connection(("127.0.0.1", site.broker.port), timeout=20) as broken:
            try:
                broken.sendall(sent)
                broken.shutdown(socket.SHUT_WR)
            except OSError:
                pass
            received(broken)
    with site.peer() as peer:
        assert peer.hello().properties["status"] == "success"


def test_openssl_speaks_with_it_and_not_below_tls_1_2(site: Site) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs openssl")
    asked = [openssl, "s_client", "-quiet", "-CAfile", str(site.directory / "ca.pem"), "-verify_return_error"]
    asked += ["-servername", "localhost", "-connect", f"127.0.0.1:{site.json_port}"]
    with subprocess.Popen(asked, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b'{"type":"listTopics"}\n')
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["ok"]
        process.kill()
    context = site.context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with context.wrap_socket(
        socket.create_connection(("127.0.0.1", site.broker.port), timeout=20), server_hostname="localhost"
    ) as old:
        assert old.version() == "TLSv1.2"


def test_a_new_certificate_is_used_after_sighup_and_open_connections_go_on(site: Site) -> None:
    def serial() -> object:
        with site.connect(site.broker.port) as connected:
            return (connected.getpeercert() or {})["serialNumber"]

    with site.peer() as peer:
        peer.hello()
        before = serial()
        write_certificate(site.directory, site.authority)
        site.broker.process.send_signal(signal.SIGHUP)
        wait_until(lambda: serial() != before)
        (site.directory / "cert.pem").write_text("nonsense")
        site.broker.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "the certificate stays as it was" in site.broker.log)
        assert serial() != before
        assert peer.call("server_info")["version"]


def test_a_broker_beyond_loopback_needs_users_and_tls_or_says_what_mends_it(tmp_path: Path) -> None:
    refused = run_server("--host", "0.0.0.0", "--port", "0", "--data-dir", str(tmp_path / "data"))
    assert refused.returncode == 2
    assert "without users and without TLS" in refused.stderr
    assert "qb users add" in refused.stderr
    assert 'qb tls make-dev --dir tls --name "$(hostname)" localhost' in refused.stderr
    broken = run_server("--tls-cert", str(tmp_path / "absent"), "--data-dir", str(tmp_path / "data"))
    assert (broken.returncode, "the certificate cannot be used" in broken.stderr) == (2, True)
    cell = run_server("--storage-engine", "jetstream", "--host", "0.0.0.0", "--tls-cert", "c", "--users-file", "u")
    assert (cell.returncode, "QB_FIRST_USERS_FILE" in cell.stderr) == (2, True)
    loose = tmp_path / "users"
    loose.write_text("")
    loose.chmod(0o644)
    assert "chmod 600" in run_server("--users-file", str(loose), "--data-dir", str(tmp_path / "data")).stderr


def test_a_blocking_client_logs_in_over_tls_by_a_token_or_a_file_of_them(site: Site) -> None:
    with BrokerClient(**of_client(site, token=TOKEN)) as client:
        client.create_topic("blocking")
        assert len(client.publish_many("blocking", [bytes(1024)] * 3_000)) == 3_000
        assert len(client.fetch("blocking", 0, 0, max_messages=5_000, max_bytes=16 << 20)) == 3_000
        assert TOKEN not in repr(client)
    of_ops = of_client(site, token_file=str(site.directory / "tokens"))
    of_ops["host"] = f"qbs://ops@localhost:{site.broker.port}"
    with BrokerClient(**of_ops) as client:
        assert client.server_info().data_dir
    of_ops["host"] = f"qbs://other@localhost:{site.broker.port}"
    with pytest.raises(BrokerUnavailable) as caught, BrokerClient(**of_ops):
        pass
    assert caught.value.code == "UNAUTHENTICATED"


def test_a_client_says_what_is_wrong_with_the_certificate_or_the_port(site: Site, shared: BrokerProcess) -> None:
    absent = str(site.directory / "absent.pem")
    host = f"qbs://localhost:{site.broker.port}"
    wrong = {
        "the authority in '.*absent.pem' cannot be used: No such file": {"host": host, "ca_file": absent},
        "the client certificate in '.*absent.pem' cannot be used: No such": {"host": host, "cert_file": absent},
        "is not trusted": {"host": f"qbs://localhost:{site.broker.port}"},
        "this port speaks TLS": {"port": site.broker.port},
        "does not speak TLS": {"host": f"qbs://localhost:{shared.port}"},
    }
    for says, given in wrong.items():
        with pytest.raises(BrokerUnavailable, match=says), BrokerClient(**given):
            pass
    past = datetime(2001, 1, 1, tzinfo=UTC)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        site.authority.issue_cert("localhost", not_after=past).configure_cert(context)
        served = threading.Thread(target=shake_hands, args=(listener, context))
        served.start()
        address = f"qbs://localhost:{listener.getsockname()[1]}"
        with pytest.raises(BrokerUnavailable, match="expired"), BrokerClient(**{**of_client(site), "host": address}):
            pass
        served.join()


def shake_hands(listener: socket.socket, context: ssl.SSLContext) -> None:
    connected, _ = listener.accept()
    with connected:
        try:
            context.wrap_socket(connected, server_side=True)
        except OSError:
            pass


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_the_async_client_logs_in_over_tls(site: Site, loop: str) -> None:
    async def converse() -> int:
        async with AsyncBrokerClient(**of_client(site, token=TOKEN)) as client:
            await client.create_topic(loop)
            await client.publish_many(loop, [bytes(1024)] * 1_000)
            certificate = site.authority.issue_cert(common_name="edge.example")
            certificate.private_key_and_cert_chain_pem.write_to_path(site.directory / f"{loop}.pem")
        by_certificate = of_client(site, cert_file=str(site.directory / f"{loop}.pem"))
        async with AsyncBrokerClient(**by_certificate) as client:
            return (await client.publish(loop, b"last")).offset

    assert anyio.run(converse, backend=loop) == 1_000


def test_the_command_line_reads_the_token_from_a_file_and_shows_it_nowhere(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QB_TOKEN_FILE", str(site.directory / "tokens"))
    monkeypatch.setenv("QB_CA_FILE", str(site.directory / "ca.pem"))
    address = f"qbs://ops@localhost:{site.broker.port}"
    assert main(["list-topics", "--host", address, "--json"]) == 0
    assert main(["create-topic", "by-command", "--host", address]) == 0
    assert TOKEN not in "".join(capsys.readouterr())
    assert TOKEN not in site.broker.log


@pytest.mark.parametrize("engine", ["local", "jetstream"])
def test_first_users_must_have_an_admin_and_a_broker_beyond_loopback_needs_them_or_a_file(
    tmp_path: Path, engine: str
) -> None:
    first = tmp_path / "first"
    about = ["--storage-engine", engine, "--data-dir", str(tmp_path / "data"), "--host", "0.0.0.0", "--port", "0"]
    first.write_text(f"user a sha256:{hash_of('x')} read:*\n")
    first.chmod(0o600)
    assert "must have admin:*" in run_server(*about, "--first-users-file", str(first)).stderr
    first.write_text(f"user a sha256:{hash_of('x')} admin:*\n")
    refused = run_server(*about, "--first-users-file", str(first))
    assert (refused.returncode, "without TLS" in refused.stderr, "users add" in refused.stderr) == (2, True, False)
    setting = "QB_USERS_FILE=users" if engine == "local" else "QB_FIRST_USERS_FILE=first_users"
    assert f"export {setting}\n" in run_server(*about).stderr
