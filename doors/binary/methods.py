"""The broker's methods by name, with their arguments checked.

One row a method. The binary door calls them with REQUEST frames; the other doors call the same rows.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec

from qb.core.broker.message_broker import MessageBroker
from qb.core.broker.topic_registry import TopicRegistry
from qb.core.groups.group_manager import GroupCommit, GroupManager
from qb.core.push.subscription_manager import SubscriptionManager
from qb.core.transactions.transaction_manager import TransactionManager
from qb.core.wire.argument_errors import in_words, why_no_json
from qb.core.wire.errors import BadRequest
from qb.storage.stages.transaction_records import NamedStage

# These may take long, so doors let other requests overtake them.
SLOW_METHODS = frozenset({"commit_transaction", "finish_transaction", "abandon_transaction"})


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


class Method(NamedTuple):
    """A method's arguments, and what carries it out."""

    arguments: type[Arguments]
    call: Callable[..., Awaitable[Any]]
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


METHODS: dict[str, Method] = {
    "create_topic": Method(CreateTopicArguments, _topics(TopicRegistry.create)),
    "add_partitions": Method(AddPartitionsArguments, _topics(TopicRegistry.add_partitions)),
    "delete_topic": Method(DeleteTopicArguments, _topics(TopicRegistry.delete)),
    "list_topics": Method(NoArguments, _topics(TopicRegistry.list_all)),
    "describe_topic": Method(TopicArguments, _topics(TopicRegistry.describe)),
    "describe_topics": Method(TopicsArguments, _topics(TopicRegistry.describe_many)),
    "offsets": Method(OffsetsArguments, MessageBroker.offsets),
    "create_subscription": Method(CreateSubscriptionArguments, _managed(SubscriptionManager.create)),
    "delete_subscription": Method(SubscriptionArguments, _managed(SubscriptionManager.delete)),
    "list_subscriptions": Method(ListSubscriptionsArguments, _managed(SubscriptionManager.list_all)),
    "describe_subscription": Method(SubscriptionArguments, _managed(SubscriptionManager.describe)),
    "seek": Method(SeekArguments, _managed(SubscriptionManager.seek)),
    "pause": Method(SubscriptionArguments, _managed(SubscriptionManager.pause)),
    "resume": Method(SubscriptionArguments, _managed(SubscriptionManager.resume)),
    "fork": Method(ForkArguments, _managed(SubscriptionManager.fork)),
    "explain": Method(ExplainArguments, _managed(SubscriptionManager.explain)),
    "dead_letters": Method(ListDeadLettersArguments, _managed(SubscriptionManager.dead_letters)),
    "retry_dead_letters": Method(ChooseDeadLettersArguments, _managed(SubscriptionManager.retry_dead_letters)),
    "purge_dead_letters": Method(ChooseDeadLettersArguments, _managed(SubscriptionManager.purge_dead_letters)),
    "join_group": Method(JoinGroupArguments, _grouped(GroupManager.join)),
    "sync_group": Method(SyncGroupArguments, _grouped(GroupManager.sync)),
    "heartbeat_group": Method(HeartbeatGroupArguments, _grouped(GroupManager.heartbeat)),
    "leave_group": Method(LeaveGroupArguments, _grouped(GroupManager.leave)),
    "commit_offsets": Method(CommitOffsetsArguments, _grouped(GroupManager.commit)),
    "committed_offsets": Method(CommittedOffsetsArguments, _grouped(GroupManager.committed)),
    "reset_group": Method(ResetGroupArguments, _grouped(GroupManager.reset)),
    "list_groups": Method(NoArguments, _grouped(GroupManager.list_all)),
    "describe_group": Method(GroupArguments, _grouped(GroupManager.describe)),
    "delete_group": Method(GroupArguments, _grouped(GroupManager.delete)),
    "begin_transaction": Method(
        BeginTransactionArguments,
        _transacted(TransactionManager.begin),
        lambda broker, **arguments: broker.transactions.begin_at_once(**arguments),
    ),
    "commit_transaction": Method(CommitTransactionArguments, _transacted(TransactionManager.commit)),
    "abort_transaction": Method(AbortTransactionArguments, _transacted(TransactionManager.abort)),
    "list_transactions": Method(NoArguments, _transacted(TransactionManager.list_all)),
    "show_transaction": Method(TransactionArguments, _transacted(TransactionManager.show)),
    "finish_transaction": Method(TransactionArguments, _transacted(TransactionManager.finish)),
    "abandon_transaction": Method(TransactionArguments, _transacted(TransactionManager.abandon)),
    "server_info": Method(NoArguments, MessageBroker.server_info),
}


async def call(broker: MessageBroker, method: str, arguments: bytes) -> bytes:
    """Carry out a method with JSON arguments and return the JSON answer. Raises BrokerError."""
    known, keywords = _decoded(method, arguments)
    return msgspec.json.encode(await known.call(broker, **keywords))


def call_at_once(broker: MessageBroker, method: str, arguments: bytes) -> bytes | None:
    """Carry out a method as call() does, in one step of the event loop; None: it is one that may have to wait."""
    known = METHODS.get(method)
    if known is None or known.at_once is None:
        return None
    answer = known.at_once(broker, **_decoded(method, arguments)[1])
    return None if answer is None else msgspec.json.encode(answer)


def _decoded(method: str, arguments: bytes) -> tuple[Method, dict[str, Any]]:
    """Return a method and its arguments. Raises BadRequest."""
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
    return known, decoded.as_keywords()


def arguments_from_text(kind: type[A], properties: Mapping[str, str]) -> A:
    """Return arguments that came as text, as a frame's properties do; others beside them are left alone.

    Raises BadRequest.
    """
    wanted = {name: value for name, value in properties.items() if name in kind.__struct_fields__}
    try:
        return msgspec.convert(wanted, type=kind, strict=False)
    except msgspec.ValidationError as error:
        raise BadRequest(in_words(str(error))) from None
