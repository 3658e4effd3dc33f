"""core.methods: the broker's methods by name, with their arguments checked.

May import: core.broker, core.complaints, core.consumers, core.decisions, core.errors, core.manager,
    core.transactions, msgspec, the standard library.
Never: trio, socket, storage.

One row a method. The binary door calls them with REQUEST frames; the other doors call the same rows.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec

from core.broker import MessageBroker
from core.complaints import in_words, why_no_json
from core.consumers import GroupCommit, GroupManager
from core.decisions import NamedStage
from core.errors import BadRequest
from core.manager import SubscriptionManager
from core.transactions import Transactions

COMMIT_TRANSACTION = "commit_transaction"  # it may take long, so doors let other requests overtake it


class Arguments(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What a method takes; anything else is refused by name."""

    def as_keywords(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__struct_fields__}


A = TypeVar("A", bound=msgspec.Struct)


class NoArguments(Arguments):
    pass


class CreateTopic(Arguments):
    topic: str
    partitions: int = 1
    retention_hours: float | None = None
    retention_bytes: int | None = None


class AddPartitions(Arguments):
    topic: str
    partitions: int


class DeleteTopic(Arguments):
    topic: str
    if_unused: bool = False


class NameTopic(Arguments):
    topic: str


class NameTopics(Arguments):
    topics: list[str]


class Offsets(Arguments):
    topic: str
    partition: int = 0
    time_ms: int | None = None


class Fetch(Arguments):
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


class CreateSubscription(Arguments):
    subscription_id: str
    topic: str
    start_offset: int | str = 0
    options: dict[str, Any] | None = None


class ListSubscriptions(Arguments):
    topic: str | None = None


class NameSubscription(Arguments):
    subscription_id: str


class Subscribe(Arguments):
    """The properties of a SUBSCRIBE frame."""

    subscription_id: str
    window: int | None = None
    announces: bool = False


class Seek(Arguments):
    subscription_id: str
    to: int | str
    partition: int | None = None


class Fork(Arguments):
    subscription_id: str
    new_id: str


class Explain(Arguments):
    subscription_id: str
    offset: int
    partition: int = 0


class ListDeadLetters(Arguments):
    subscription_id: str
    max: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 100


class ChooseDeadLetters(Arguments):
    subscription_id: str
    numbers: list[int] | None = None


class JoinGroup(Arguments):
    group: str
    member: str
    topics: list[str]
    session_timeout: float = 10.0
    rebalance_timeout: float | None = None


class SyncGroup(Arguments):
    group: str
    member: str
    generation: int


class HeartbeatGroup(Arguments):
    group: str
    member: str
    generation: int | None = None


class LeaveGroup(Arguments):
    group: str
    member: str


class CommitOffsets(Arguments):
    group: str
    offsets: list[GroupCommit]
    member: str | None = None
    generation: int | None = None


class CommittedOffsets(Arguments):
    group: str
    topic: str | None = None


class ResetGroup(Arguments):
    group: str
    topic: str
    to: int | str
    partition: int | None = None


class NameGroup(Arguments):
    group: str


class BeginTransaction(Arguments):
    transaction: str
    number: int | None = None


class CommitTransaction(Arguments):
    transaction: str
    stages: list[NamedStage]
    number: int | None = None


class AbortTransaction(Arguments):
    transaction: str
    number: int | None = None
    stages: list[str] | None = None


class StageTo(Arguments):
    """The properties of a STAGE frame."""

    stage: str
    topic: str
    partition: Annotated[int, msgspec.Meta(ge=0)]
    first: Annotated[int, msgspec.Meta(ge=0)]


class Method(NamedTuple):
    """A method's arguments, and what carries it out."""

    arguments: type[Arguments]
    call: Callable[..., Awaitable[Any]]


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
    "create_topic": Method(CreateTopic, MessageBroker.create_topic),
    "add_partitions": Method(AddPartitions, MessageBroker.add_partitions),
    "delete_topic": Method(DeleteTopic, MessageBroker.delete_topic),
    "list_topics": Method(NoArguments, MessageBroker.list_topics),
    "describe_topic": Method(NameTopic, MessageBroker.describe_topic),
    "describe_topics": Method(NameTopics, MessageBroker.describe_topics),
    "offsets": Method(Offsets, MessageBroker.offsets),
    "create_subscription": Method(CreateSubscription, _managed(SubscriptionManager.create)),
    "delete_subscription": Method(NameSubscription, _managed(SubscriptionManager.delete)),
    "list_subscriptions": Method(ListSubscriptions, _managed(SubscriptionManager.list_all)),
    "describe_subscription": Method(NameSubscription, _managed(SubscriptionManager.describe)),
    "seek": Method(Seek, _managed(SubscriptionManager.seek)),
    "pause": Method(NameSubscription, _managed(SubscriptionManager.pause)),
    "resume": Method(NameSubscription, _managed(SubscriptionManager.resume)),
    "fork": Method(Fork, _managed(SubscriptionManager.fork)),
    "explain": Method(Explain, _managed(SubscriptionManager.explain)),
    "dead_letters": Method(ListDeadLetters, _managed(SubscriptionManager.dead_letters)),
    "retry_dead_letters": Method(ChooseDeadLetters, _managed(SubscriptionManager.retry_dead_letters)),
    "purge_dead_letters": Method(ChooseDeadLetters, _managed(SubscriptionManager.purge_dead_letters)),
    "join_group": Method(JoinGroup, _grouped(GroupManager.join)),
    "sync_group": Method(SyncGroup, _grouped(GroupManager.sync)),
    "heartbeat_group": Method(HeartbeatGroup, _grouped(GroupManager.heartbeat)),
    "leave_group": Method(LeaveGroup, _grouped(GroupManager.leave)),
    "commit_offsets": Method(CommitOffsets, _grouped(GroupManager.commit)),
    "committed_offsets": Method(CommittedOffsets, _grouped(GroupManager.committed)),
    "reset_group": Method(ResetGroup, _grouped(GroupManager.reset)),
    "list_groups": Method(NoArguments, _grouped(GroupManager.list_all)),
    "describe_group": Method(NameGroup, _grouped(GroupManager.describe)),
    "delete_group": Method(NameGroup, _grouped(GroupManager.delete)),
    "begin_transaction": Method(BeginTransaction, _transacted(Transactions.begin)),
    COMMIT_TRANSACTION: Method(CommitTransaction, _transacted(Transactions.commit)),
    "abort_transaction": Method(AbortTransaction, _transacted(Transactions.abort)),
    "list_transactions": Method(NoArguments, _transacted(Transactions.list_all)),
    "server_info": Method(NoArguments, MessageBroker.server_info),
}


async def call(broker: MessageBroker, method: str, arguments: bytes) -> bytes:
    """Carry out a method with JSON arguments and return the JSON answer. Raises BrokerError."""
    known = METHODS.get(method)
    if known is None:
        raise BadRequest(f"there is no method {method[:80]!r}; there are: {', '.join(sorted(METHODS))}")
    try:
        decoded = msgspec.json.decode(arguments or b"{}", type=known.arguments)
    except msgspec.ValidationError as error:
        raise BadRequest(f"{method}: {in_words(str(error))}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"{method}: {why_no_json(error, arguments)}") from None
    answer = await known.call(broker, **decoded.as_keywords())
    return msgspec.json.encode(answer)


def arguments_from_text(kind: type[A], properties: Mapping[str, str]) -> A:
    """Return arguments that came as text, as a frame's properties do; others beside them are left alone.

    Raises BadRequest.
    """
    wanted = {name: value for name, value in properties.items() if name in kind.__struct_fields__}
    try:
        return msgspec.convert(wanted, type=kind, strict=False)
    except msgspec.ValidationError as error:
        raise BadRequest(in_words(str(error))) from None
