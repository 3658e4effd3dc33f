"""The users file: what it may say, what is refused, and that writing and reading agree."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qb.core.rights.known_users import KnownUsers, LoggedIn
from qb.core.rights.log_in_pace import FIRST, FREE, LONGEST, LogInPace
from qb.core.rights.principals import STRANGER, UNRESTRICTED, Principal, Quotas, Right, Verb
from qb.core.rights.users_file import (
    UsersFileError,
    hash_of,
    line_of,
    make_token,
    parse_users,
    read_users,
    write_users,
)
from qb.core.wire.errors import Unauthenticated

HASH, OTHER = "9f" * 32, "1c" * 32
names = st.text("abz09._-", min_size=1, max_size=20)
patterns = names | names.map(lambda name: f"{name}*") | st.just("*")
rights = st.builds(Right, st.sampled_from([verb for verb in Verb if verb is not Verb.ADMIN]), patterns)
users = st.builds(
    Principal,
    name=names.filter(lambda name: name != "anonymous"),
    tokens=st.just((HASH,)),
    certificate=st.none() | st.just("edge.example"),
    rights=st.lists(rights, unique=True).map(tuple),
    quotas=st.builds(Quotas, rate=st.none() | st.integers(1024, 2**40), storage=st.none() | st.integers(1, 2**50)),
)


@given(users)
def test_a_user_that_is_written_is_read_as_the_same(user: Principal) -> None:
    assert parse_users(line_of(user).encode(), "f").users == {user.name: user}


@given(st.binary(max_size=200) | st.text("user :shapublish*.\n9f#", max_size=200).map(str.encode))
def test_any_bytes_are_users_or_an_error_that_names_the_file_and_the_line(data: bytes) -> None:
    try:
        parse_users(data, "users.txt")
    except UsersFileError as error:
        assert str(error).startswith("users file 'users.txt', line ")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("usr a", "a line is `user NAME`"),
        ("user", "a line is `user NAME`"),
        ("user a/b sha256:" + HASH, "not a user's name"),
        ("user a", "cannot log in"),
        ("user a sha256:" + HASH[:-1], "not the SHA-256"),
        ("user a sha256:" + HASH.upper(), "not the SHA-256"),
        (f"user a sha256:{HASH} write:orders", "'write' is no verb"),
        (f"user a sha256:{HASH} read:ord*ers", "write a name, a prefix"),
        (f"user a sha256:{HASH} read:", "write a name, a prefix"),
        (f"user a sha256:{HASH} admin:orders", "write admin:*"),
        (f"user a sha256:{HASH} sha256:{HASH}", "at most 2 different"),
        (f"user a sha256:{HASH} rate:fast", "rate must be"),
        (f"user a sha256:{HASH} connections:0", "connections must be"),
        (f"user a sha256:{HASH} connections:1 connections:2", "stands twice"),
        (f"user a sha256:{HASH} orders", "has no meaning"),
        (f"user anonymous sha256:{HASH}", "can have neither"),
        (f"user a sha256:{HASH}\nuser a sha256:{OTHER}", "two users with the name 'a'"),
        (f"user a sha256:{HASH}\nuser b sha256:{HASH}", "that 'a' has too"),
        ("user a cert:CN=x\nuser b cert:CN=x", "that 'a' has too"),
        ("user a cert:x", "not CN="),
    ],
)
def test_a_line_that_cannot_be_meant_is_refused_with_its_number_and_the_reason(line: str, reason: str) -> None:
    with pytest.raises(UsersFileError) as caught:
        parse_users(b"# comment\n\n" + line.encode(), "f")
    assert str(caught.value).startswith(f"users file 'f', line {2 + len(line.splitlines())}: ")
    assert reason in str(caught.value)


def test_a_file_that_others_may_open_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "users"
    path.write_text(f"user a sha256:{HASH}\n")
    for mode in (0o640, 0o604, 0o660):
        os.chmod(path, mode)
        with pytest.raises(UsersFileError, match=f"{mode:04o}.*chmod 600"):
            read_users(str(path))
    os.chmod(path, 0o600)
    assert set(read_users(str(path)).users) == {"a"}


def test_a_right_covers_its_name_or_its_prefix_and_nothing_else() -> None:
    line = f"user a sha256:{HASH} publish:orders.* read:orders consume:x* manage:*"
    user = parse_users(line.encode(), "f").users["a"]
    assert user.may([Verb.PUBLISH], "orders.eu")
    assert not user.may([Verb.PUBLISH], "orders")
    assert user.may([Verb.READ], "orders")
    assert not user.may([Verb.READ], "orders.eu")
    assert user.may([Verb.MANAGE], "anything")
    assert not user.is_admin
    assert not STRANGER.may(list(Verb), "orders")
    assert UNRESTRICTED.may([Verb.PUBLISH], "orders")


def test_a_token_is_of_its_user_and_any_other_text_of_none(tmp_path: Path) -> None:
    token, path = make_token(), str(tmp_path / "users")
    write_users(path, [Principal(name="a", tokens=(hash_of(token),)), Principal(name="edge", certificate="e.x")])
    known = KnownUsers(path)
    assert known.with_token(token).name == "a"
    assert known.without_token("e.x").name == "edge"
    assert known.without_token("other") is STRANGER
    assert known.without_token() is STRANGER
    for wrong in ("", token[:-1], token + "x", hash_of(token), "\udcff"):
        with pytest.raises(Unauthenticated):
            known.with_token(wrong)
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert token not in (tmp_path / "users").read_text()


def test_a_reload_notifies_the_connections_of_users_that_changed_and_of_no_others(tmp_path: Path) -> None:
    path = str(tmp_path / "users")
    a, b = Principal(name="a", tokens=(HASH,)), Principal(name="b", tokens=(OTHER,))
    write_users(path, [a, b])
    known = KnownUsers(path)
    notified: list[str] = []
    connections = [LoggedIn(a), LoggedIn(b)]
    for each in connections:
        each.changed = lambda name=each.principal.name: notified.append(name)  # type: ignore[misc]
        known.watch(each)
    known.reload()
    assert notified == []
    write_users(path, [a])
    assert (known.reload(), notified) == (1, ["b"])
    Path(path).write_text("nonsense")
    with pytest.raises(UsersFileError):
        known.reload()
    assert known.with_token is not None
    assert known._known.users == {"a": a}


def test_after_ten_failures_an_address_waits_and_after_a_while_it_is_forgotten() -> None:
    pace = LogInPace()
    for number in range(FREE):
        assert pace.wait("1.2.3.4", number) == 0
        pace.failed("1.2.3.4", number)
    assert pace.wait("1.2.3.4", FREE) == FIRST
    assert pace.wait("5.6.7.8", FREE) == 0
    for _ in range(100):
        pace.failed("1.2.3.4", FREE)
    assert pace.wait("1.2.3.4", FREE) == LONGEST
    assert pace.wait("1.2.3.4", FREE + 601) == 0
