"""`qb users`: the file is written atomically, and a token is shown once."""

from __future__ import annotations

import json
from pathlib import Path

from qb.core.rights.users_file import hash_of, read_users
from tests.support.commands import Run


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
    assert offline("users", "list").code == 2
    offline("users", "add", "a", "--allow", "read:x", "--file", file)
    before = Path(file).read_text()
    assert offline("users", "add", "a", "--file", file).code == 1
    assert offline("users", "add", "b", "--allow", "write:x", "--file", file).code == 2
    assert offline("users", "rotate", "c", "--file", file).code == 1
    assert offline("users", "remove", "c", "--file", file).code == 1
    assert Path(file).read_text() == before
