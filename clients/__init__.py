"""clients: the libraries that programs use to talk to a broker.

May import: clients.blocking, clients.blocking_consumer, clients.blocking_transactions, clients.errors,
    clients.fetching, clients.message, clients.receipts, clients.subscriber, clients.transactions,
    clients.trio_client, clients.trio_consumer, clients.trio_subscriber, clients.trio_transactions,
    the standard library.
Never: the server, storage.

trio is loaded only when a name that begins with Async is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clients.blocking import BrokerClient
from clients.blocking_consumer import Consumer
from clients.blocking_transactions import Stage, Transaction
from clients.errors import (
    BadName,
    BadRequest,
    BrokerUnavailable,
    ConnectionLost,
    DiskFull,
    GroupInUse,
    LogDamaged,
    LogPoisoned,
    MessageTooLarge,
    NotJoined,
    OffsetOutOfRange,
    OutOfSequence,
    ProducerFenced,
    PublishFailed,
    PublishUncertain,
    QBError,
    RequestRefused,
    RequestTimedOut,
    ShuttingDown,
    StaleGeneration,
    SubscriptionBusy,
    SubscriptionExists,
    SubscriptionRemoved,
    TooManyConnections,
    TopicExists,
    TopicInUse,
    TransactionUnfinished,
    UnknownGroup,
    UnknownMember,
    UnknownPartition,
    UnknownStage,
    UnknownSubscription,
    UnknownTopic,
    UsedAfterFork,
)
from clients.fetching import Fetched
from clients.message import Message
from clients.receipts import Offsets, Receipt, StoredRun
from clients.subscriber import Subscriber
from clients.transactions import TransactionReceipt

if TYPE_CHECKING:
    from clients.trio_client import AsyncBrokerClient
    from clients.trio_consumer import AsyncConsumer
    from clients.trio_subscriber import AsyncSubscriber
    from clients.trio_transactions import AsyncStage, AsyncTransaction

__all__ = [
    "AsyncBrokerClient",
    "AsyncConsumer",
    "AsyncStage",
    "AsyncSubscriber",
    "AsyncTransaction",
    "BadName",
    "BadRequest",
    "BrokerClient",
    "BrokerUnavailable",
    "ConnectionLost",
    "Consumer",
    "DiskFull",
    "Fetched",
    "GroupInUse",
    "LogDamaged",
    "LogPoisoned",
    "Message",
    "MessageTooLarge",
    "NotJoined",
    "OffsetOutOfRange",
    "Offsets",
    "OutOfSequence",
    "ProducerFenced",
    "PublishFailed",
    "PublishUncertain",
    "QBError",
    "Receipt",
    "RequestRefused",
    "RequestTimedOut",
    "ShuttingDown",
    "Stage",
    "StaleGeneration",
    "StoredRun",
    "Subscriber",
    "SubscriptionBusy",
    "SubscriptionExists",
    "SubscriptionRemoved",
    "TooManyConnections",
    "TopicExists",
    "TopicInUse",
    "Transaction",
    "TransactionReceipt",
    "TransactionUnfinished",
    "UnknownGroup",
    "UnknownMember",
    "UnknownPartition",
    "UnknownStage",
    "UnknownSubscription",
    "UnknownTopic",
    "UsedAfterFork",
]


def __getattr__(name: str) -> Any:
    if name == "AsyncBrokerClient":
        from clients.trio_client import AsyncBrokerClient

        return AsyncBrokerClient
    if name == "AsyncConsumer":
        from clients.trio_consumer import AsyncConsumer

        return AsyncConsumer
    if name == "AsyncSubscriber":
        from clients.trio_subscriber import AsyncSubscriber

        return AsyncSubscriber
    if name in ("AsyncStage", "AsyncTransaction"):
        from clients import trio_transactions

        return getattr(trio_transactions, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
