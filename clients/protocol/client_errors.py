"""Every way a call to the broker can end badly, as a type.

A refusal carries the broker's own code and text. The other types say what is known about the fate of the call:
BrokerUnavailable means that nothing was sent, PublishUncertain that the broker may or may not have stored it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from qb.core.wire.errors import Code


class QBError(Exception):
    """Anything that this library raises about the broker."""

    code: str | None = None  # of the refusal that is behind it, if one is; that is its `__cause__` then


class BrokerUnavailable(QBError):
    """No broker could be reached, so nothing was sent; the text says what to check."""


class RequestTimedOut(QBError):
    """The broker did not answer in time; it may or may not have carried out the request."""


class ConnectionLost(QBError):
    """The connection ended before the answer came; the broker may or may not have carried out the request."""


class PublishFailed(QBError):
    """A row of publishes did not succeed as a whole; the cause is in `__cause__`.

    `index` is the first body that is not known to be stored, `stored` holds the offsets of all that are.
    """

    def __init__(self, text: str, index: int = 0, stored: Sequence[int] = ()) -> None:
        super().__init__(text, index, stored)
        self.index, self.stored = index, stored

    def __str__(self) -> str:
        return str(self.args[0])


class PublishUncertain(PublishFailed):
    """The answer was lost: what was published may or may not be stored."""


class UsedAfterFork(QBError):
    """It was opened before os.fork() by the parent process, whose it still is; nothing was sent. Open another one."""


class SubscriptionRemoved(QBError):
    """The subscription that this client had joined was deleted, or its topic was."""


class RequestRefused(QBError):
    """The broker said no. `code` is stable and for programs, `text` is for people."""

    wire_code: ClassVar[Code | None] = None
    code: str

    def __init__(self, code: str, text: str) -> None:
        super().__init__(code, text)
        self.code, self.text = code, text

    def __str__(self) -> str:
        return self.text


class BadRequest(RequestRefused):
    """What was asked for makes no sense."""

    wire_code = Code.BAD_REQUEST


class BadName(RequestRefused):
    """A name that breaks the rule for names."""

    wire_code = Code.BAD_NAME


class UnknownTopic(RequestRefused):
    """No topic of that name."""

    wire_code = Code.UNKNOWN_TOPIC


class TopicExists(RequestRefused):
    """A topic of that name is there already."""

    wire_code = Code.TOPIC_EXISTS


class TopicInUse(RequestRefused):
    """The topic has subscriptions and was to be deleted only if it had none."""

    wire_code = Code.TOPIC_IN_USE


class UnknownPartition(RequestRefused):
    """The topic has no such partition."""

    wire_code = Code.UNKNOWN_PARTITION


class MessageTooLarge(RequestRefused):
    """The message is longer than this broker accepts."""

    wire_code = Code.MESSAGE_TOO_LARGE


class OffsetOutOfRange(RequestRefused):
    """The offset is not, or is no longer, in the log, which holds `first` up to `end` (None: not told)."""

    wire_code = Code.OFFSET_OUT_OF_RANGE
    first: int | None = None
    end: int | None = None


class UnknownSubscription(RequestRefused):
    """No subscription of that name."""

    wire_code = Code.UNKNOWN_SUBSCRIPTION


class SubscriptionExists(RequestRefused):
    """A subscription of that name is there already, and differs from the one asked for."""

    wire_code = Code.SUBSCRIPTION_EXISTS


class SubscriptionBusy(RequestRefused):
    """The subscription has no place for one more subscriber."""

    wire_code = Code.SUBSCRIPTION_BUSY


class NotJoined(RequestRefused):
    """This client has not joined that subscription."""

    wire_code = Code.NOT_JOINED


class UnknownGroup(RequestRefused):
    """Nobody is in a group of that name, and nothing is committed for it."""

    wire_code = Code.UNKNOWN_GROUP


class UnknownMember(RequestRefused):
    """The group does not count this consumer as a member, or does so no more."""

    wire_code = Code.UNKNOWN_MEMBER


class StaleGeneration(RequestRefused):
    """The group has moved on: what was to be committed belongs to another member now."""

    wire_code = Code.STALE_GENERATION


class GroupInUse(RequestRefused):
    """The group has members, and the request was for one without."""

    wire_code = Code.GROUP_IN_USE


class ProducerFenced(RequestRefused):
    """Another connection took over this client's producer id, or the broker does not know its secret."""

    wire_code = Code.PRODUCER_FENCED


class OutOfSequence(RequestRefused):
    """A retry came too late to tell, or its number was used for another message; or a stage misses a part."""

    wire_code = Code.OUT_OF_SEQUENCE


class UnknownStage(RequestRefused):
    """The stage is not open (any more), or does not hold what the commit says; nothing was published."""

    wire_code = Code.UNKNOWN_STAGE


class UnknownTransaction(RequestRefused):
    """The broker knows no transaction of that id."""

    wire_code = Code.UNKNOWN_TRANSACTION


class TransactionUnfinished(RequestRefused):
    """The transaction is committed, but its messages cannot be shown yet: the broker tries again by itself."""

    wire_code = Code.TRANSACTION_UNFINISHED


class PartitionHeld(RequestRefused):
    """Another transaction on the same partition is unfinished; nothing was committed: commit again later."""

    wire_code = Code.PARTITION_HELD


class LimitReached(RequestRefused):
    """The broker has as many of something as its settings allow; the text names the setting."""

    wire_code = Code.LIMIT_REACHED


class DiskFull(RequestRefused):
    """The broker has no room to store the message; nothing of it was kept."""

    wire_code = Code.DISK_FULL


class LogPoisoned(RequestRefused):
    """An fsync failed at the broker; that log takes nothing more until the broker restarts."""

    wire_code = Code.LOG_POISONED


class LogDamaged(RequestRefused):
    """Stored bytes are not what was written; the broker does not serve that log."""

    wire_code = Code.LOG_DAMAGED


class TooManyConnections(RequestRefused):
    """The broker has as many peers as it allows."""

    wire_code = Code.TOO_MANY_CONNECTIONS


class ShuttingDown(RequestRefused):
    """The broker is about to exit."""

    wire_code = Code.SHUTTING_DOWN


_TYPES: dict[str, type[RequestRefused]] = {
    type.wire_code: type for type in RequestRefused.__subclasses__() if type.wire_code is not None
}


def refusal(code: str, text: str) -> RequestRefused:
    """Return the narrowest type for a code on the wire; codes without one of their own stay RequestRefused."""
    return _TYPES.get(code, RequestRefused)(code, text)
