"""client: the library that programs import, and the command line.

May import: clients, cli.main, the standard library.
Never: the server, storage.

`import client` loads neither trio nor the command line: each comes when it is used.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import clients
from clients import (
    BadName,
    BadRequest,
    BrokerClient,
    BrokerUnavailable,
    ConnectionLost,
    Consumer,
    DiskFull,
    Fetched,
    GroupInUse,
    LogDamaged,
    LogPoisoned,
    Message,
    MessageTooLarge,
    NotJoined,
    OffsetOutOfRange,
    Offsets,
    OutOfSequence,
    ProducerFenced,
    PublishFailed,
    PublishUncertain,
    QBError,
    Receipt,
    RequestRefused,
    RequestTimedOut,
    ShuttingDown,
    Stage,
    StaleGeneration,
    StoredRun,
    Subscriber,
    SubscriptionBusy,
    SubscriptionExists,
    SubscriptionRemoved,
    TooManyConnections,
    TopicExists,
    TopicInUse,
    Transaction,
    TransactionReceipt,
    TransactionUnfinished,
    UnknownGroup,
    UnknownMember,
    UnknownPartition,
    UnknownStage,
    UnknownSubscription,
    UnknownTopic,
    UsedAfterFork,
)

if TYPE_CHECKING:
    from clients import AsyncBrokerClient, AsyncConsumer, AsyncStage, AsyncSubscriber, AsyncTransaction

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
    "main",
]


def __getattr__(name: str) -> Any:
    if name in ("AsyncBrokerClient", "AsyncConsumer", "AsyncStage", "AsyncSubscriber", "AsyncTransaction"):
        return getattr(clients, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def main() -> int:
    """Carry out the command on the command line and return its exit code."""
    from cli.main import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
