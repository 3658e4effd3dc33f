"""Changes of users, decided from the users that there are: for a users file and for the metadata. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from qb.core.rights.principals import Principal
from qb.core.rights.users_file import BadWord, UsersFile, parse_hash, parse_user


def added(known: UsersFile, name: str, words: Sequence[str]) -> Principal:
    """Return the new user of this name that words as in a users file make. Raises BadWord."""
    user = parse_user(["user", name, *words])
    if name in known.users:
        raise BadWord(f"there is a user {name!r} already; remove or rotate it")
    _check_credentials(known, user)
    return user


def rotated(known: UsersFile, name: str, token_hash: str, *, keep_old: bool) -> Principal:
    """Return the user with a new token; the newest old one stays valid too if it is kept. Raises BadWord."""
    user = found(known, name)
    if not user.tokens:
        raise BadWord(f"user {name!r} has no token: it logs in by its certificate, or is anonymous")
    kept = user.tokens[:1] if keep_old else ()
    changed = msgspec.structs.replace(user, tokens=(parse_hash(token_hash), *kept))
    _check_credentials(known, changed)
    return changed


def found(known: UsersFile, name: str) -> Principal:
    """Return a user. Raises BadWord."""
    user = known.users.get(name)
    if user is None:
        raise BadWord(f"there is no user {name[:100]!r}")
    return user


def check_admin_remains(users: Sequence[Principal]) -> None:
    """Raises BadWord if none of these users could log in and make another one."""
    if not any(user.is_admin and (user.tokens or user.certificate) for user in users):
        raise BadWord("one user that can log in must have admin:*, else the users could not be changed any more")


def _check_credentials(known: UsersFile, user: Principal) -> None:
    if len(set(user.tokens)) < len(user.tokens):
        raise BadWord(f"user {user.name!r} has that token already")
    for other in known.users.values():
        shared = set(user.tokens) & set(other.tokens) or (user.certificate or "") == other.certificate
        if shared and other.name != user.name:
            raise BadWord(f"user {other.name!r} has that token or certificate already")
