"""Dead letters: messages that a subscription has given up, stored in a topic of their own.

A dead letter is the message with its own properties, and beside them `dead.subscription`, `dead.topic`,
`dead.partition`, `dead.offset`, `dead.attempts` and `dead.reason`. Nothing is removed from a log, so the metadata says
which letters were retried or purged.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from qb.core.pacing import portions
from qb.core.wire.frames import MAX_PROPERTIES, RESERVED, Frame, decode_frame, encode_properties
from qb.storage.engine import Metadata, PartitionLog

READ_BYTES = 1 << 20
BLOCK = 1_000  # letters that share an entry of the metadata, which is rewritten when one of them is done
_NUMBER = re.compile(r"[0-9]{1,18}\Z")


class DeadLetterView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A dead letter as tools see it. One that is malformed says in `malformed` what is wrong with it."""

    number: int  # its offset in the dead-letter topic
    topic: str
    partition: int  # -1 in a malformed one
    offset: int  # -1 in a malformed one
    attempts: int
    reason: str
    time_ms: int
    key: str | None
    value: str  # the body as text; what is not UTF-8 is shown replaced
    malformed: str | None = None  # why it does not say which message it is about; it can be purged, not retried


class SettledLetters(msgspec.Struct, frozen=True):
    """Which letters were retried or purged: all below `floor`, and the listed ones."""

    floor: int = 0
    numbers: frozenset[int] = frozenset()

    def __contains__(self, number: int) -> bool:
        return number < self.floor or number in self.numbers

    def with_(self, numbers: Iterable[int]) -> SettledLetters:
        """Return this with more of them done."""
        floor, left = self.floor, set(self.numbers) | {number for number in numbers if number >= self.floor}
        while floor in left:
            left.discard(floor)
            floor += 1
        return SettledLetters(floor, frozenset(left))


class _SavedLetters(msgspec.Struct, frozen=True):
    """What the metadata keeps of SettledLetters under one key; the numbers stand in blocks under keys of their own."""

    floor: int = 0
    numbers: frozenset[int] = frozenset()  # all of them, as brokers before wrote it
    blocks: list[int] = []  # which blocks have numbers


def _key(subscription_id: str, block: int | None = None) -> str:
    return f"dead/{subscription_id}" if block is None else f"dead/{subscription_id}/{block}"


def properties_of(
    frame: bytes, subscription_id: str, topic: str, partition: int, attempts: int, reason: str
) -> tuple[dict[str, str], Frame]:
    """Return the properties of a dead letter about this stored frame, and the frame decoded.

    The message's own properties are left out if the letter would have too many bytes of properties with them.
    """
    message = decode_frame(frame)
    about = {
        "dead.subscription": subscription_id,
        "dead.topic": topic,
        "dead.partition": str(partition),
        "dead.offset": str(message.sequence_number),
        "dead.attempts": str(attempts),
        "dead.reason": reason.replace("\0", "\\0"),
    }
    own = {name: value for name, value in message.properties.items() if name not in RESERVED and name not in about}
    if len(encode_properties({**about, **own})) > MAX_PROPERTIES - 1_000:
        own = {}
    return {**about, **own}, message


class DeadLetterReader:
    """Reads letters, and notes which are done."""

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata

    def done(self, subscription_id: str) -> SettledLetters:
        """Return which letters of this subscription are done."""
        saved = self._saved(subscription_id)
        blocks = [self._metadata.get(_key(subscription_id, block)) for block in saved.blocks]
        return SettledLetters(saved.floor, saved.numbers.union(*(entry.value for entry in blocks if entry)))

    async def note_done(self, subscription_id: str, numbers: Iterable[int]) -> None:
        """Note durably that these are retried or purged; what is written are the blocks that have changed."""
        before, new = self._saved(subscription_id), set(numbers)
        done = self.done(subscription_id).with_(new)
        blocks: dict[int, list[int]] = {}
        for number in sorted(done.numbers):
            blocks.setdefault(number // BLOCK, []).append(number)
        changed = {number // BLOCK for number in new | before.numbers} | set(before.blocks) - blocks.keys()
        values: dict[str, Any] = {_key(subscription_id, block): blocks.get(block) for block in changed}
        values[_key(subscription_id)] = {"floor": done.floor, "blocks": list(blocks)}
        await self._metadata.put_all(values)

    def keys(self, subscription_id: str) -> list[str]:
        """Return every key under which the metadata keeps which letters of a subscription are done."""
        blocks = self._saved(subscription_id).blocks
        return [_key(subscription_id), *(_key(subscription_id, block) for block in blocks)]

    def _saved(self, subscription_id: str) -> _SavedLetters:
        entry = self._metadata.get(_key(subscription_id))
        return msgspec.convert(entry.value, _SavedLetters) if entry else _SavedLetters()

    async def read(self, subscription_id: str, log: PartitionLog, most: int) -> list[DeadLetterView]:
        """Return up to `most` letters of this subscription that are not done, oldest first."""
        done = self.done(subscription_id)
        letters: list[DeadLetterView] = []
        at = max(log.first_offset, done.floor)
        while at < log.end_offset and len(letters) < most:
            chunk = await log.read(at, READ_BYTES)
            async for portion in portions(chunk.positions):
                frames = [decode_frame(chunk.data, position) for position in portion]
                found = [_letter(frame) for frame in frames if _belongs(frame, subscription_id)]
                letters += [letter for letter in found if letter.number not in done]
            at = chunk.next_offset
        return letters[:most]


def _belongs(frame: Frame, subscription_id: str) -> bool:
    return frame.properties.get("dead.subscription") == subscription_id


def _letter(frame: Frame) -> DeadLetterView:
    """Return a dead letter as tools see it. It may be malformed: any peer can publish to a chosen dead_letter_topic."""
    about = frame.properties
    numbers = {name: _number(about.get(f"dead.{name}", "")) for name in ("partition", "offset", "attempts")}
    missing = [f"dead.{name}" for name in ("topic", "reason") if f"dead.{name}" not in about]
    wrong = missing + [f"dead.{name}" for name, number in numbers.items() if number is None]
    return DeadLetterView(
        number=frame.sequence_number,
        topic=about.get("dead.topic", ""),
        partition=-1 if wrong else numbers["partition"] or 0,
        offset=-1 if wrong else numbers["offset"] or 0,
        attempts=numbers["attempts"] or 0,
        reason=about.get("dead.reason", ""),
        time_ms=frame.timestamp,
        key=about.get("key"),
        value=frame.body.decode(errors="replace"),
        malformed=f"{' and '.join(wrong)} missing or not a number" if wrong else None,
    )


def _number(text: str) -> int | None:
    """Return a number as the broker writes one, or None."""
    return int(text) if _NUMBER.match(text) else None
