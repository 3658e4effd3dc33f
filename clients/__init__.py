"""clients: the libraries that programs use to talk to a broker.

May import: clients.blocking, clients.errors, clients.receipts, clients.trio_client, the standard library.
Never: the server, storage.

trio is loaded only when AsyncBrokerClient is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clients.blocking import BrokerClient
from clients.errors import (
    BadName,
    BadRequest,
    BrokerUnavailable,
    ConnectionLost,
    DiskFull,
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
    SubscriptionBusy,
    SubscriptionExists,
    TooManyConnections,
    TopicExists,
    TopicInUse,
    UnknownPartition,
    UnknownSubscription,
    UnknownTopic,
)
from clients.receipts import Offsets, Receipt, StoredRun

if TYPE_CHECKING:
    from clients.trio_client import AsyncBrokerClient

__all__ = [
    "AsyncBrokerClient",
    "BadName",
    "BadRequest",
    "BrokerClient",
    "BrokerUnavailable",
    "ConnectionLost",
    "DiskFull",
    "LogDamaged",
    "LogPoisoned",
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
    "StoredRun",
    "SubscriptionBusy",
    "SubscriptionExists",
    "TooManyConnections",
    "TopicExists",
    "TopicInUse",
    "UnknownPartition",
    "UnknownSubscription",
    "UnknownTopic",
]


def __getattr__(name: str) -> Any:
    if name == "AsyncBrokerClient":
        from clients.trio_client import AsyncBrokerClient

        return AsyncBrokerClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
