"""The broker's methods by name, with their arguments checked.

One row a method. The binary door calls them with REQUEST frames; the other doors call the same rows.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, NamedTuple, Protocol, TypeVar

import msgspec

from qb.core.broker.message_broker import MessageBroker
from qb.core.broker.topic_registry import TopicRegistry
from qb.core.broker.user_registry import UserRegistry
from qb.core.groups.group_manager import GroupCommit, GroupManager
from qb.core.push.subscription_manager import SubscriptionManager
from qb.core.rights import needs
from qb.core.rights.needs import Needs
from qb.core.rights.principals import Principal
from qb.core.transactions.transaction_manager import TransactionManager
from qb.core.wire.argument_errors import in_words, why_no_json
from qb.core.wire.errors import BadRequest
from qb.core.wire.whole_numbers import from_text
from qb.storage.engine import Topic
from qb.storage.stages.transaction_records import NamedStage

# These may take long, so doors let other requests overtake them. Those that change users may end the connection that
# asks, whose reading is then cancelled: their answer must not be.
SLOW_METHODS = frozenset({"commit_transaction", "finish_transaction", "abandon_transaction"})
SLOW_METHODS |= {"add_user", "rotate_user", "remove_user", "limit_address"}


class Arguments(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What a method takes; anything else is refused by name."""

    def as_keywords(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__struct_fields__}


MAX_ARGUMENTS = 1 << 20  # bytes of JSON: one decoding is one call that nothing can interrupt
A = TypeVar("A", bound=msgspec.Struct)


class NoArguments(Arguments):
    pass


class CreateTopicArguments(Arguments):
    topic: str
    partitions: int = 1
    retention_hours: float | None = None
    retention_bytes: int | None = None


class AddPartitionsArguments(Arguments):
    topic: str
    partitions: int


class DeleteTopicArguments(Arguments):
    topic: str
    if_unused: bool = False


class TopicArguments(Arguments):
    topic: str


class TopicsArguments(Arguments):
    topics: list[str]


class OffsetsArguments(Arguments):
    topic: str
    partition: int = 0
    time_ms: int | None = None
    consistent: bool = False


class FetchArguments(Arguments):
    """The properties of a FETCH frame."""

    topic: str
    offset: int
    partition: int = 0
    max_messages: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 500
    max_bytes: Annotated[int, msgspec.Meta(ge=1, le=16 << 20)] = 1 << 20
    max_wait: Annotated[float, msgspec.Meta(ge=0, le=300)] = 0.0
    min_bytes: Annotated[int, msgspec.Meta(ge=0, le=16 << 20)] = 1
    index: bool = False
    bulk: bool = False
    consistent: bool = False


class CreateSubscriptionArguments(Arguments):
    subscription_id: str
    topic: str
    start_offset: int | str = 0
    options: dict[str, Any] | None = None


class ListSubscriptionsArguments(Arguments):
    topic: str | None = None


class SubscriptionArguments(Arguments):
    subscription_id: str


class SubscribeArguments(Arguments):
    """The properties of a SUBSCRIBE frame."""

    subscription_id: str
    window: int | None = None
    announces: bool = False


class SeekArguments(Arguments):
    subscription_id: str
    to: int | str
    partition: int | None = None


class ForkArguments(Arguments):
    subscription_id: str
    new_id: str


class ExplainArguments(Arguments):
    subscription_id: str
    offset: int
    partition: int = 0


class ListDeadLettersArguments(Arguments):
    subscription_id: str
    max: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 100


class ChooseDeadLettersArguments(Arguments):
    subscription_id: str
    numbers: list[int] | None = None


class JoinGroupArguments(Arguments):
    group: str
    member: str
    topics: list[str]
    session_timeout: float = 10.0
    rebalance_timeout: float | None = None


class SyncGroupArguments(Arguments):
    group: str
    member: str
    generation: int


class HeartbeatGroupArguments(Arguments):
    group: str
    member: str
    generation: int | None = None


class LeaveGroupArguments(Arguments):
    group: str
    member: str


class CommitOffsetsArguments(Arguments):
    group: str
    offsets: list[GroupCommit]
    member: str | None = None
    generation: int | None = None


class CommittedOffsetsArguments(Arguments):
    group: str
    topic: str | None = None
    consistent: bool = False


class ResetGroupArguments(Arguments):
    group: str
    topic: str
    to: int | str
    partition: int | None = None


class GroupArguments(Arguments):
    group: str


class BeginTransactionArguments(Arguments):
    transaction: str
    number: int | None = None
    opens: bool = True


class CommitTransactionArguments(Arguments):
    transaction: str
    stages: list[NamedStage]
    number: int | None = None


class AbortTransactionArguments(Arguments):
    transaction: str
    number: int | None = None
    stages: list[str] | None = None


class TransactionArguments(Arguments):
    transaction: str


class WholeTransactionArguments(Arguments):
    """The properties of a TRANSACTION frame."""

    transaction: str
    number: int | None = None


class WholeStageArguments(Arguments):
    """The properties of a STAGE frame in a TRANSACTION frame."""

    topic: str
    partition: Annotated[int, msgspec.Meta(ge=0)]


class StageArguments(Arguments):
    """The properties of a STAGE frame."""

    stage: str
    topic: str
    partition: Annotated[int, msgspec.Meta(ge=0)]
    first: Annotated[int, msgspec.Meta(ge=0)]


class VerifyCellArguments(Arguments):
    start: bool = False
    nodes: bool = False


class MoveCellArguments(Arguments):
    to: str | None = None  # the name of a broker


class AddUserArguments(Arguments):
    name: str
    words: list[str]  # its credentials, rights and quotas, as in a users file


class RotateUserArguments(Arguments):
    name: str
    sha256: str  # of the new token
    keep_old: bool = False


class UserArguments(Arguments):
    name: str


class LimitAddressArguments(Arguments):
    network: str
    limits: list[str]


class Method(NamedTuple):
    """A method's arguments, and what carries it out."""

    arguments: type[Arguments]
    call: Callable[..., Awaitable[Any]]
    needs: Needs
    shows: Callable[[Principal, Any], Any] | None = None  # returns as much of the answer as a user may see
    makes: bool = False  # what it makes counts in the quotas of its user: it takes `made_by`
    at_once: Callable[..., Any] | None = None  # does the same in one step; returns None if that needs waiting


def _topics(call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Return a method of the topic registry as one of the broker."""
    return lambda broker, **arguments: call(broker.topics, **arguments)


def _managed(call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Return a method of the subscription manager as one of the broker."""
    return lambda broker, **arguments: call(broker.subscriptions, **arguments)


def _grouped(call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Return a method of the group manager as one of the broker."""
    return lambda broker, **arguments: call(broker.groups, **arguments)


def _transacted(call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Return a method of the transactions as one of the broker."""
    return lambda broker, **arguments: call(broker.transactions, **arguments)


def _of_users(call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Return a method of the user registry as one of the broker."""
    return lambda broker, **arguments: call(broker.users, **arguments)


def _seen_topics(principal: Principal, topics: list[Topic]) -> list[Topic]:
    return [each for each in topics if principal.sees_topic(each.topic)]


def _seen_subscriptions(principal: Principal, listed: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each for each in listed if sees_subscription(principal, each)]


def sees_subscription(principal: Principal, listed: Mapping[str, Any]) -> bool:
    """Say whether a subscription of a list exists for a user."""
    return principal.sees_consumer(listed["subscription_id"]) and principal.sees_topic(listed["topic"])


def _seen_groups(principal: Principal, groups: list[Any]) -> list[Any]:
    return [each for each in groups if principal.sees_consumer(each.group)]


def _seen_offsets(principal: Principal, offsets: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each for each in offsets if principal.sees_topic(each["topic"])]


def _seen_info(principal: Principal, info: dict[str, Any]) -> dict[str, Any]:
    """Leave out how much there is in all, and where it is."""
    return {**info, "topics": 0, "connections": 0, "data_dir": ""}


CREATE_SUBSCRIPTION = needs.all_of(needs.create_subscription(letters="options.dead_letter_topic"), needs.read())
FORK = needs.all_of(needs.manage_subscription(), needs.inspect(), needs.create_subscription("new_id"))
OWNED_MEMBER = needs.member_of()
JOIN_GROUP = needs.all_of(needs.consume_group(), needs.read("topics"), owns=OWNED_MEMBER)
MEMBER = needs.all_of(needs.consume_group(), owns=OWNED_MEMBER)

METHODS: dict[str, Method] = {
    "create_topic": Method(CreateTopicArguments, _topics(TopicRegistry.create), needs.create_topic(), makes=True),
    "add_partitions": Method(AddPartitionsArguments, _topics(TopicRegistry.add_partitions), needs.manage_topic()),
    "delete_topic": Method(DeleteTopicArguments, _topics(TopicRegistry.delete), needs.manage_topic()),
    "list_topics": Method(NoArguments, _topics(TopicRegistry.list_all), needs.ANY_USER, _seen_topics),
    "describe_topic": Method(TopicArguments, _topics(TopicRegistry.describe), needs.see_topic()),
    "describe_topics": Method(TopicsArguments, _topics(TopicRegistry.describe_many), needs.see_topic("topics")),
    "offsets": Method(OffsetsArguments, MessageBroker.offsets, needs.read()),
    "create_subscription": Method(
        CreateSubscriptionArguments, _managed(SubscriptionManager.create), CREATE_SUBSCRIPTION, makes=True
    ),
    "delete_subscription": Method(
        SubscriptionArguments, _managed(SubscriptionManager.delete), needs.manage_subscription()
    ),
    "list_subscriptions": Method(
        ListSubscriptionsArguments, _managed(SubscriptionManager.list_all), needs.see_topic(), _seen_subscriptions
    ),
    "describe_subscription": Method(
        SubscriptionArguments, _managed(SubscriptionManager.describe), needs.see_subscription()
    ),
    "seek": Method(SeekArguments, _managed(SubscriptionManager.seek), needs.manage_subscription()),
    "pause": Method(SubscriptionArguments, _managed(SubscriptionManager.pause), needs.manage_subscription()),
    "resume": Method(SubscriptionArguments, _managed(SubscriptionManager.resume), needs.manage_subscription()),
    "fork": Method(ForkArguments, _managed(SubscriptionManager.fork), FORK, makes=True),
    "explain": Method(ExplainArguments, _managed(SubscriptionManager.explain), needs.inspect()),
    "dead_letters": Method(ListDeadLettersArguments, _managed(SubscriptionManager.dead_letters), needs.inspect()),
    "retry_dead_letters": Method(
        ChooseDeadLettersArguments, _managed(SubscriptionManager.retry_dead_letters), needs.manage_subscription()
    ),
    "purge_dead_letters": Method(
        ChooseDeadLettersArguments, _managed(SubscriptionManager.purge_dead_letters), needs.manage_subscription()
    ),
    "join_group": Method(JoinGroupArguments, _grouped(GroupManager.join), JOIN_GROUP),
    "sync_group": Method(SyncGroupArguments, _grouped(GroupManager.sync), MEMBER),
    "heartbeat_group": Method(HeartbeatGroupArguments, _grouped(GroupManager.heartbeat), MEMBER),
    "leave_group": Method(LeaveGroupArguments, _grouped(GroupManager.leave), MEMBER),
    "commit_offsets": Method(
        CommitOffsetsArguments,
        _grouped(GroupManager.commit),
        needs.all_of(needs.consume_group(), needs.read("offsets"), owns=OWNED_MEMBER),
    ),
    "committed_offsets": Method(
        CommittedOffsetsArguments,
        _grouped(GroupManager.committed),
        needs.all_of(needs.see_group(), needs.see_topic()),
        _seen_offsets,
    ),
    "reset_group": Method(
        ResetGroupArguments, _grouped(GroupManager.reset), needs.all_of(needs.manage_group(), needs.read())
    ),
    "list_groups": Method(NoArguments, _grouped(GroupManager.list_all), needs.ANY_USER, _seen_groups),
    "describe_group": Method(GroupArguments, _grouped(GroupManager.describe), needs.see_group()),
    "delete_group": Method(GroupArguments, _grouped(GroupManager.delete), needs.manage_group()),
    "begin_transaction": Method(
        BeginTransactionArguments,
        _transacted(TransactionManager.begin),
        needs.transact(),
        at_once=lambda broker, **arguments: broker.transactions.begin_at_once(**arguments),
    ),
    "commit_transaction": Method(CommitTransactionArguments, _transacted(TransactionManager.commit), needs.transact()),
    "abort_transaction": Method(AbortTransactionArguments, _transacted(TransactionManager.abort), needs.transact()),
    "list_transactions": Method(NoArguments, _transacted(TransactionManager.list_all), needs.ADMIN),
    "show_transaction": Method(TransactionArguments, _transacted(TransactionManager.show), needs.ADMIN),
    "finish_transaction": Method(TransactionArguments, _transacted(TransactionManager.finish), needs.ADMIN),
    "abandon_transaction": Method(TransactionArguments, _transacted(TransactionManager.abandon), needs.ADMIN),
    "cluster": Method(NoArguments, MessageBroker.cluster, needs.ADMIN),
    "verify_cell": Method(VerifyCellArguments, MessageBroker.verify_cell, needs.ADMIN),
    "move_cell": Method(MoveCellArguments, MessageBroker.move_cell, needs.ADMIN),
    "list_users": Method(NoArguments, _of_users(UserRegistry.list_all), needs.ADMIN),
    "add_user": Method(AddUserArguments, _of_users(UserRegistry.add), needs.administer()),
    "rotate_user": Method(RotateUserArguments, _of_users(UserRegistry.rotate), needs.administer()),
    "remove_user": Method(UserArguments, _of_users(UserRegistry.remove), needs.administer()),
    "limit_address": Method(LimitAddressArguments, _of_users(UserRegistry.limit_address), needs.administer("network")),
    "server_info": Method(NoArguments, MessageBroker.server_info, needs.ANY_USER, _seen_info),
}


class Asker(Protocol):
    """The peer that asks."""

    principal: Principal

    def check(self, needs: Needs, arguments: object, action: str) -> None:
        """Raises BrokerError if it may not ask for that."""


async def call(broker: MessageBroker, method: str, arguments: bytes, asker: Asker) -> bytes:
    """Carry out a method with JSON arguments and return the JSON answer. Raises BrokerError."""
    known, keywords = _decoded(method, arguments, asker)
    if known.makes:
        keywords["made_by"] = asker.principal.name
    answer = await known.call(broker, **keywords)
    if known.shows is not None and not asker.principal.is_admin:
        answer = known.shows(asker.principal, answer)
    return msgspec.json.encode(answer)


def call_at_once(broker: MessageBroker, method: str, arguments: bytes, asker: Asker) -> bytes | None:
    """Carry out a method as call() does, in one step of the event loop; None: it is one that may have to wait."""
    known = METHODS.get(method)
    if known is None or known.at_once is None:
        return None
    answer = known.at_once(broker, **_decoded(method, arguments, asker)[1])
    return None if answer is None else msgspec.json.encode(answer)


def _decoded(method: str, arguments: bytes, asker: Asker) -> tuple[Method, dict[str, Any]]:
    """Return a method and its arguments. Raises BadRequest, and what the asker's check raises."""
    known = METHODS.get(method)
    if known is None:
        raise BadRequest(f"there is no method {method[:80]!r}; there are: {', '.join(sorted(METHODS))}")
    if len(arguments) > MAX_ARGUMENTS:
        what = f"the arguments have {len(arguments)} bytes, and at most {MAX_ARGUMENTS} are taken"
        raise BadRequest(f"{method}: {what}; send several requests")
    try:
        decoded = msgspec.json.decode(arguments or b"{}", type=known.arguments)
    except msgspec.ValidationError as error:
        raise BadRequest(f"{method}: {in_words(str(error))}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"{method}: {why_no_json(error, arguments)}") from None
    asker.check(known.needs, decoded, method)
    return known, decoded.as_keywords()


def arguments_from_text(kind: type[A], properties: Mapping[str, str]) -> A:
    """Return arguments that came as text, as a frame's properties do; others beside them are left alone.

    Raises BadRequest.
    """
    wanted = {name: value for name, value in properties.items() if name in kind.__struct_fields__}
    try:
        return from_text(kind, wanted)
    except msgspec.ValidationError as error:
        raise BadRequest(in_words(str(error))) from None
