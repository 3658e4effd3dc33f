"""Who may do what: the users that a broker keeps, or those of a users file that a broker reads.

A token is made here and shown once. Neither the broker nor the file ever gets more than its hash.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from qb.cli.terminal.command import Command, CommandFailed, Outcome, UsageError, broker
from qb.core.rights.development_certificates import write_secret
from qb.core.rights.user_changes import added, found, rotated
from qb.core.rights.users_file import (
    QUOTAS,
    BadWord,
    UsersFile,
    UsersFileError,
    described,
    hash_of,
    make_token,
    parse_address_quotas,
    read_users,
    write_users,
)
from qb.core.settings import load

RELOAD = "; have the broker read the file again: kill -HUP PID"


class Users(Protocol):
    """Where users are kept."""

    then: str  # what is to be done after a change

    def list_all(self) -> list[dict[str, str]]: ...
    def add(self, name: str, words: Sequence[str]) -> None: ...
    def rotate(self, name: str, token_hash: str, keep_old: bool) -> None: ...
    def remove(self, name: str) -> None: ...
    def limit_address(self, network: str, limits: Sequence[str]) -> None: ...


class UsersOfFile:
    """Those of a users file. Raises CommandFailed."""

    then = RELOAD

    def __init__(self, path: str) -> None:
        self._path = path

    def _known(self, *, may_be_missing: bool = False) -> UsersFile:
        is_missing = may_be_missing and not os.path.exists(self._path)
        try:
            return UsersFile({}) if is_missing else read_users(self._path)
        except UsersFileError as error:
            raise CommandFailed(str(error)) from None

    @contextmanager
    def _changed(self, *, may_be_missing: bool = False) -> Iterator[UsersFile]:
        """Give what the file says, to be changed, and write it."""
        known = self._known(may_be_missing=may_be_missing)
        try:
            yield known
        except BadWord as error:
            raise CommandFailed(f"{self._path}: {error}") from None
        write_users(self._path, known.users.values(), known.addresses)

    def list_all(self) -> list[dict[str, str]]:
        known = self._known()
        return [*map(described, known.users.values()), *map(described, known.addresses)]

    def add(self, name: str, words: Sequence[str]) -> None:
        with self._changed(may_be_missing=True) as known:
            known.users[name] = added(known, name, words)

    def rotate(self, name: str, token_hash: str, keep_old: bool) -> None:
        with self._changed() as known:
            known.users[name] = rotated(known, name, token_hash, keep_old=keep_old)

    def remove(self, name: str) -> None:
        with self._changed() as known:
            del known.users[found(known, name).name]

    def limit_address(self, network: str, limits: Sequence[str]) -> None:
        known = self._known()
        line = parse_address_quotas(["address", network, *(limits or ["connections:1"])])
        others = [each for each in known.addresses if each.parsed != line.parsed]
        write_users(self._path, known.users.values(), [*others, *([line] if limits else [])])


class UsersOfBroker:
    """Those that a broker keeps in its metadata; in a cluster the owner of the cell. Raises QBError."""

    then = ""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args

    def _ask(self, method: str, **arguments: Any) -> Any:
        with broker(self._args) as client:
            return client._request(method, **arguments)

    def list_all(self) -> list[dict[str, str]]:
        rows: list[dict[str, str]] = self._ask("list_users")
        return rows

    def add(self, name: str, words: Sequence[str]) -> None:
        self._ask("add_user", name=name, words=list(words))

    def rotate(self, name: str, token_hash: str, keep_old: bool) -> None:
        self._ask("rotate_user", name=name, sha256=token_hash, keep_old=keep_old)

    def remove(self, name: str) -> None:
        self._ask("remove_user", name=name)

    def limit_address(self, network: str, limits: Sequence[str]) -> None:
        self._ask("limit_address", network=network, limits=list(limits))


def _users(args: argparse.Namespace) -> Users:
    path: str = args.file or ("" if args.broker_is_given else load([], os.environ).settings.security.users_file)
    return UsersOfFile(path) if path else UsersOfBroker(args)


def _file_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--file", metavar="FILE", help="a users file (QB_USERS_FILE); without one, the users that the broker keeps"
    )


def _name_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME")
    _file_argument(parser)


def _limit_argument(parser: argparse.ArgumentParser) -> None:
    what = f"such as rate:20MiB/s; there are: {', '.join(QUOTAS)}"
    parser.add_argument("--limit", metavar="QUOTA:VALUE", nargs="+", action="extend", default=[], help=what)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    _name_arguments(parser)
    verbs = "publish, read, consume, manage or admin, on a name or a prefix with *"
    parser.add_argument("--allow", metavar="VERB:NAMES", nargs="+", action="extend", default=[], help=verbs)
    _limit_argument(parser)
    parser.add_argument("--cert", metavar="CN", help="log in by a client certificate of this common name, and no token")
    _token_argument(parser)


def _token_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--token-file", metavar="FILE", help="write the token to this new file, with mode 0600, and do not show it"
    )


def _add(args: argparse.Namespace) -> Outcome:
    needs_token = args.cert is None and args.name != "anonymous"
    token = make_token() if needs_token else None
    credential = [f"sha256:{hash_of(token)}"] if token else [f"cert:CN={args.cert}"] if args.cert else []
    words = [*credential, *args.allow, *args.limit]
    if any(word.startswith(("sha256:", "cert:")) for word in (*args.allow, *args.limit)):
        raise UsageError("a token is made by this command, and a certificate is named with --cert")
    try:
        added(UsersFile({}), args.name, words)
    except BadWord as error:
        raise UsageError(str(error)) from None
    users = _users(args)
    with _token_kept(args.token_file, token):
        users.add(args.name, words)
    return _shown_once(args, token, f"user {args.name} is added{users.then}")


@contextmanager
def _token_kept(path: str | None, token: str | None) -> Iterator[None]:
    """Write the token to a new file, which goes again if what is done inside the block fails."""
    if path is None or token is None:
        yield
        return
    write_secret(Path(path), f"{token}\n".encode())
    try:
        yield
    except BaseException:
        os.unlink(path)
        raise


def _shown_once(args: argparse.Namespace, token: str | None, text: str) -> Outcome:
    """Show a token, this once, unless it is in a file of its own."""
    if token is None or args.token_file is not None:
        kept = [f"its token is in {args.token_file}"] if token else []
        return Outcome({"name": args.name, "token": None}, "\n".join([*kept, text]))
    lines = [f"token: {token}", "it is shown only now; put it into a file with mode 0600"]
    return Outcome({"name": args.name, "token": token}, "\n".join([*lines, text]))


def _list(args: argparse.Namespace) -> Outcome:
    rows = _users(args).list_all()
    return Outcome(rows, None if rows else "no users: each peer that can reach the broker may do everything")


def _rotate_arguments(parser: argparse.ArgumentParser) -> None:
    _name_arguments(parser)
    parser.add_argument("--keep-old", action="store_true", help="the old token is valid too, until the next rotation")
    _token_argument(parser)


def _rotate(args: argparse.Namespace) -> Outcome:
    token, users = make_token(), _users(args)
    with _token_kept(args.token_file, token):
        users.rotate(args.name, hash_of(token), args.keep_old)
    return _shown_once(args, token, f"user {args.name} has a new token{users.then}")


def _remove(args: argparse.Namespace) -> Outcome:
    users = _users(args)
    users.remove(args.name)
    return Outcome({"name": args.name, "removed": True}, f"user {args.name} is removed{users.then}")


def _address_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("network", metavar="NETWORK", help="an address, a network such as 10.0.0.0/8, or *")
    _file_argument(parser)
    _limit_argument(parser)


def _address(args: argparse.Namespace) -> Outcome:
    try:
        parse_address_quotas(["address", args.network, *(args.limit or ["connections:1"])])
    except BadWord as error:
        raise UsageError(str(error)) from None
    users = _users(args)
    users.limit_address(args.network, args.limit)
    may = f"has {' '.join(args.limit)}" if args.limit else "has no limits of its own"
    return Outcome({"network": args.network, "limits": args.limit}, f"address {args.network} {may}{users.then}")


COMMANDS = (
    Command(
        "users add",
        "add a user and show its token once",
        "users add billing --allow publish:orders.* read:orders.*",
        _add_arguments,
        _add,
    ),
    Command("users list", "list the users, and what addresses may use", "users list", _file_argument, _list),
    Command(
        "users rotate",
        "give a user a new token and show it once",
        "users rotate billing --keep-old",
        _rotate_arguments,
        _rotate,
    ),
    Command("users remove", "remove a user", "users remove billing", _name_arguments, _remove),
    Command(
        "users address",
        "say how much each address of a network may use; nothing named: no limit of its own",
        "users address 10.0.0.0/8 --limit connections:1000 rate:50MiB/s",
        _address_arguments,
        _address,
    ),
)
