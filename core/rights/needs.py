"""What a request needs, declared in the row that it is carried out by, and the one place where it is checked.

Rights are checked before anything is looked up. A name on which a user has no right at all does not exist for it: the
refusal is the one for a name that is not there. If the user has another right on the name, it is Forbidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from qb.core.rights.principals import Principal, Verb
from qb.core.wire.errors import (
    BrokerError,
    Forbidden,
    Unauthenticated,
    UnknownGroup,
    UnknownSubscription,
    UnknownTopic,
)
from qb.core.wire.names import check_name

LOG_IN = "log in: by `token` in HELLO, by a first line of type auth, or by Authorization: Bearer"
SEE_TOPIC = (Verb.PUBLISH, Verb.READ, Verb.MANAGE)
SEE_CONSUMER = (Verb.CONSUME, Verb.MANAGE)
METRICS_USER = "metrics"  # may read the metrics, and needs no right for it

TopicOf = Callable[[str], str | None]  # returns the topic of a subscription, None if there is no such subscription


class Thing(StrEnum):
    """What a name is of."""

    TOPIC = "topic"
    SUBSCRIPTION = "subscription"
    GROUP = "group"
    USER = "user"


class NamedNeed(NamedTuple):
    """One of some verbs, on each name in a field of a request."""

    verbs: tuple[Verb, ...]
    thing: Thing
    field: str  # `a.b`: the field b of the field a
    creates: bool = False  # the name need not be there, so its absence is no secret
    topic_verbs: tuple[Verb, ...] = ()  # one of these on the topic of the subscription

    def names(self, arguments: object) -> Iterator[str]:
        """Return the names that a request has in the field; none if it has no such field."""
        found: Any = arguments
        for part in self.field.split("."):
            found = found.get(part) if isinstance(found, Mapping) else getattr(found, part, None)
        for each in found if isinstance(found, list) else [found]:
            name = each if isinstance(each, str) else getattr(each, "topic", None)
            if name is not None:
                yield name


class Owned(NamedTuple):
    """What belongs to the user that used it first: its kind, the same for all doors, and the fields that name it."""

    kind: str
    fields: tuple[str, ...]


class Needs(NamedTuple):
    """What one kind of request needs."""

    names: tuple[NamedNeed, ...] = ()
    is_open: bool = False  # a peer that has not logged in may ask
    is_admin: bool = False
    somewhere: Verb | None = None  # on any name
    everywhere: Verb | None = None  # on all names
    owns: Owned | None = None

    @property
    def is_administrative(self) -> bool:
        """Does such a request change more than messages and positions?"""
        return self.is_admin or any(need.verbs == (Verb.MANAGE,) for need in self.names)


OPEN = Needs(is_open=True)
ANY_USER = Needs()
ADMIN = Needs(is_admin=True)
METRICS = Needs(everywhere=Verb.READ)


def administer(field: str = "name") -> Needs:
    """To do what only admins may, to something that the audit names."""
    return Needs((NamedNeed((Verb.ADMIN,), Thing.USER, field),), is_admin=True)


def publish(field: str = "topic") -> Needs:
    """To publish to a topic."""
    return Needs((NamedNeed((Verb.PUBLISH,), Thing.TOPIC, field),))


def read(field: str = "topic") -> Needs:
    """To read a topic."""
    return Needs((NamedNeed((Verb.READ,), Thing.TOPIC, field),))


def see_topic(field: str = "topic") -> Needs:
    """To know of a topic."""
    return Needs((NamedNeed(SEE_TOPIC, Thing.TOPIC, field),))


def create_topic(field: str = "topic") -> Needs:
    """To make a topic."""
    return Needs((NamedNeed((Verb.MANAGE,), Thing.TOPIC, field, creates=True),))


def manage_topic(field: str = "topic") -> Needs:
    """To change or delete a topic."""
    return Needs((NamedNeed((Verb.MANAGE,), Thing.TOPIC, field),))


def consume(field: str = "subscription_id") -> Needs:
    """To take messages of a subscription."""
    return Needs((NamedNeed((Verb.CONSUME,), Thing.SUBSCRIPTION, field, topic_verbs=(Verb.READ,)),))


def see_subscription(field: str = "subscription_id") -> Needs:
    """To know of a subscription."""
    return Needs((NamedNeed(SEE_CONSUMER, Thing.SUBSCRIPTION, field, topic_verbs=SEE_TOPIC),))


def inspect(field: str = "subscription_id") -> Needs:
    """To look at the messages of a subscription."""
    return Needs((NamedNeed(SEE_CONSUMER, Thing.SUBSCRIPTION, field, topic_verbs=(Verb.READ,)),))


def manage_subscription(field: str = "subscription_id") -> Needs:
    """To change or delete a subscription."""
    return Needs((NamedNeed((Verb.MANAGE,), Thing.SUBSCRIPTION, field, topic_verbs=SEE_TOPIC),))


def create_subscription(field: str = "subscription_id", *, letters: str | None = None) -> Needs:
    """To make a subscription, and to have the broker publish its dead letters to the topic that is chosen there."""
    needs = [NamedNeed((Verb.MANAGE,), Thing.SUBSCRIPTION, field, creates=True)]
    if letters is not None:
        needs.append(NamedNeed((Verb.PUBLISH,), Thing.TOPIC, letters, creates=True))
    return Needs(tuple(needs))


def consume_group(field: str = "group") -> Needs:
    """To be a member of a group, or to commit its offsets: it need not be there before."""
    return Needs((NamedNeed((Verb.CONSUME,), Thing.GROUP, field, creates=True),))


def see_group(field: str = "group") -> Needs:
    """To know of a group."""
    return Needs((NamedNeed(SEE_CONSUMER, Thing.GROUP, field),))


def manage_group(field: str = "group") -> Needs:
    """To reset or delete a group."""
    return Needs((NamedNeed((Verb.MANAGE,), Thing.GROUP, field),))


def transact() -> Needs:
    """To begin, commit or abort a transaction, which belongs to its user. Each topic is checked when it is staged."""
    return Needs(somewhere=Verb.PUBLISH, owns=Owned("transaction", ("transaction",)))


def member_of(group: str = "group", member: str = "member") -> Owned:
    """Return what fields say which member of which group a request is about."""
    return Owned("member", (group, member))


def all_of(*needs: Needs, owns: Owned | None = None) -> Needs:
    """Return what needs all of these."""
    return Needs(names=tuple(name for each in needs for name in each.names), owns=owns)


def check(principal: Principal, needs: Needs, arguments: object, topic_of: TopicOf) -> None:
    """Raises Unauthenticated, Forbidden, or the refusal of an unknown name if the principal may not ask for this."""
    if needs.is_open or principal.is_admin:
        return
    if needs.everywhere is not None and principal.name == METRICS_USER:
        return
    if principal.is_stranger:
        raise Unauthenticated(f"this broker has users; {LOG_IN}")
    if needs.is_admin:
        raise _forbidden(principal, "admin:*")
    if needs.somewhere is not None and not principal.may_somewhere(needs.somewhere):
        raise _forbidden(principal, f"{needs.somewhere} on a topic")
    if needs.everywhere is not None and not principal.may_everywhere(needs.everywhere):
        raise _forbidden(principal, f"{needs.everywhere}:*")
    for need in needs.names:
        for name in need.names(arguments):
            _check_name(principal, need, name, topic_of)


def _check_name(principal: Principal, need: NamedNeed, name: str, topic_of: TopicOf) -> None:
    seen = principal.sees_topic(name) if need.thing is Thing.TOPIC else principal.sees_consumer(name)
    if not principal.may(need.verbs, name):
        what = f"{' or '.join(need.verbs)} on {need.thing} {check_name(need.thing, name)!r}"
        raise _forbidden(principal, what) if seen or need.creates else _unknown(need.thing, name)
    if need.topic_verbs and (topic := topic_of(name)) is not None and not principal.may(need.topic_verbs, topic):
        if not principal.sees_topic(topic):
            raise _unknown(need.thing, name)
        raise _forbidden(principal, f"read on the topic of {need.thing} {name!r}")


def _forbidden(principal: Principal, what: str) -> Forbidden:
    return Forbidden(f"user {principal.name!r} may not do that: it needs {what}")


def _unknown(thing: Thing, name: str) -> BrokerError:
    """Return the refusal of a name that is not there. Raises BadName."""
    name = check_name(thing, name)
    match thing:
        case Thing.TOPIC:
            return UnknownTopic(name)
        case Thing.SUBSCRIPTION:
            return UnknownSubscription(name)
        case _:
            return UnknownGroup(name)
