"""The users file: one line a user, or the quotas of an address; read strictly and written atomically."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple

from qb.core.rights.address_quotas import OF_ADDRESSES, AddressQuotas
from qb.core.rights.principals import ANONYMOUS, Principal, Quotas, Right, Verb
from qb.core.wire.value_kinds import INTEGER, SIZE, Kind

MOST_BYTES = 4 << 20  # of a users file
MOST_TOKENS = 2  # of one user: the one in use, and the next one while it is being handed out
TOKEN_PREFIX = "qb_"
HEADER = "# Users of a QB broker: docs/SECURITY.md says what the words mean; SIGHUP has the broker read it again.\n"

_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}\Z")
_NAMES = re.compile(r"(?:[A-Za-z0-9._-]{1,200}|[A-Za-z0-9._-]{0,200}\*)\Z")
_HASH = re.compile(r"[0-9a-f]{64}\Z")
_COMMON_NAME = re.compile(r"CN=[\x21-\x7e]{1,200}\Z")
_RATE = Kind("a rate such as 20MiB/s", lambda text: SIZE.within(1024).parse(text.removesuffix("/s")))
QUOTAS: dict[str, Kind] = {
    "rate": _RATE,
    "connections": INTEGER.within(1),
    "in_flight": INTEGER.within(1),
    "topics": INTEGER.within(0),
    "partitions": INTEGER.within(0),
    "subscriptions": INTEGER.within(0),
    "storage": SIZE.within(1),
}


class UsersFile(NamedTuple):
    """What a users file says."""

    users: dict[str, Principal]  # by name
    addresses: tuple[AddressQuotas, ...] = ()


class UsersFileError(ValueError):
    """A users file that cannot be used: one sentence with the file, the line and the reason."""


class BadWord(ValueError):
    """A word of a line that has no meaning; the text says why."""


def make_token() -> str:
    """Return a new random token of 256 bits."""
    return TOKEN_PREFIX + secrets.token_urlsafe(32)


def hash_of(token: str) -> str:
    """Return what is stored of a token."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def read_users(path: str) -> UsersFile:
    """Return what a file says. Raises UsersFileError, also if others than its owner may open the file."""
    try:
        with open(path, "rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise UsersFileError(f"users file {path!r} cannot be read: {error.strerror}") from None
    if mode & 0o077:
        raise UsersFileError(
            f"users file {path!r} has mode {mode:04o}, and only its owner may open it: chmod 600 {path}"
        )
    if len(data) > MOST_BYTES:
        raise UsersFileError(f"users file {path!r} is longer than {MOST_BYTES} bytes")
    return parse_users(data, path)


def parse_users(data: bytes, path: str) -> UsersFile:
    """Return what the text of a file says. Raises UsersFileError."""
    users: dict[str, Principal] = {}
    addresses: dict[str, AddressQuotas] = {}
    credentials: dict[str, str] = {}
    for number, line in enumerate(data.split(b"\n"), 1):
        try:
            words = line.decode().split()
            if not words or words[0].startswith("#"):
                continue
            if words[0] == "address":
                address = parse_address_quotas(words)
                _add_once(addresses, str(address.parsed), address, f"lines for address {address.network}")
            else:
                user = parse_user(words)
                _add_once(users, user.name, user, f"users with the name {user.name!r}")
                _note_credentials(credentials, user)
        except UnicodeDecodeError:
            raise UsersFileError(f"users file {path!r}, line {number}: it is not UTF-8") from None
        except BadWord as error:
            raise UsersFileError(f"users file {path!r}, line {number}: {error}") from None
    return UsersFile(users, tuple(addresses.values()))


def _add_once(known: dict[str, Any], key: str, value: object, what: str) -> None:
    if key in known:
        raise BadWord(f"there are two {what}")
    known[key] = value


def _note_credentials(credentials: dict[str, str], user: Principal) -> None:
    for each in (*user.tokens, *([user.certificate] if user.certificate else [])):
        if each in credentials:
            raise BadWord(f"{user.name!r} has a token or certificate that {credentials[each]!r} has too")
        credentials[each] = user.name


def parse_address_quotas(words: list[str]) -> AddressQuotas:
    """Return what the words of a line say of an address. Raises BadWord."""
    if len(words) < 3:
        raise BadWord("such a line is `address NETWORK` with quotas behind it, and * stands for each address")
    quotas: dict[str, Any] = {}
    for word in words[2:]:
        key, _, value = word.partition(":")
        if key not in OF_ADDRESSES or key in quotas:
            raise BadWord(
                f"{_short(word)} has no meaning here, or stands twice; an address has: {', '.join(OF_ADDRESSES)}"
            )
        quotas[key] = _quota(key, value)
    address = AddressQuotas(words[1], Quotas(**quotas))
    try:
        network = address.parsed
    except ValueError:
        raise BadWord(f"{_short(words[1])} is no address, no network such as 10.0.0.0/8, and not *") from None
    if network is not None and network.version == 6 and network.prefixlen > 64:
        raise BadWord(f"{_short(words[1])}: a /64 of IPv6 counts as one address, so name one of at most 64 bits")
    return address


def parse_user(words: list[str]) -> Principal:
    """Return the user that the words of a line make. Raises BadWord."""
    if words[0] != "user" or len(words) < 2:
        raise BadWord(
            "a line is `user NAME` with its credentials and rights behind it, `address NETWORK` with its quotas, "
            "or a comment with # in front"
        )
    name = words[1]
    if not _NAME.match(name):
        raise BadWord(f"{_short(name)} is not a user's name: use 1 to 100 of A-Z a-z 0-9 . _ -")
    tokens: list[str] = []
    rights: list[Right] = []
    certificate: str | None = None
    quotas: dict[str, Any] = {}
    for word in words[2:]:
        key, colon, value = word.partition(":")
        if key == "sha256":
            tokens.append(parse_hash(value))
        elif key == "cert" and certificate is None:
            certificate = _matched(_COMMON_NAME, value, "CN= and the common name of a certificate")[3:]
        elif key in QUOTAS and key not in quotas:
            quotas[key] = _quota(key, value)
        elif key in Verb.__members__.values():
            rights.append(parse_right(word))
        elif not colon or key in (*QUOTAS, "cert"):
            raise BadWord(f"{_short(word)} has no meaning here, or stands twice")
        else:
            raise BadWord(f"{_short(key)} is no verb and no quota; verbs are: {', '.join(Verb)}")
    _check_credentials(name, tokens, certificate)
    kept = tuple(dict.fromkeys(rights))
    return Principal(name=name, tokens=tuple(tokens), certificate=certificate, rights=kept, quotas=Quotas(**quotas))


def parse_hash(text: str) -> str:
    """Return the SHA-256 of a token. Raises BadWord, which does not show the text: it may be a token."""
    if not _HASH.match(text):
        raise BadWord("what stands behind sha256: is not the SHA-256 of a token, which is 64 digits of 0-9 a-f")
    return text


def parse_right(word: str) -> Right:
    """Return the right that `VERB:NAMES` stands for. Raises BadWord."""
    verb, _, names = word.partition(":")
    if verb not in Verb.__members__.values():
        raise BadWord(f"{_short(verb)} is no verb; verbs are: {', '.join(Verb)}")
    if not _NAMES.match(names):
        raise BadWord(f"{_short(word)}: write a name, a prefix with * behind it, or * alone")
    if verb == Verb.ADMIN and names != "*":
        raise BadWord(f"{_short(word)}: admin is for everything; write admin:*")
    return Right(Verb(verb), names)


def _check_credentials(name: str, tokens: list[str], certificate: str | None) -> None:
    if name == ANONYMOUS:
        if tokens or certificate:
            raise BadWord(f"{ANONYMOUS!r} is a peer without a token and without a certificate, and can have neither")
    elif not tokens and not certificate:
        raise BadWord(f"{name!r} cannot log in: it has neither sha256: nor cert:")
    if len(set(tokens)) < len(tokens) or len(tokens) > MOST_TOKENS:
        raise BadWord(f"{name!r} has {len(tokens)} tokens; a user has at most {MOST_TOKENS} different ones")


def _quota(key: str, text: str) -> int:
    kind = QUOTAS[key]
    try:
        value: int = kind.parse(text)
    except ValueError:
        raise BadWord(f"{key} must be {kind.must_be}, not {_short(text)}") from None
    return value


def _matched(form: re.Pattern[str], text: str, what: str) -> str:
    if not form.match(text):
        raise BadWord(f"{_short(text)} is not {what}")
    return text


def _short(text: str) -> str:
    text = re.sub(rf"{TOKEN_PREFIX}\S+", f"{TOKEN_PREFIX}…", text)  # a token in a wrong place is for no log
    return repr(text if len(text) <= 60 else f"{text[:57]}...")


# Writing


def line_of(user: Principal) -> str:
    """Return the line that parse_user() reads as this user."""
    words = ["user", user.name, *(f"sha256:{each}" for each in user.tokens)]
    if user.certificate is not None:
        words.append(f"cert:CN={user.certificate}")
    return " ".join([*words, *map(str, user.rights), *_words_of(user.quotas)])


def described(each: Principal | AddressQuotas) -> dict[str, str]:
    """Return what a list says of a user or an address, without anything secret."""
    limits = " ".join(_words_of(each.quotas))
    if isinstance(each, AddressQuotas):
        return {"name": f"address {each.network}", "log_in": "", "rights": "", "limits": limits}
    tokens = f"{len(each.tokens)} token" if each.tokens else "none"
    log_in = f"certificate CN={each.certificate}" if each.certificate else tokens
    return {"name": each.name, "log_in": log_in, "rights": " ".join(map(str, each.rights)), "limits": limits}


def line_of_address(address: AddressQuotas) -> str:
    """Return the line that parse_address_quotas() reads as this."""
    return " ".join(["address", address.network, *_words_of(address.quotas)])


def _words_of(quotas: Quotas) -> Iterator[str]:
    for key, kind in QUOTAS.items():
        value = getattr(quotas, key)
        if value is not None:
            yield f"{key}:{SIZE.show(value)}/s" if key == "rate" else f"{key}:{kind.show(value)}"


def write_users(path: str, users: Iterable[Principal], addresses: Iterable[AddressQuotas] = ()) -> None:
    """Replace a users file as a whole, with mode 0600. Comments of the old one are lost. Raises OSError."""
    lines = [*map(line_of, users), *map(line_of_address, addresses)]
    text = HEADER + "".join(f"{line}\n" for line in lines)
    directory = os.path.dirname(os.path.abspath(path))
    with NamedTemporaryFile("w", dir=directory, prefix=".users-", delete=False) as file:
        try:
            os.fchmod(file.fileno(), 0o600)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
    number = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
