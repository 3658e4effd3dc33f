"""The users file of a broker: written here, read by the broker at its start and on SIGHUP."""

from __future__ import annotations

import argparse
import os

import msgspec

from qb.cli.terminal.command import Command, CommandFailed, Outcome, UsageError
from qb.core.rights.principals import Principal
from qb.core.rights.users_file import (
    QUOTAS,
    BadWord,
    UsersFile,
    UsersFileError,
    hash_of,
    line_of,
    make_token,
    parse_user,
    read_users,
    write_users,
)
from qb.core.settings import load

RELOAD = "have the broker read the file again: kill -HUP PID"


def _file(args: argparse.Namespace) -> str:
    path: str = args.file or load([], os.environ).settings.security.users_file
    if not path:
        raise UsageError("there is no users file: give --file FILE, or set QB_USERS_FILE")
    return path


def _known_file(path: str, *, may_be_missing: bool = False) -> UsersFile:
    try:
        return UsersFile({}) if may_be_missing and not os.path.exists(path) else read_users(path)
    except UsersFileError as error:
        raise CommandFailed(str(error)) from None


def _known(users: dict[str, Principal], name: str, path: str) -> Principal:
    if name not in users:
        raise CommandFailed(f"there is no user {name!r} in {path}")
    return users[name]


def _file_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--file", metavar="FILE", help="the users file (QB_USERS_FILE)")


def _name_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME")
    _file_argument(parser)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    _name_arguments(parser)
    verbs = "publish, read, consume, manage or admin, on a name or a prefix with *"
    parser.add_argument("--allow", metavar="VERB:NAMES", nargs="+", action="extend", default=[], help=verbs)
    what = f"such as rate:20MiB/s; there are: {', '.join(QUOTAS)}"
    parser.add_argument("--limit", metavar="QUOTA:VALUE", nargs="+", action="extend", default=[], help=what)
    parser.add_argument("--cert", metavar="CN", help="log in by a client certificate of this common name, and no token")


def _add(args: argparse.Namespace) -> Outcome:
    path = _file(args)
    users, addresses = _known_file(path, may_be_missing=True)
    if args.name in users:
        raise CommandFailed(f"user {args.name!r} is in {path} already; remove or rotate it")
    needs_token = args.cert is None and args.name != "anonymous"
    token = make_token() if needs_token else None
    credential = [f"sha256:{hash_of(token)}"] if token else [f"cert:CN={args.cert}"] if args.cert else []
    for word in (*args.allow, *args.limit):
        if word.startswith(("sha256:", "cert:")):
            raise UsageError("a token is made by this command, and a certificate is named with --cert")
    try:
        users[args.name] = parse_user(["user", args.name, *credential, *args.allow, *args.limit])
    except BadWord as error:
        raise UsageError(str(error)) from None
    write_users(path, users.values(), addresses)
    return _shown_once(args.name, token, f"user {args.name} is in {path}; {RELOAD}")


def _shown_once(name: str, token: str | None, text: str) -> Outcome:
    """Show a token, this once: the file has only its hash."""
    lines = [] if token is None else [f"token: {token}", "it is shown only now; put it into a file with mode 0600"]
    return Outcome({"name": name, "token": token}, "\n".join([*lines, text]))


def _list(args: argparse.Namespace) -> Outcome:
    users = _known_file(_file(args)).users.values()
    rows = [
        {
            "name": user.name,
            "log_in": "certificate" if user.certificate else f"{len(user.tokens)} token" if user.tokens else "none",
            "rights": " ".join(map(str, user.rights)),
            "limits": " ".join(word for word in line_of(user).split() if word.partition(":")[0] in QUOTAS),
        }
        for user in users
    ]
    return Outcome(rows)


def _rotate_arguments(parser: argparse.ArgumentParser) -> None:
    _name_arguments(parser)
    parser.add_argument("--keep-old", action="store_true", help="the old token is valid too, until the next rotation")


def _rotate(args: argparse.Namespace) -> Outcome:
    path = _file(args)
    users, addresses = _known_file(path)
    user = _known(users, args.name, path)
    if not user.tokens:
        raise CommandFailed(f"user {args.name!r} has no token: it logs in by its certificate, or is anonymous")
    token = make_token()
    kept = user.tokens[:1] if args.keep_old else ()
    users[args.name] = msgspec.structs.replace(user, tokens=(hash_of(token), *kept))
    write_users(path, users.values(), addresses)
    return _shown_once(args.name, token, f"user {args.name} has a new token; {RELOAD}")


def _remove(args: argparse.Namespace) -> Outcome:
    path = _file(args)
    users, addresses = _known_file(path)
    _known(users, args.name, path)
    del users[args.name]
    write_users(path, users.values(), addresses)
    return Outcome({"name": args.name, "removed": True}, f"user {args.name} is removed from {path}; {RELOAD}")


COMMANDS = (
    Command(
        "users add",
        "add a user to the users file and show its token once",
        "users add billing --allow publish:orders.* read:orders.* --file users",
        _add_arguments,
        _add,
    ),
    Command("users list", "list the users of a users file", "users list --file users", _file_argument, _list),
    Command(
        "users rotate",
        "give a user a new token and show it once",
        "users rotate billing --keep-old --file users",
        _rotate_arguments,
        _rotate,
    ),
    Command("users remove", "remove a user", "users remove billing --file users", _name_arguments, _remove),
)
