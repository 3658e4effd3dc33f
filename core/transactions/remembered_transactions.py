"""What is remembered of decided transactions: one metadata entry for each id, and a limited number of them."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence

import trio

from qb.core.settings import ServerSettings
from qb.core.wire.errors import BadRequest, BrokerError, LimitReached, UnknownTransaction
from qb.core.wire.names import check_transaction
from qb.storage.engine import Metadata, StageLog
from qb.storage.stages.transaction_records import KEY, CommittedTransaction, TransactionRecord

logger = logging.getLogger(__name__)
HOUR_MS = 3_600_000
FORGOTTEN_AT_ONCE = 100  # one in so many is forgotten when there is no room, so that few commits wait for it


class RememberedTransactions:
    """Every decision that is known. Entries are read from the metadata when they are asked for, not held twice."""

    def __init__(self, metadata: Metadata, settings: ServerSettings) -> None:
        self._metadata = metadata
        self._settings = settings
        known = [TransactionRecord.decode(entry.value) for entry in metadata.under(KEY).values()]
        self.unfinished_at_start = [each for each in known if each.receipt is None]
        self._ids = len(known)
        finished = [each.receipt for each in known if each.receipt and each.number is None]
        # When each finished id without number was committed; the oldest first, which are forgotten first.
        self._forgettable = deque(sorted((each.timestamp, each.transaction) for each in finished))
        self._forgets_early = False
        self._shown: dict[str, TransactionRecord] = {}  # ends that must not be written yet, by id
        self._ended: dict[str, TransactionRecord] = {}  # ends that are not durable yet, by id

    def __len__(self) -> int:
        return self._ids

    def get(self, transaction: str) -> TransactionRecord | None:
        """Return what is known of an id."""
        if known := self._shown.get(transaction) or self._ended.get(transaction):
            return known
        entry = self._metadata.get(KEY + transaction)
        return entry and TransactionRecord.decode(entry.value)

    def receipt(self, transaction: str) -> CommittedTransaction:
        """Return the receipt of a finished transaction. Raises UnknownTransaction."""
        known = self.get(transaction)
        if known is None or known.receipt is None:
            raise UnknownTransaction(transaction)
        return known.receipt

    def is_decided(self, transaction: str, number: int | None) -> bool:
        """Say whether a transaction is committed. Raises BadName, BadRequest."""
        check_transaction(transaction)
        if number is not None and not 0 <= number < 2**63:
            raise BadRequest(f"a transaction's number must be from 0 to 2**63 - 1, not {number}")
        known = self.get(transaction)
        return known is not None and known.covers(number)

    def is_over(self, stage: StageLog) -> bool:
        """Say whether the transaction of a stage is decided, so that nothing more can be staged for it."""
        known = self.get(stage.transaction)
        return known is not None and known.ends(stage)

    # Writing

    async def write(self, records: Sequence[TransactionRecord]) -> None:
        """Remember decisions as write_then() does. Raises BrokerError, and then nothing has changed."""
        written = trio.Event()
        errors: list[BrokerError | None] = []

        def done(error: BrokerError | None) -> None:
            errors.append(error)
            written.set()

        self.write_then(records, done)
        await written.wait()
        if errors[0] is not None:
            raise errors[0]

    def write_then(self, records: Sequence[TransactionRecord], done: Callable[[BrokerError | None], None]) -> None:
        """Remember decisions, durably, in one record of the metadata; then `done` is called with what went wrong.

        The write begins in this step of the event loop.
        """
        self._forget_ends()
        new = {record.key for record in records if self._metadata.get(record.key) is None}

        def written(error: BrokerError | None) -> None:
            try:
                if error is None:
                    self._ids += len(new)
                    for record in records:
                        self._ended.pop(record.transaction, None)
                        self._note_end(record)
            finally:  # whatever we could not note: the decision is made, or is not
                done(error)

        self._metadata.put_then({record.key: record.encoded for record in records}, written)

    def show_end(self, record: TransactionRecord) -> None:
        """Remember the receipt of a decided transaction in memory. The decision stays on disk until end() is called."""
        self._shown[record.transaction] = record

    def end(self, record: TransactionRecord) -> None:
        """Remember the receipt of a decided transaction: at once in memory, soon on disk. Raises nothing.

        The decision is durable, and so is every message: a start that does not find the receipt makes it again.
        """
        self._shown.pop(record.transaction, None)
        self._ended[record.transaction] = record
        self._metadata.put_soon(record.key, record.encoded)
        self._note_end(record)

    def _note_end(self, record: TransactionRecord) -> None:
        if record.receipt and record.number is None:
            self._forgettable.append((record.receipt.timestamp, record.transaction))

    def _forget_ends(self) -> None:
        """Forget the ends that the metadata has by now; they become durable in their order."""
        for transaction, record in list(self._ended.items()):
            entry = self._metadata.get(record.key)
            if entry is None or entry.value != record.encoded:
                break
            del self._ended[transaction]

    def check_room(self, transaction: str) -> None:
        """Raises LimitReached if nothing can be forgotten to make room for an id that is not known."""
        most = self._settings.max_remembered_transactions
        if self._ids >= most and not self._forgettable and self._metadata.get(KEY + transaction) is None:
            text = f"transaction {transaction!r} cannot be remembered, since so many ids with numbers are"
            raise LimitReached(text, most, "QB_MAX_REMEMBERED_TRANSACTIONS")

    def has_room(self, count: int) -> bool:
        """Say whether there may be so many more ids without forgetting any."""
        return self._ids + count <= self._settings.max_remembered_transactions

    async def make_room(self, count: int) -> None:
        """Forget the oldest ids without number if there are too many ids for `count` more."""
        most = self._settings.max_remembered_transactions
        if self.has_room(count):
            return
        if not self._forgets_early:
            self._forgets_early = True
            logger.warning("committed transactions are forgotten early: QB_MAX_REMEMBERED_TRANSACTIONS is %d", most)
        surplus = self._ids - most + max(count, most // FORGOTTEN_AT_ONCE)
        await self._forget(min(surplus, len(self._forgettable)))

    async def forget_old(self, now_ms: int) -> None:
        """Forget the ids without number that have been known for as long as the settings say."""
        before = now_ms - self._settings.transaction_memory_hours * HOUR_MS
        old = 0
        while old < len(self._forgettable) and self._forgettable[old][0] < before:
            old += 1
        await self._forget(old)

    async def _forget(self, count: int) -> None:
        """Forget the oldest; those that cannot be forgotten now are tried again the next time."""
        chosen = [self._forgettable.popleft() for _ in range(count)]
        if not chosen:
            return
        try:
            await self._metadata.delete(*(KEY + transaction for _, transaction in chosen))
        except BrokerError as error:
            self._forgettable.extendleft(reversed(chosen))
            logger.warning("old transactions could not be forgotten: %s", error)
        else:
            self._ids -= len(chosen)
            for _, transaction in chosen:
                self._ended.pop(transaction, None)
