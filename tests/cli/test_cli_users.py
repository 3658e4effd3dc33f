"""`qb users`: of a file, which is written atomically, or of a broker; a token is shown once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from qb.core.rights.users_file import hash_of, read_users
from tests.support.brokers import ROOT, BrokerProcess
from tests.support.commands import Done, Run


def test_users_are_added_listed_rotated_and_removed(offline: Run, tmp_path: Path) -> None:
    file = str(tmp_path / "users")
    made = json.loads(offline("users", "add", "a", "--allow", "read:x*", "publish:x", "--file", file, "--json").out)
    user = read_users(file).users["a"]
    assert user.tokens == (hash_of(made["token"]),)
    assert list(map(str, user.rights)) == ["read:x*", "publish:x"]
    offline("users", "add", "edge", "--cert", "e.x", "--allow", "read:x", "--limit", "rate:1MiB/s", "--file", file)
    assert "token" not in offline("users", "add", "anonymous", "--allow", "read:y", "--file", file).out
    listed = json.loads(offline("users", "list", "--file", file, "--json").out)
    assert [each["name"] for each in listed] == ["a", "edge", "anonymous"]
    assert listed[1]["limits"] == "rate:1MiB/s"
    kept = json.loads(offline("users", "rotate", "a", "--keep-old", "--file", file, "--json").out)["token"]
    assert read_users(file).users["a"].tokens == (hash_of(kept), hash_of(made["token"]))
    last = json.loads(offline("users", "rotate", "a", "--file", file, "--json").out)["token"]
    assert read_users(file).users["a"].tokens == (hash_of(last),)
    assert offline("users", "remove", "a", "--file", file).code == 0
    assert set(read_users(file).users) == {"edge", "anonymous"}


def test_what_cannot_be_done_is_said_and_the_file_stays_as_it_was(offline: Run, tmp_path: Path) -> None:
    file = str(tmp_path / "users")
    offline("users", "add", "a", "--allow", "read:x", "--file", file)
    before = Path(file).read_text()
    assert offline("users", "add", "a", "--file", file).code == 1
    assert offline("users", "add", "b", "--allow", "write:x", "--file", file).code == 2
    assert offline("users", "add", "b", "--allow", "sha256:x", "--file", file).code == 2
    assert offline("users", "rotate", "c", "--file", file).code == 1
    assert offline("users", "remove", "c", "--file", file).code == 1
    assert Path(file).read_text() == before


def test_addresses_have_lines_of_their_own(offline: Run, tmp_path: Path) -> None:
    file = str(tmp_path / "users")
    offline("users", "add", "a", "--allow", "read:x", "--file", file)
    for limits in (["connections:5"], ["connections:9", "rate:1MiB/s"]):
        assert offline("users", "address", "10.0.0.0/8", "--limit", *limits, "--file", file).code == 0
    listed = json.loads(offline("users", "list", "--file", file, "--json").out)
    assert [(each["name"], each["limits"]) for each in listed][1:] == [
        ("address 10.0.0.0/8", "rate:1MiB/s connections:9")
    ]
    assert offline("users", "address", "10.0.0.0/8", "--limit", "topics:1", "--file", file).code == 2
    assert "no limits of its own" in offline("users", "address", "10.0.0.0/8", "--file", file).out
    assert read_users(file).addresses == ()


def test_a_token_file_is_made_for_its_owner_alone_and_only_if_the_user_is(offline: Run, tmp_path: Path) -> None:
    file, token = str(tmp_path / "users"), tmp_path / "token"
    done = offline("users", "add", "a", "--allow", "read:x", "--file", file, "--token-file", str(token))
    assert token.read_text().strip() not in done.out
    assert read_users(file).users["a"].tokens == (hash_of(token.read_text().strip()),)
    assert token.stat().st_mode & 0o777 == 0o600
    before = token.read_text()
    assert offline("users", "rotate", "a", "--file", file, "--token-file", str(token)).code == 1
    assert token.read_text() == before, "a file that is there is not written over"
    assert offline("users", "add", "a", "--allow", "read:x", "--file", file, "--token-file", f"{token}2").code == 1
    assert not (tmp_path / "token2").exists()


def test_users_of_a_broker_are_changed_over_the_wire(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path, audit_file="-")
    try:
        token = str(tmp_path / "ops.token")
        about = {"QB_SERVER_PORT": str(broker.port)}

        def qb(*words: str, **more: str) -> Done:
            clean = {name: value for name, value in os.environ.items() if not name.startswith("QB_")}
            command = [sys.executable, str(ROOT / "client.py"), *words]
            done = subprocess.run(command, env=clean | about | more, capture_output=True, text=True, timeout=60)
            return Done(done.returncode, done.stdout, done.stderr)

        assert "no users" in qb("users", "list").out
        assert qb("users", "add", "a", "--allow", "read:x").code == 1
        assert qb("users", "add", "ops", "--allow", "admin:*", "--token-file", token).code == 0
        assert "log in" in qb("users", "list").err
        shown = json.loads(qb("users", "add", "a", "--allow", "read:x", "--json", QB_TOKEN_FILE=token).out)["token"]
        again = json.loads(qb("users", "rotate", "a", "--json", QB_TOKEN_FILE=token).out)["token"]
        assert qb("users", "address", "*", "--limit", "connections:9", QB_TOKEN_FILE=token).code == 0
        broker.restart()
        listed = json.loads(qb("users", "list", "--json", QB_TOKEN_FILE=token).out)
        assert [each["name"] for each in listed] == ["a", "ops", "address *"]
        assert qb("users", "remove", "a", QB_TOKEN_FILE=token).code == 0
        assert "must have admin" in qb("users", "remove", "ops", QB_TOKEN_FILE=token).err
        for secret in (shown, again, Path(token).read_text().strip()):
            assert secret not in broker.log
            assert not any(secret.encode() in path.read_bytes() for path in broker.data_dir.rglob("*.log"))
    finally:
        broker.kill()
