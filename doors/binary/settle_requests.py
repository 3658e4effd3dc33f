"""The body of a SETTLE: decoded, checked, and carried out in steps that can be counted."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, islice
from operator import attrgetter
from typing import Annotated

import msgspec

from qb.core.pacing import AT_ONCE, spend
from qb.core.subscriptions.subscription import Subscription
from qb.core.wire.argument_errors import in_words, why_no_json
from qb.core.wire.errors import BadRequest

MAX_BYTES = 4_194_304  # of a body: its decoding is one call that nothing can interrupt
MAX_ENTRIES = 10_000  # of all lists of a body together
MAX_BRACKETS = 20 * MAX_ENTRIES  # in a body, reasons included: each begins a list, which takes 0.1 µs to decode

Offset = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Count = Annotated[int, msgspec.Meta(ge=1, le=2**32 - 1)]


class SettledRun(msgspec.Struct, array_like=True, frozen=True):
    """Some messages of a partition: `count` offsets from `first` on, `step` apart."""

    partition: Offset
    first: Offset
    count: Count = 1
    step: Count = 1

    @property
    def offsets(self) -> range:
        return range(self.first, self.first + self.count * self.step, self.step)


class NackedMessage(msgspec.Struct, array_like=True, frozen=True):
    """A message whose handler failed."""

    partition: Offset
    offset: Offset
    delay: float | None = None
    reason: str = ""


class ExtendedRun(msgspec.Struct, array_like=True, frozen=True):
    """Messages to be held longer."""

    partition: Offset
    first: Offset
    count: Count
    step: Count
    seconds: float

    @property
    def offsets(self) -> range:
        return range(self.first, self.first + self.count * self.step, self.step)


class StartedMessage(msgspec.Struct, array_like=True, frozen=True):
    """One message."""

    partition: Offset
    offset: Offset


class SettleBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a SETTLE frame, carried out from top to bottom."""

    acks: list[SettledRun] = []
    nacks: list[NackedMessage] = []
    extend: list[ExtendedRun] = []
    extend_all: float | None = None
    started: list[StartedMessage] = []


_decoder = msgspec.json.Decoder(SettleBody)


def decode_settle(body: bytes | memoryview) -> SettleBody:
    """Return the body of a SETTLE. Raises BadRequest if it is malformed or too large."""
    if len(body) > MAX_BYTES:
        raise BadRequest(f"SETTLE: the body has {len(body)} bytes, and at most {MAX_BYTES} are taken; send several")
    if len(body) > MAX_BRACKETS and (brackets := bytes(body).count(b"[")) > MAX_BRACKETS:
        raise BadRequest(
            f"SETTLE: the body has {brackets} brackets, and at most {MAX_BRACKETS} are taken; send several"
        )
    try:
        settle = _decoder.decode(body)
    except msgspec.ValidationError as error:
        raise BadRequest(f"SETTLE: {in_words(str(error))}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"SETTLE: {why_no_json(error, body)}") from None
    entries = len(settle.acks) + len(settle.nacks) + len(settle.extend) + len(settle.started)
    if entries > MAX_ENTRIES:
        raise BadRequest(f"SETTLE: it names {entries} runs and messages, and at most {MAX_ENTRIES} are taken")
    return settle


def carry_out(subscription: Subscription, name: str, settle: SettleBody, now: float) -> Iterator[None]:
    """Carry out a SETTLE of this subscriber, one entry a step. Raises NotJoined, BadRequest."""
    for partition, group in groupby(settle.acks, key=attrgetter("partition")):
        while runs := [run.offsets for run in islice(group, AT_ONCE)]:
            yield from _ack(subscription, name, partition, runs, now)
    for nack in settle.nacks:
        subscription.nack(name, nack.partition, nack.offset, now, nack.reason, nack.delay)
        yield
    for extension in settle.extend:
        for part in subscription.portions(name, extension.partition, extension.offsets):
            subscription.extend(name, extension.partition, (part,), extension.seconds, now)
            yield
    if settle.extend_all is not None:
        for _ in subscription.extend_all(name, settle.extend_all, now):
            yield
    for message in settle.started:
        subscription.started(name, message.partition, message.offset)
        yield


def _ack(subscription: Subscription, name: str, partition: int, runs: list[range], now: float) -> Iterator[None]:
    """Ack runs of one partition: short ones together, others in portions."""
    if len(runs) > 1:
        runs = subscription.ack_scattered(name, partition, runs, now)
        yield
    for run in runs:
        for part in subscription.portions(name, partition, run):
            subscription.ack(name, partition, (part,), now)
            yield


def advance(steps: Iterator[None], subscription: Subscription, name: str) -> bool:
    """Take steps until they are done, or have cost as much as a portion; returns whether they are done."""
    before, count = subscription.looked_at(name), 0
    for _ in steps:
        count += 1
        cost = count + subscription.looked_at(name) - before
        if cost >= AT_ONCE:
            spend(cost)
            return False
    spend(count + subscription.looked_at(name) - before)
    return True
