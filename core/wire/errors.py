"""Every way a request can be refused, and how the peer is answered.

Raise the narrowest type. `REPLIES` is the only place that turns a failure into a code on the wire, says whether
the peer's connection survives it, and gives the status that the HTTP door answers with.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Code(StrEnum):
    """Stable names on the wire: clients branch on these, people read the text beside them."""

    BAD_FRAME = "BAD_FRAME"
    BAD_REQUEST = "BAD_REQUEST"
    UNKNOWN_TYPE = "UNKNOWN_TYPE"
    BAD_NAME = "BAD_NAME"
    UNKNOWN_TOPIC = "UNKNOWN_TOPIC"
    TOPIC_EXISTS = "TOPIC_EXISTS"
    TOPIC_IN_USE = "TOPIC_IN_USE"
    UNKNOWN_PARTITION = "UNKNOWN_PARTITION"
    MESSAGE_TOO_LARGE = "MESSAGE_TOO_LARGE"
    OFFSET_OUT_OF_RANGE = "OFFSET_OUT_OF_RANGE"
    UNKNOWN_SUBSCRIPTION = "UNKNOWN_SUBSCRIPTION"
    SUBSCRIPTION_EXISTS = "SUBSCRIPTION_EXISTS"
    SUBSCRIPTION_BUSY = "SUBSCRIPTION_BUSY"
    NOT_JOINED = "NOT_JOINED"
    UNKNOWN_GROUP = "UNKNOWN_GROUP"
    UNKNOWN_MEMBER = "UNKNOWN_MEMBER"
    STALE_GENERATION = "STALE_GENERATION"
    GROUP_IN_USE = "GROUP_IN_USE"
    PRODUCER_FENCED = "PRODUCER_FENCED"
    OUT_OF_SEQUENCE = "OUT_OF_SEQUENCE"
    UNKNOWN_STAGE = "UNKNOWN_STAGE"
    UNKNOWN_TRANSACTION = "UNKNOWN_TRANSACTION"
    TRANSACTION_UNFINISHED = "TRANSACTION_UNFINISHED"
    PARTITION_HELD = "PARTITION_HELD"
    LIMIT_REACHED = "LIMIT_REACHED"
    DISK_FULL = "DISK_FULL"
    LOG_POISONED = "LOG_POISONED"
    LOG_DAMAGED = "LOG_DAMAGED"
    TOO_MANY_CONNECTIONS = "TOO_MANY_CONNECTIONS"
    RECOVERING = "RECOVERING"
    SHUTTING_DOWN = "SHUTTING_DOWN"
    NOT_OWNER = "NOT_OWNER"
    JOURNAL_LOST = "JOURNAL_LOST"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    FORBIDDEN = "FORBIDDEN"
    QUOTA_EXCEEDED = "QUOTA_EXCEEDED"
    INTERNAL = "INTERNAL"


class BrokerError(Exception):
    """A request that the broker refuses, with words for the person who sent it."""


class PeerMisbehaved(BrokerError):
    """The peer's bytes are not a frame; nothing after them can be trusted."""


class BadRequest(BrokerError):
    """The frame is whole but what it asks for makes no sense."""


class UnknownType(BrokerError):
    """A frame type that this broker does not know."""


class BadName(BrokerError):
    """A name that breaks the rule for names."""


class UnknownTopic(BrokerError):
    """No topic of that name."""

    def __init__(self, topic: str) -> None:
        super().__init__(f"there is no topic {topic!r}; create it with: qb create-topic {topic}")
        self.topic = topic


class TopicExists(BrokerError):
    """A topic of that name is there already."""

    def __init__(self, topic: str) -> None:
        super().__init__(f"topic {topic!r} exists already")
        self.topic = topic


class TopicInUse(BrokerError):
    """The topic has subscriptions and the request was to delete it only if it had none."""


class UnknownPartition(BrokerError):
    """The topic has no such partition."""

    def __init__(self, topic: str, partition: object, count: int) -> None:
        valid = "0" if count == 1 else f"0 to {count - 1}"
        super().__init__(f"topic {topic!r} has no partition {partition}; it has {valid}")
        self.topic, self.partition, self.count = topic, partition, count


class MessageTooLarge(BrokerError):
    """A body, or the properties beside it, are longer than this broker accepts."""

    def __init__(self, text: str, size: int, limit: int) -> None:
        super().__init__(f"{text} over this broker's limit of {limit}")
        self.size, self.limit = size, limit


class OffsetOutOfRange(BrokerError):
    """The offset is not, or is no longer, in the log."""

    def __init__(self, topic: str, partition: int, offset: int, first: int, end: int) -> None:
        super().__init__(f"{topic}/{partition} has no offset {offset}; it holds {first} up to {end}")
        self.topic, self.partition, self.offset, self.first, self.end = topic, partition, offset, first, end


class UnknownSubscription(BrokerError):
    """No subscription of that name."""

    def __init__(self, subscription_id: str) -> None:
        super().__init__(
            f"there is no subscription {subscription_id!r}; create it with: "
            f"qb create-subscription {subscription_id} TOPIC"
        )
        self.subscription_id = subscription_id


class SubscriptionExists(BrokerError):
    """A subscription of that name is there already, and differs from the one asked for."""


class SubscriptionBusy(BrokerError):
    """The subscription's mode allows no further subscriber."""


class NotJoined(BrokerError):
    """This connection has not joined that subscription."""


class UnknownGroup(BrokerError):
    """The group has no members; where tools ask, it has no committed offsets either."""

    def __init__(self, group: str) -> None:
        super().__init__(f"Group not found: {group!r}; the first who joins makes it")
        self.group = group


class UnknownMember(BrokerError):
    """The group has no such member, or has it no more."""

    def __init__(self, group: str, member: str) -> None:
        super().__init__(f"{member!r} is not a member of group {group!r}, or was silent for too long: join again")
        self.group, self.member = group, member


class StaleGeneration(BrokerError):
    """The group has moved on since the generation that the request speaks of."""


class GroupInUse(BrokerError):
    """The group has members, and the request was for one without."""

    def __init__(self, group: str, members: int) -> None:
        super().__init__(f"group {group!r} is in use: stop its members first, of which there are {members}")
        self.group, self.members = group, members


class ProducerFenced(BrokerError):
    """A newer connection publishes as this producer, or the secret of the producer is not the one given."""


class OutOfSequence(BrokerError):
    """A publish number that is too old, or was used for another message; or staged messages that leave a gap."""


class UnknownStage(BrokerError):
    """The stage is not open, or it does not hold what the commit says it does."""


class UnknownTransaction(BrokerError):
    """No transaction of that id is open, unfinished or remembered."""

    def __init__(self, transaction: str) -> None:
        super().__init__(f"there is no transaction {transaction!r}; see: qb transactions list")
        self.transaction = transaction


class TransactionUnfinished(BrokerError):
    """The transaction is decided, but its messages could not be copied yet: the broker tries again by itself."""


class PartitionHeld(BrokerError):
    """The partition takes no other transaction until an unfinished one is finished; nothing was committed."""


class LimitReached(BrokerError):
    """The broker has as many of something as its settings allow; the text names the setting."""

    def __init__(self, text: str, limit: int, setting: str) -> None:
        super().__init__(f"{text}: the limit is {limit} ({setting})")
        self.limit, self.setting = limit, setting


class DiskFull(BrokerError):
    """No room to store the message; nothing of it was kept."""


class LogPoisoned(BrokerError):
    """An fsync failed, so nothing is accepted for this log until its file has been proved anew."""


class LogDamaged(BrokerError):
    """Stored bytes are not what was written; the log is not served."""

    def __init__(self, file: str, position: int, what: str) -> None:
        super().__init__(f"{file} is damaged at byte {position}: {what}; see: qb verify")
        self.file, self.position, self.what = file, position, what


class TooManyConnections(BrokerError):
    """The broker has as many peers as it allows."""


class Recovering(BrokerError):
    """The broker is starting."""


class ShuttingDown(BrokerError):
    """The broker is about to exit."""


class NotOwner(BrokerError):
    """Another broker owns the cell: `owner` is its address, empty if it is not known."""

    def __init__(self, cell: str, owner: str, epoch: int) -> None:
        where = f"connect to {owner}" if owner else "which one does is not known just now; try again"
        super().__init__(f"this broker does not own the cell {cell}: {where}")
        self.cell, self.owner, self.epoch = cell, owner, epoch


class JournalLost(BrokerError):
    """The journal of the cell has lost records: no broker answers before it is restored."""

    def __init__(self, cell: str, why: str) -> None:
        super().__init__(f"the cell {cell} is stopped: {why}; see Repair in docs/CLUSTER.md")
        self.cell = cell


class Unauthenticated(BrokerError):
    """The peer has not logged in, or with a token that is of no user."""


class Forbidden(BrokerError):
    """The peer's user may not do that."""


class QuotaExceeded(BrokerError):
    """The peer's user, or its address, has or uses as much as it may; it may ask again after `retry_after` seconds."""

    def __init__(self, text: str, retry_after: float) -> None:
        super().__init__(text)
        self.retry_after = retry_after


class Internal(BrokerError):
    """A fault of the broker: logged with its traceback, answered without details."""


class Reply(NamedTuple):
    """How one kind of failure is answered."""

    code: Code
    survives: bool  # does the peer's connection live on?
    http_status: int


REPLIES: dict[type[BrokerError], Reply] = {
    PeerMisbehaved: Reply(Code.BAD_FRAME, False, 400),
    BadRequest: Reply(Code.BAD_REQUEST, True, 400),
    UnknownType: Reply(Code.UNKNOWN_TYPE, True, 400),
    BadName: Reply(Code.BAD_NAME, True, 400),
    UnknownTopic: Reply(Code.UNKNOWN_TOPIC, True, 404),
    TopicExists: Reply(Code.TOPIC_EXISTS, True, 409),
    TopicInUse: Reply(Code.TOPIC_IN_USE, True, 409),
    UnknownPartition: Reply(Code.UNKNOWN_PARTITION, True, 404),
    MessageTooLarge: Reply(Code.MESSAGE_TOO_LARGE, True, 413),
    OffsetOutOfRange: Reply(Code.OFFSET_OUT_OF_RANGE, True, 416),
    UnknownSubscription: Reply(Code.UNKNOWN_SUBSCRIPTION, True, 404),
    SubscriptionExists: Reply(Code.SUBSCRIPTION_EXISTS, True, 409),
    SubscriptionBusy: Reply(Code.SUBSCRIPTION_BUSY, True, 409),
    NotJoined: Reply(Code.NOT_JOINED, True, 409),
    UnknownGroup: Reply(Code.UNKNOWN_GROUP, True, 404),
    UnknownMember: Reply(Code.UNKNOWN_MEMBER, True, 409),
    StaleGeneration: Reply(Code.STALE_GENERATION, True, 409),
    GroupInUse: Reply(Code.GROUP_IN_USE, True, 409),
    ProducerFenced: Reply(Code.PRODUCER_FENCED, False, 409),
    OutOfSequence: Reply(Code.OUT_OF_SEQUENCE, True, 409),
    UnknownStage: Reply(Code.UNKNOWN_STAGE, True, 409),
    UnknownTransaction: Reply(Code.UNKNOWN_TRANSACTION, True, 404),
    PartitionHeld: Reply(Code.PARTITION_HELD, True, 503),
    LimitReached: Reply(Code.LIMIT_REACHED, True, 429),
    TransactionUnfinished: Reply(Code.TRANSACTION_UNFINISHED, True, 503),
    DiskFull: Reply(Code.DISK_FULL, True, 507),
    LogPoisoned: Reply(Code.LOG_POISONED, True, 503),
    LogDamaged: Reply(Code.LOG_DAMAGED, True, 503),
    TooManyConnections: Reply(Code.TOO_MANY_CONNECTIONS, False, 503),
    Recovering: Reply(Code.RECOVERING, False, 503),
    ShuttingDown: Reply(Code.SHUTTING_DOWN, False, 503),
    NotOwner: Reply(Code.NOT_OWNER, True, 503),
    JournalLost: Reply(Code.JOURNAL_LOST, True, 503),
    Unauthenticated: Reply(Code.UNAUTHENTICATED, False, 401),
    Forbidden: Reply(Code.FORBIDDEN, True, 403),
    QuotaExceeded: Reply(Code.QUOTA_EXCEEDED, True, 429),
    Internal: Reply(Code.INTERNAL, False, 500),
}
