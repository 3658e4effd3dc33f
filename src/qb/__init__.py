"""The libraries that programs use to talk to a broker.

anyio is loaded only when a name that begins with Async is asked for, trio only when trio runs it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from qb.clients.blocking.client import BrokerClient
from qb.clients.blocking.consumer import Consumer
from qb.clients.blocking.methods.stages import Stage
from qb.clients.blocking.methods.transaction_block import Transaction
from qb.clients.blocking.sending.producer import Producer
from qb.clients.blocking.sending.send_handles import SendHandle
from qb.clients.blocking.subscribing.subscriber import Subscriber
from qb.clients.producing.send_batch import Delivery
from qb.clients.protocol.client_errors import (
    BadName,
    BadRequest,
    BrokerUnavailable,
    BufferFull,
    ConnectionLost,
    DiskFull,
    Forbidden,
    GroupInUse,
    JournalLost,
    LimitReached,
    LogDamaged,
    LogPoisoned,
    MessageTooLarge,
    NotJoined,
    NotOwner,
    OffsetOutOfRange,
    OutOfSequence,
    PartitionHeld,
    ProducerFenced,
    PublishFailed,
    PublishUncertain,
    QBError,
    QuotaExceeded,
    Recovering,
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
    Unauthenticated,
    UnknownGroup,
    UnknownMember,
    UnknownPartition,
    UnknownStage,
    UnknownSubscription,
    UnknownTopic,
    UnknownTransaction,
    UsedAfterFork,
)
from qb.clients.protocol.fetch_requests import Fetched
from qb.clients.protocol.message import Message
from qb.clients.protocol.receipts import Offsets, Receipt, StoredRun
from qb.clients.protocol.staged_messages import TransactionReceipt
from qb.clients.results import (
    DeadLetter,
    GroupInfo,
    GroupPartitionInfo,
    OffsetInfo,
    PartitionInfo,
    ServerInfo,
    StageInfo,
    SubscriptionInfo,
    TopicInfo,
    TransactionInfo,
    TransactionList,
)

if TYPE_CHECKING:
    from qb.clients.aio.client import AsyncBrokerClient
    from qb.clients.aio.consumer import AsyncConsumer
    from qb.clients.aio.methods.stages import AsyncStage
    from qb.clients.aio.methods.transaction_block import AsyncTransaction
    from qb.clients.aio.sending.producer import AsyncProducer
    from qb.clients.aio.sending.send_handles import AsyncSendHandle
    from qb.clients.aio.subscribing.subscriber import AsyncSubscriber

__all__ = [
    "AsyncBrokerClient",
    "AsyncConsumer",
    "AsyncProducer",
    "AsyncSendHandle",
    "AsyncStage",
    "AsyncSubscriber",
    "AsyncTransaction",
    "BadName",
    "BadRequest",
    "BrokerClient",
    "BrokerUnavailable",
    "BufferFull",
    "ConnectionLost",
    "Consumer",
    "DeadLetter",
    "Delivery",
    "DiskFull",
    "Fetched",
    "Forbidden",
    "GroupInUse",
    "GroupInfo",
    "GroupPartitionInfo",
    "JournalLost",
    "LimitReached",
    "LogDamaged",
    "LogPoisoned",
    "Message",
    "MessageTooLarge",
    "NotJoined",
    "NotOwner",
    "OffsetInfo",
    "OffsetOutOfRange",
    "Offsets",
    "OutOfSequence",
    "PartitionHeld",
    "PartitionInfo",
    "Producer",
    "ProducerFenced",
    "PublishFailed",
    "PublishUncertain",
    "QBError",
    "QuotaExceeded",
    "Receipt",
    "Recovering",
    "RequestRefused",
    "RequestTimedOut",
    "SendHandle",
    "ServerInfo",
    "ShuttingDown",
    "Stage",
    "StageInfo",
    "StaleGeneration",
    "StoredRun",
    "Subscriber",
    "SubscriptionBusy",
    "SubscriptionExists",
    "SubscriptionInfo",
    "SubscriptionRemoved",
    "TooManyConnections",
    "TopicExists",
    "TopicInUse",
    "TopicInfo",
    "Transaction",
    "TransactionInfo",
    "TransactionList",
    "TransactionReceipt",
    "TransactionUnfinished",
    "Unauthenticated",
    "UnknownGroup",
    "UnknownMember",
    "UnknownPartition",
    "UnknownStage",
    "UnknownSubscription",
    "UnknownTopic",
    "UnknownTransaction",
    "UsedAfterFork",
]


_ASYNC = {
    "AsyncBrokerClient": "qb.clients.aio.client",
    "AsyncConsumer": "qb.clients.aio.consumer",
    "AsyncProducer": "qb.clients.aio.client",
    "AsyncSendHandle": "qb.clients.aio.sending.send_handles",
    "AsyncStage": "qb.clients.aio.methods.stages",
    "AsyncSubscriber": "qb.clients.aio.subscribing.subscriber",
    "AsyncTransaction": "qb.clients.aio.methods.transaction_block",
}  # where the names are that need an event loop


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name in _ASYNC:
        return getattr(import_module(_ASYNC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
