"""A principal: who a peer is, and which verbs it may use on which names."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

import msgspec

ANONYMOUS = "anonymous"  # a peer without a token and without a certificate


class Verb(StrEnum):
    """What can be allowed. `admin` stands for all of them."""

    PUBLISH = "publish"  # to a topic
    READ = "read"  # fetch, tail and ask for offsets of a topic
    CONSUME = "consume"  # by a subscription or a group
    MANAGE = "manage"  # create, alter, delete, seek and pause topics, subscriptions and groups
    ADMIN = "admin"  # everything


class Right(msgspec.Struct, frozen=True):
    """A verb on a name, on all names with a prefix (`orders.*`), or on all names (`*`)."""

    verb: Verb
    names: str

    def covers(self, name: str) -> bool:
        """Say whether the right is about this name."""
        return name.startswith(self.names[:-1]) if self.names.endswith("*") else name == self.names

    def __str__(self) -> str:
        return f"{self.verb}:{self.names}"


class Quotas(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How much of something a user may have or use; None is without limit."""

    rate: int | None = None  # bytes a second, in each direction
    connections: int | None = None
    in_flight: int | None = None  # messages pushed to one subscriber and not settled
    topics: int | None = None
    partitions: int | None = None
    subscriptions: int | None = None
    storage: int | None = None  # bytes of the topics that it has made


class Principal(msgspec.Struct, frozen=True, kw_only=True):
    """A user as the doors know it. Two are equal if they have the same name, credentials, rights and quotas."""

    name: str
    tokens: tuple[str, ...] = ()  # SHA-256 of each, in hex
    certificate: str | None = None  # the common name of the client certificate
    rights: tuple[Right, ...] = ()
    quotas: Quotas = Quotas()

    @property
    def is_admin(self) -> bool:
        """May it do everything?"""
        return any(right.verb is Verb.ADMIN for right in self.rights)

    @property
    def is_stranger(self) -> bool:
        """Has it no right at all?"""
        return not self.rights

    def may(self, verbs: Iterable[Verb], name: str) -> bool:
        """Say whether it may use one of the verbs on a name."""
        wanted = {Verb.ADMIN, *verbs}
        return any(right.verb in wanted and right.covers(name) for right in self.rights)

    def may_somewhere(self, verb: Verb) -> bool:
        """Say whether there is a name on which it may use the verb."""
        return any(right.verb in (verb, Verb.ADMIN) for right in self.rights)

    def may_everywhere(self, verb: Verb) -> bool:
        """Say whether it may use the verb on all names."""
        return any(right.verb in (verb, Verb.ADMIN) and right.names == "*" for right in self.rights)

    # What exists for it

    def sees_topic(self, name: str) -> bool:
        """Does a topic of that name exist for it?"""
        return self.may((Verb.PUBLISH, Verb.READ, Verb.MANAGE), name)

    def sees_consumer(self, name: str) -> bool:
        """Does a subscription or a group of that name exist for it?"""
        return self.may((Verb.CONSUME, Verb.MANAGE), name)


STRANGER = Principal(name=ANONYMOUS)
# Every peer of a broker without users: it may do everything.
UNRESTRICTED = Principal(name="", rights=(Right(Verb.ADMIN, "*"),))
