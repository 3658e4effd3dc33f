"""Every way a call to the broker can end badly, as a type.

A refusal carries the broker's own code and text; its type has the name of that code (`Code` in qb.core.wire.errors),
which is all that connects the two. The text is the same at all doors, and where it names a command, str() names the
call that does the same in a program; the command line shows the text alone. The other types say what is known about the
fate of the call: BrokerUnavailable means that nothing was sent, PublishUncertain that the broker may or may not have
stored it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from qb.core.wire.errors import Code


class QBError(Exception):
    """Anything that this library raises about the broker.

    Attributes:
        code: The code of the refusal that is behind it, if one is; that is its `__cause__` then.
    """

    code: str | None = None  # of the refusal that is behind it, if one is; that is its `__cause__` then


class BrokerUnavailable(QBError):
    """No broker could be reached, so nothing was sent; the text says what to check."""


class RequestTimedOut(QBError):
    """The broker did not answer in time; it may or may not have carried out the request."""


class ConnectionLost(QBError):
    """The connection ended before the answer came; the broker may or may not have carried out the request."""


class PublishFailed(QBError):
    """A row of publishes did not succeed as a whole; the cause is in `__cause__`.

    Args:
        text: What happened.
        index: The first body that is not known to be stored; kept as an attribute.
        stored: The offsets of all bodies that are stored; kept as an attribute.
    """

    def __init__(self, text: str, index: int = 0, stored: Sequence[int] = ()) -> None:
        super().__init__(text, index, stored)
        self.index, self.stored = index, stored

    def __str__(self) -> str:
        return str(self.args[0])


class PublishUncertain(PublishFailed):
    """The answer was lost: what was published may or may not be stored."""


class BufferFull(QBError):
    """A producer holds as many bytes as it may; the message was not taken."""


class UsedAfterFork(QBError):
    """It was opened before os.fork() by the parent process, whose it still is; nothing was sent. Open another one."""


class SubscriptionRemoved(QBError):
    """The subscription that this client had joined was deleted, or its topic was."""


class RequestRefused(QBError):
    """The broker refused a request.

    Args:
        code: A stable name for programs, such as "UNKNOWN_TOPIC"; kept as an attribute.
        text: A sentence for people; kept as an attribute.
    """

    code: str
    in_a_program: ClassVar[str] = ""  # the call that does what the command in the text does

    def __init__(self, code: str, text: str) -> None:
        super().__init__(code, text)
        self.code, self.text = code, text

    def __str__(self) -> str:
        if not self.in_a_program or ": qb " not in self.text:
            return self.text
        return f"{self.text} (in a program: client.{self.in_a_program})"


class BadRequest(RequestRefused):
    """What was asked for makes no sense."""


class BadName(RequestRefused):
    """A name that breaks the rule for names."""


class UnknownTopic(RequestRefused):
    """No topic of that name."""

    in_a_program = "create_topic(topic)"


class TopicExists(RequestRefused):
    """A topic of that name is there already."""


class TopicInUse(RequestRefused):
    """The topic has subscriptions and was to be deleted only if it had none."""


class UnknownPartition(RequestRefused):
    """The topic has no such partition."""


class MessageTooLarge(RequestRefused):
    """The message is longer than this broker accepts."""


class OffsetOutOfRange(RequestRefused):
    """The offset is not, or is no longer, in the log, which holds `first` up to `end` (None: not said)."""

    first: int | None = None
    end: int | None = None


class UnknownSubscription(RequestRefused):
    """No subscription of that name."""

    in_a_program = "create_subscription(subscription_id, topic)"


class SubscriptionExists(RequestRefused):
    """A subscription of that name is there already, and differs from the one asked for."""


class SubscriptionBusy(RequestRefused):
    """The subscription has no place for one more subscriber."""


class NotJoined(RequestRefused):
    """This client has not joined that subscription."""


class UnknownGroup(RequestRefused):
    """The group has neither members nor committed offsets."""


class UnknownMember(RequestRefused):
    """The group does not count this consumer as a member, or does so no more."""


class StaleGeneration(RequestRefused):
    """The group has moved on: what was to be committed belongs to another member now."""


class GroupInUse(RequestRefused):
    """The group has members, and the request was for one without."""


class ProducerFenced(RequestRefused):
    """Another connection took over this client's producer id, or the broker does not know its secret."""


class OutOfSequence(RequestRefused):
    """A retry came too late to be compared, or its number was used for another message; or a stage misses a part."""


class UnknownStage(RequestRefused):
    """The stage is not open (any more), or does not hold what the commit says; nothing was published."""


class UnknownTransaction(RequestRefused):
    """The broker knows no transaction of that id."""

    in_a_program = "list_transactions()"


class TransactionUnfinished(RequestRefused):
    """The transaction is committed, but its messages cannot be shown yet: the broker tries again by itself."""

    in_a_program = "show_transaction(transaction_id)"


class PartitionHeld(RequestRefused):
    """Another transaction on the same partition is unfinished; nothing was committed: commit again later."""


class LimitReached(RequestRefused):
    """The broker has as many of something as its settings allow; the text names the setting."""


class DiskFull(RequestRefused):
    """The broker has no room to store the message; nothing of it was kept."""


class LogPoisoned(RequestRefused):
    """An fsync failed at the broker; that log takes nothing until its file has been proved anew."""


class LogDamaged(RequestRefused):
    """Stored bytes are not what was written; the broker does not serve that log."""


class TooManyConnections(RequestRefused):
    """The broker has as many peers as it allows."""


class Recovering(RequestRefused):
    """The broker is starting: connect again."""


class ShuttingDown(RequestRefused):
    """The broker is about to exit."""


class NotOwner(RequestRefused):
    """Another broker of the cluster owns the cell: `owner` is its address, empty if it is not known."""

    owner: str = ""


class JournalLost(RequestRefused):
    """The journal of the cluster's cell has lost records: nothing is answered before an operator has restored it."""


class Unauthenticated(RequestRefused):
    """The client has not logged in, or with a token that is of no user."""


class Forbidden(RequestRefused):
    """The client's user may not do that."""


class QuotaExceeded(RequestRefused):
    """The client's user has or uses as much as it may; `retry_after` is in seconds (None: not said)."""

    retry_after: float | None = None


def _code_named(name: str) -> Code:
    """Return the code of a type: its name in capitals."""
    return Code[re.sub(r"(?<!^)(?=[A-Z])", "_", name).upper()]


_TYPES: dict[str, type[RequestRefused]] = {_code_named(type.__name__): type for type in RequestRefused.__subclasses__()}


def without_calls(text: str) -> str:
    """Return the text of an error without the calls that it names: for the command line."""
    return re.sub(r" \(in a program: client\.\w+\([^()]*\)\)", "", text)


def refusal(code: str, text: str) -> RequestRefused:
    """Return the narrowest type for a code on the wire; codes without one of their own stay RequestRefused."""
    return _TYPES.get(code, RequestRefused)(code, text)
