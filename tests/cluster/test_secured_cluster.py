"""A cluster with TLS and users: three brokers, three NATS servers, and the same rights at every broker."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from qb import BrokerClient
from qb.core.rights.users_file import hash_of
from qb.core.wire.frames import MessageType as T
from tests.support.brokers import ROOT
from tests.support.local_cluster import LocalClusterProcess
from tests.support.peers import Peer
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.process,
    pytest.mark.timeout(150),
    pytest.mark.skipif(sys.platform != "linux", reason="the processes end with their parent on Linux alone"),
]


class Site:
    """The cluster, and what its clients have."""

    def __init__(self, directory: Path, authority: trustme.CA) -> None:
        self.directory, self.authority = directory, authority
        clients = directory / "clients-ca.pem"
        authority.cert_pem.write_to_path(clients)
        flags = ["--secure", "--tls-client-ca", str(clients), "--audit-file", "-"]
        self.cluster = LocalClusterProcess(directory, *flags)
        assert self.cluster.banner.startswith("QB cluster"), (directory / "cluster.err").read_text()

    def token(self, user: str) -> str:
        return (self.directory / f"{user}.token").read_text().strip()

    def qb(self, *words: str, server: int | None = None, user: str = "operator") -> subprocess.CompletedProcess[str]:
        """Run a command against one broker, or all."""
        servers = self.cluster.servers if server is None else [self.cluster.servers[server]]
        clean = {name: value for name, value in os.environ.items() if not name.startswith("QB_")}
        clean |= {"QB_SERVERS": ",".join(servers), "QB_CA_FILE": self.cluster.ca_file}
        clean |= {"QB_TOKEN_FILE": str(self.directory / f"{user}.token")}
        command = [sys.executable, str(ROOT / "client.py"), *words]
        return subprocess.run(command, env=clean, cwd=self.directory, capture_output=True, text=True, timeout=60)

    def client(self, user: str, *servers: str) -> BrokerClient:
        token_file = str(self.directory / f"{user}.token")
        where = list(servers) or self.cluster.servers
        return BrokerClient(servers=where, token_file=token_file, ca_file=self.cluster.ca_file, connect_wait=30)

    def connect(self, more: int, broker: int, certificate: trustme.LeafCert | None = None) -> ssl.SSLSocket:
        """Return a connection to a door of a broker: `more` than the base port."""
        context = ssl.create_default_context(cafile=self.cluster.ca_file)
        if certificate is not None:
            certificate.configure_cert(context)
        plain = socket.create_connection(("127.0.0.1", self.cluster.base_port + more + broker), timeout=30)
        return context.wrap_socket(plain, server_hostname="127.0.0.1")

    def lines(self, broker: int, *requests: dict[str, Any]) -> list[Any]:
        """Return the answers of a door for JSON lines; None: it has closed the connection."""
        with self.connect(10, broker) as sock, sock.makefile("rwb") as file:
            answers: list[Any] = []
            for request in requests:
                file.write(json.dumps(request).encode() + b"\n")
                file.flush()
                line = file.readline()
                answers.append(json.loads(line) if line else None)
            return answers

    def http(self, broker: int, method: str, path: str, token: str | None, data: Any = None) -> tuple[int, str]:
        url = f"https://127.0.0.1:{self.cluster.base_port + 20 + broker}{path}"
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {token}"} if token else {})
        body = None if data is None else json.dumps(data).encode()
        request = urllib.request.Request(url, data=body, method=method, headers=headers)
        context = ssl.create_default_context(cafile=self.cluster.ca_file)
        try:
            with urllib.request.urlopen(request, timeout=30, context=context) as answer:
                return answer.status, ""
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)["code"]

    def basic(self, broker: int, common_name: str | None, kind: T, **properties: str) -> str:
        """Return what a peer that knows types 1 to 9 is answered."""
        certificate = self.authority.issue_cert(common_name=common_name) if common_name else None
        with Peer(self.cluster.base_port + broker, timeout=30) as peer:
            peer.socket.close()
            peer.socket = self.connect(0, broker, certificate)
            return peer.ask(kind, 1, b"x", **properties).properties.get("code", "")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("secured"), trustme.CA())
    try:
        with site.client("operator") as ops:
            ops.create_topic("orders")
            ops.create_topic("secret")
        made = site.qb("users", "add", "till", "--allow", "read:orders", "publish:orders", "--token-file", "till.token")
        assert made.returncode == 0, made.stderr
        made = site.qb("users", "add", "edge", "--cert", "edge", "--allow", "publish:orders", server=0)
        assert made.returncode == 0, made.stderr
        yield site
    finally:
        site.cluster.kill()


def log_in(token: str) -> dict[str, str]:
    return {"type": "auth", "token": token}


def rights_at(site: Site, broker: int) -> dict[str, Any]:
    """Return what each kind of peer may do by one broker, whether it owns the cell or passes on."""
    till, wrong = site.token("till"), "qb_" + "x" * 43
    orders, secret = ({"type": "produce", "topic": name, "value": "x"} for name in ("orders", "secret"))
    stranger, denied = site.lines(broker, orders, orders), site.lines(broker, log_in(wrong), orders)
    known = site.lines(broker, log_in(till), orders, secret, {"type": "createTopic", "topic": "new"})
    value = {"value": "x"}
    return {
        "json without": ("log in" in stranger[0]["error"], stranger[1]),
        "json wrong": ("of no user" in denied[0]["error"], denied[1]),
        "json": [each["ok"] for each in known],
        "json names": known[2]["error"],
        "http": [site.http(broker, "POST", f"/topics/{name}/messages", till, value) for name in ("orders", "secret")],
        "http without": [site.http(broker, "GET", "/topics/orders", token) for token in (None, wrong)],
        "http manage": site.http(broker, "DELETE", "/topics/orders", till),
        "http metrics": site.http(broker, "GET", "/metrics", till),
        "basic without": site.basic(broker, None, T.PUBLISH, topic="orders"),
        "basic unknown": site.basic(broker, "unknown", T.PUBLISH, topic="orders"),
        "basic": [site.basic(broker, "edge", T.PUBLISH, topic=name) for name in ("orders", "secret")],
        "basic manage": site.basic(broker, "edge", T.CREATE_TOPIC, topic="new"),
    }


RIGHTS = {
    "json without": (True, None),
    "json wrong": (True, None),
    "json": [True, True, False, False],
    "json names": "TopicNotFound: secret",
    "http": [(200, ""), (404, "UNKNOWN_TOPIC")],
    "http without": [(401, "UNAUTHENTICATED")] * 2,
    "http manage": (403, "FORBIDDEN"),
    "http metrics": (403, "FORBIDDEN"),
    "basic without": "UNAUTHENTICATED",
    "basic unknown": "UNAUTHENTICATED",
    "basic": ["", "UNKNOWN_TOPIC"],
    "basic manage": "FORBIDDEN",
}


def test_rights_are_the_same_at_every_broker_and_hold_after_a_failover(site: Site) -> None:
    cluster = site.cluster
    for kills in (False, True):
        if kills:
            owner, epoch = cluster.owner(), cluster.status()["epoch"]
            cluster.signal(owner, signal.SIGKILL)
            cluster.wait_for_owner(epoch + 1)
        cluster.wait_until_whole()
        for broker in range(3):
            assert rights_at(site, broker) == RIGHTS
            with site.client("till", cluster.servers[broker]) as till:
                assert till.publish("orders", b"x").durability == "replicated"
            refused = site.qb("create-topic", "new", user="till", server=broker)
            assert "it needs manage on topic 'new'" in refused.stderr


def test_users_change_by_every_broker_and_the_change_is_in_force_at_all(site: Site) -> None:
    cluster = site.cluster
    cluster.wait_until_whole()
    follower = next(each for each in range(3) if cluster.owner() != f"broker-{each + 1}")
    for name in ("brief", "second"):
        words = ["users", "add", name, "--allow", "admin:*" if name == "second" else "read:orders"]
        made = site.qb(*words, "--token-file", f"{name}.token", server=follower)
        assert made.returncode == 0, made.stderr
    brief = site.token("brief")
    with site.connect(10, follower) as sock, sock.makefile("rwb") as session:
        session.write(json.dumps(log_in(brief)).encode() + b"\n")
        session.flush()
        assert json.loads(session.readline())["data"] == {"user": "brief"}
        rotated = site.qb("users", "rotate", "brief", "--keep-old", "--json", server=follower)
        assert rotated.returncode == 0, rotated.stderr
        assert "other rights" in json.loads(session.readline())["error"], "its session is ended"
        assert session.readline() == b""
    assert all(site.lines(broker, log_in(brief))[0]["ok"] for broker in range(3))
    removed = site.qb("users", "remove", "brief", server=follower, user="second")
    assert removed.returncode == 0, removed.stderr
    for token in (brief, json.loads(rotated.stdout)["token"]):
        assert not any(site.lines(broker, log_in(token))[0]["ok"] for broker in range(3))
    for broker in range(3):  # each answers that itself, as soon as it has applied the change
        wait_until(lambda broker=broker: site.qb("cluster", "status", user="second", server=broker).returncode == 0)
    assert site.qb("users", "remove", "second").returncode == 0
    for broker in range(3):
        wait_until(lambda broker=broker: site.qb("cluster", "status", user="second", server=broker).returncode == 1)
    last = site.qb("users", "remove", "ops")
    assert "must have admin:*" in last.stderr
    assert [each["name"] for each in json.loads(site.qb("users", "list", "--json").stdout)] == ["edge", "ops", "till"]


def test_no_token_is_in_any_log_or_any_other_file_and_what_was_done_is_in_the_audit(site: Site) -> None:
    tokens = [site.token(path.stem) for path in site.directory.glob("*.token")]
    assert len(tokens) >= 2
    held = [path for path in site.directory.rglob("*") if path.is_file() and path.suffix != ".token"]
    found = [path for path in held for token in tokens if token.encode() in path.read_bytes()]
    assert found == []
    journal = b"".join(path.read_bytes() for path in held if path.name.endswith((".blk", ".log")))
    assert hash_of(site.token("till")).encode() in journal
    lines = [line for path in site.directory.glob("broker-*.log") for line in path.read_text().splitlines()]
    audit = [json.loads(line) for line in lines if line.startswith('{"time"')]
    done = {(each["user"], each["action"], tuple(each["on"]), each["outcome"]) for each in audit}
    assert ("ops", "add_user", ("till",), "allowed") in done
    assert ("till", "create_topic", ("new",), "FORBIDDEN") in done
    assert ("edge", "publish", ("secret",), "UNKNOWN_TOPIC") in done
    modes = {path.name: path.stat().st_mode & 0o777 for path in site.directory.glob("*.token")}
    assert set(modes.values()) == {0o600}


def test_the_users_are_there_when_the_whole_cluster_was_stopped(site: Site) -> None:
    assert site.cluster.stop() == 0
    token = site.token("operator")
    site.cluster = LocalClusterProcess(site.directory, "--secure")
    assert site.cluster.banner.startswith("QB cluster"), (site.directory / "cluster.err").read_text()
    assert site.token("operator") == token
    assert [each["name"] for each in json.loads(site.qb("users", "list", "--json").stdout)] == ["edge", "ops", "till"]
    # A follower that has just begun may not know yet whom to pass a peer on to, and says so.
    wait_until(lambda: (site.lines(0, log_in(site.token("till")))[0] or {"ok": False})["ok"])


def test_nats_and_the_cluster_port_admit_no_peer_without_a_certificate_of_the_cluster(site: Site) -> None:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    for more, said in ((40, b"CONNECT {}\r\nPING\r\n"), (50, b"INFO {}\r\nPING\r\n"), (30, b"QB-RELAY 1 {}\n")):
        with socket.create_connection(("127.0.0.1", site.cluster.base_port + more), timeout=20) as plain:
            assert more != 40 or b'"tls_required":true' in plain.recv(4_096)
            with pytest.raises((ssl.SSLError, ConnectionError)), context.wrap_socket(plain) as bare:
                bare.sendall(said)
                answer = bare.recv(4_096)
                assert answer == b"" or b"PONG" not in answer
                raise ConnectionError
