"""Making, changing, explaining and removing subscriptions."""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
import trio

from qb.core.pacing import AT_ONCE, must_give_way, portions
from qb.core.positions import resolve
from qb.core.push.active_subscription import ActiveSubscription
from qb.core.push.dead_letters import DeadLetterReader, DeadLetterView, properties_of
from qb.core.push.delivery_rounds import DeliveryRounds
from qb.core.push.saved_subscriptions import SavedSubscription, all_keys, key_of, load, value_of
from qb.core.push.subscription_listing import description_of, summaries_of, summary_of, totals_of
from qb.core.rights.known_users import KnownUsers
from qb.core.settings import ServerSettings
from qb.core.subscriptions.push_decisions import DeadLetterDecision
from qb.core.subscriptions.shared_room import SharedRoom
from qb.core.subscriptions.snapshot import SubscriptionSnapshot
from qb.core.subscriptions.subscription import Subscription
from qb.core.subscriptions.subscription_options import SubscriptionOptions, parse_options
from qb.core.subscriptions.subscription_report import SubscriptionTotals
from qb.core.wire.clock import now_ms
from qb.core.wire.errors import (
    BadName,
    BadRequest,
    LimitReached,
    SubscriptionExists,
    TopicInUse,
    UnknownSubscription,
    UnknownTopic,
)
from qb.core.wire.names import LONGEST, check_name, check_subscription
from qb.storage.engine import Engine, PartitionLog

log = logging.getLogger("qb.subscriptions")
ALL = 1_000_000  # letters that one retry or purge finds
NAMED = 10_000  # letters that one of them names
KEYS_AT_ONCE = 5 * AT_ONCE  # of the metadata that one transaction removes, or those of one subscription

MakeTopic = Callable[[str, str], Awaitable[None]]  # unless it exists; its name, and the user that it counts for
# AppendService.store_dead_letter(): topic, body, key, properties.
Store = Callable[[str, bytes, str | None, Mapping[str, str]], Awaitable[object]]


class SubscriptionManager:
    """Every subscription of the broker."""

    def __init__(
        self, engine: Engine, settings: ServerSettings, make_topic: MakeTopic, store: Store, users: KnownUsers
    ) -> None:
        self._engine = engine
        self._users = users
        self._most, self._most_cursors = settings.max_subscriptions, settings.max_cursors
        self._make_topic = make_topic
        self._store = store
        self._dead_letters = DeadLetterReader(engine.metadata)
        self._changing = trio.Lock()  # held while subscriptions, and topics below them, come or go
        self._shared = SharedRoom(settings.max_open_messages)
        self.deliveries = DeliveryRounds(engine.metadata, self._store_dead_letter)
        self._shared.has_room = self.deliveries.has_room

    async def restore(self) -> None:
        """Put what is kept into service, before any door opens. Others run in between."""
        for saved in await load(self._engine.metadata):
            if must_give_way():
                await trio.lowlevel.checkpoint()
            await self._restore(saved)

    async def _restore(self, saved: SavedSubscription) -> None:
        known = [partition.partition for partition in saved.snapshot.partitions]
        if saved.topic not in self._engine.topics():
            self._forget(saved.name, saved.topic, known)
            return
        restored = await self._reopened(saved.name, saved.snapshot)
        logs = self._logs(saved.topic)
        for partition in logs.keys() - set(known):
            restored.add_partition(partition, 0)  # it was added, and the broker stopped before this was saved
        self.deliveries.add(
            ActiveSubscription(saved.name, saved.topic, saved.created_ms, restored, logs, saved.made_by)
        )

    async def _reopened(self, name: str, snapshot: SubscriptionSnapshot) -> Subscription:
        """Return the subscription of a snapshot. Others run meanwhile: all that windows hold may be open."""
        subscription = Subscription.restore(name, snapshot, random.Random(), self._shared)
        try:
            async for _ in portions(subscription.reopen(snapshot, trio.current_time())):
                pass
        except BaseException:
            subscription.close()
            raise
        return subscription

    def _forget(self, name: str, topic: str, partitions: list[int]) -> None:
        """Remove what is kept of a subscription whose topic is gone."""
        log.warning("subscription %r is removed: its topic %r is gone", name, topic)
        for key in (*all_keys(name, partitions), *self._dead_letters.keys(name)):
            self._engine.metadata.put_soon(key, None)

    def _logs(self, topic: str) -> dict[int, PartitionLog]:
        known = self._engine.topics().get(topic)
        if known is None:
            raise UnknownTopic(check_name("topic", topic))
        return {partition: self._engine.log(topic, partition) for partition in range(known.partitions)}

    def active(self, subscription_id: str) -> ActiveSubscription:
        """Return a subscription in service. Raises UnknownSubscription, BadName."""
        active = self.deliveries.get(subscription_id)
        if active is None:
            raise UnknownSubscription(check_name("subscription", subscription_id))
        return active

    # Making and removing

    async def create(
        self,
        subscription_id: str,
        topic: str,
        start_offset: int | str = 0,
        options: Mapping[str, Any] | None = None,
        made_by: str = "",
    ) -> dict[str, Any]:
        """Make a subscription; returns when it is durable. The same one again is no error.

        It counts in the quotas of the user `made_by`. Raises BadName, BadRequest, UnknownTopic, LimitReached,
        QuotaExceeded, SubscriptionExists if it exists and differs.
        """
        check_name("subscription", subscription_id)
        wanted = parse_options(options or {})
        if wanted.dead_letter_topic is not None:
            check_name("topic", wanted.dead_letter_topic)
        async with self._changing:
            logs = self._logs(topic)
            known = self.deliveries.get(subscription_id)
            if known is not None:
                return self._same(known, topic, wanted)
            check_subscription(subscription_id)
            self._check_room(made_by, len(logs))
            starts = {partition: await resolve(log, start_offset) for partition, log in logs.items()}
            made = Subscription(subscription_id, wanted, starts, random.Random(), self._shared)
            return await self._add(ActiveSubscription(subscription_id, topic, now_ms(), made, logs, made_by))

    def _same(self, known: ActiveSubscription, topic: str, wanted: SubscriptionOptions) -> dict[str, Any]:
        if known.topic != topic or known.subscription.options != wanted:
            raise SubscriptionExists(
                f"subscription {known.name!r} exists on topic {known.topic!r} with other options; "
                "delete it first or choose another name"
            )
        return summary_of(known)

    async def _add(self, active: ActiveSubscription) -> dict[str, Any]:
        """Put a new one into service, durably; to be called with the lock held, so that its topic stays.

        Raises LimitReached, QuotaExceeded.
        """
        self._check_room(active.made_by, len(active.logs))
        with trio.CancelScope(shield=True):  # it is made as a whole, even if the caller is cancelled
            value = value_of(active.topic, active.created_ms, active.subscription.snapshot(), active.made_by)
            await self._engine.metadata.put(key_of(active.name), value)
        self.deliveries.add(active)
        self.deliveries.add_partitions(active, self._logs(active.topic))  # the topic may have grown meanwhile
        return summary_of(active)

    def _check_room(self, made_by: str, cursors: int) -> None:
        """Raises LimitReached, QuotaExceeded if there is no room for one more subscription on so many partitions."""
        if len(self.deliveries) >= self._most:
            raise LimitReached(
                f"the broker has {len(self.deliveries)} subscriptions", self._most, "QB_MAX_SUBSCRIPTIONS"
            )
        self._check_cursors(cursors)
        if made_by:
            made = sum(active.made_by == made_by for active in self.deliveries)
            self._users.of_user(made_by).check("subscriptions", made)

    def check_growth(self, topic: str, partitions: int) -> None:
        """Raises LimitReached if the subscriptions of a topic cannot have so many partitions more each."""
        self._check_cursors(partitions * len(self.on_topic(topic)))

    def _check_cursors(self, more: int) -> None:
        known = sum(len(active.logs) for active in self.deliveries)
        if more and known + more > self._most_cursors:
            raise LimitReached(
                f"all subscriptions of the broker together have {known} partitions, and {more} more are too many",
                self._most_cursors,
                "QB_MAX_CURSORS",
            )

    async def delete(self, subscription_id: str) -> dict[str, Any]:
        """Remove a subscription and notify its subscribers. Raises UnknownSubscription."""
        async with self._changing:
            await self._remove([self.active(subscription_id)], "the subscription was deleted")
        return {}

    async def delete_topic(self, topic: str, if_unused: bool) -> None:
        """Remove a topic and every subscription of it. Raises UnknownTopic, TopicInUse."""
        async with self._changing:
            self._logs(topic)
            used_by = self.on_topic(topic)
            if if_unused and used_by:
                names = ", ".join(sorted(active.name for active in used_by))
                raise TopicInUse(f"topic {topic!r} has subscriptions: {names}")
            with trio.CancelScope(shield=True):
                await self._remove(used_by, f"topic {topic!r} was deleted")
                await self._engine.delete_topic(topic)

    async def _remove(self, subscriptions: list[ActiveSubscription], reason: str) -> None:
        """Take subscriptions out of service, durably: each as a whole, and no more at once than a step can."""
        keys: list[str] = []
        with trio.CancelScope(shield=True):
            for active in subscriptions:
                self.deliveries.remove(active, reason)
                keys += [*all_keys(active.name, active.logs), *self._dead_letters.keys(active.name)]
                if len(keys) >= KEYS_AT_ONCE:
                    await self._engine.metadata.delete(*keys)
                    keys = []
            if keys:
                await self._engine.metadata.delete(*keys)

    def partitions_added(self, topic: str) -> None:
        """Serve the new partitions of a topic from their beginning."""
        logs = self._logs(topic)
        for active in self.on_topic(topic):
            self.deliveries.add_partitions(active, logs)

    async def fork(self, subscription_id: str, new_id: str, made_by: str = "") -> dict[str, Any]:
        """Make a subscription that stands exactly where another one stands. Raises SubscriptionExists, BadName."""
        check_subscription(new_id)
        async with self._changing:
            source = self.active(subscription_id)
            if self.deliveries.get(new_id) is not None:
                raise SubscriptionExists(f"subscription {new_id!r} exists already")
            snapshot = source.subscription.copy().forked()
            forked = await self._reopened(new_id, snapshot)
            for partition in source.logs.keys() - {each.partition for each in snapshot.partitions}:
                forked.add_partition(partition, 0)  # it was added meanwhile
            return await self._add(ActiveSubscription(new_id, source.topic, now_ms(), forked, source.logs, made_by))

    # Looking

    def on_topic(self, topic: str) -> list[ActiveSubscription]:
        """Return the subscriptions of a topic."""
        return [active for active in self.deliveries if active.topic == topic]

    async def list_all(self, topic: str | None = None) -> list[dict[str, Any]]:
        """Return all subscriptions, or those of one topic, by name."""
        return await summaries_of(self._sorted(topic))

    def _sorted(self, topic: str | None = None) -> list[ActiveSubscription]:
        chosen = (active for active in self.deliveries if topic is None or active.topic == topic)
        return sorted(chosen, key=lambda active: active.name)

    async def totals(
        self, topic: str | None = None, most: int | None = None
    ) -> list[tuple[ActiveSubscription, SubscriptionTotals]]:
        """Return all subscriptions, those of one topic, or the first so many, by name, in numbers of all partitions."""
        return await totals_of(self._sorted(topic)[:most])

    async def list_totals(self, topic: str | None = None) -> list[dict[str, Any]]:
        """Return what list_all() does, with the numbers of all partitions together and the fault of each."""
        return [
            {**msgspec.structs.asdict(totals), **summary_of(active), "fault": active.fault}
            for active, totals in await self.totals(topic)
        ]

    async def describe(self, subscription_id: str) -> dict[str, Any]:
        """Return a subscription in numbers. Raises UnknownSubscription."""
        return await description_of(self.active(subscription_id))

    async def explain(self, subscription_id: str, offset: int, partition: int = 0) -> dict[str, str]:
        """Say why a message is where it is. Raises UnknownSubscription, BadRequest."""
        active = self.active(subscription_id)
        if partition not in active.logs:
            raise BadRequest(f"topic {active.topic!r} has no partition {partition}")
        end = active.logs[partition].end_offset
        text = active.subscription.explain(partition, offset, end, trio.current_time())
        return {"text": f"the subscription stands still: {active.fault}; {text}" if active.fault else text}

    # Changing

    async def pause(self, subscription_id: str) -> dict[str, Any]:
        """Deliver nothing until resume()."""
        return await self._changed(self.active(subscription_id), Subscription.pause)

    async def resume(self, subscription_id: str) -> dict[str, Any]:
        """Deliver again."""
        return await self._changed(self.active(subscription_id), Subscription.resume)

    async def seek(self, subscription_id: str, to: int | str, partition: int | None = None) -> dict[str, Any]:
        """Begin anew at an offset or a time, in one partition or in all. Raises BadRequest."""
        active = self.active(subscription_id)
        chosen = active.logs if partition is None else {partition: active.logs.get(partition)}
        targets: dict[int, int] = {}
        for number, log in chosen.items():
            if log is None:
                raise BadRequest(f"topic {active.topic!r} has no partition {number}")
            targets[number] = await resolve(log, to)

        def move(subscription: Subscription) -> None:
            for number, offset in targets.items():
                subscription.seek(number, offset)
            self.deliveries.read_again(active, targets)

        return await self._changed(active, move)

    async def _changed(self, active: ActiveSubscription, change: Callable[[Subscription], None]) -> dict[str, Any]:
        """Change a subscription durably, and look what it decides now."""
        change(active.subscription)
        await self.deliveries.save(active)
        self.deliveries.serve_soon(active)
        return summary_of(active)

    # Dead letters

    async def _store_dead_letter(self, active: ActiveSubscription, letter: DeadLetterDecision, frame: bytes) -> None:
        properties, message = properties_of(
            frame, active.name, active.topic, letter.partition, letter.attempts, letter.reason
        )
        target = active.subscription.options.dead_letters_of(active.name)
        if len(target) > LONGEST:  # its id is from before there was a limit on ids
            raise BadName(
                f"subscription {active.name!r} has no dead-letter topic, since its id is too long to have the default "
                "one: replace it by one with the option dead_letter_topic"
            )
        if target not in self._engine.topics():
            async with self._changing:
                active.check_in_service()
                await self._make_topic(target, active.made_by)
        await self._store(target, message.body, message.properties.get("key"), properties)

    async def dead_letters(self, subscription_id: str, max: int = 100) -> list[DeadLetterView]:
        """Return the letters that are neither retried nor purged, oldest first."""
        active = self.active(subscription_id)
        target = active.subscription.options.dead_letters_of(active.name)
        if target not in self._engine.topics():
            return []
        return await self._dead_letters.read(active.name, self._engine.log(target, 0), max)

    async def retry_dead_letters(self, subscription_id: str, numbers: list[int] | None = None) -> dict[str, int]:
        """Deliver dead-lettered messages again, to this subscription alone; returns how many.

        Letters that are malformed are left where they are. Raises BadRequest if one is named, or one that is not there.
        """
        active = self.active(subscription_id)
        chosen = await self._chosen(subscription_id, numbers)
        malformed = [letter for letter in chosen if letter.malformed or letter.partition not in active.logs]
        if malformed and numbers is not None:
            raise BadRequest(f"dead letter {malformed[0].number} is malformed and cannot be retried; purge it")
        letters = [letter for letter in chosen if letter not in malformed] if malformed else chosen
        async for portion in portions(letters):
            for letter in portion:
                active.subscription.retry(letter.partition, letter.offset, letter.key)
        await self.deliveries.save(active)
        active.check_in_service()
        await self._dead_letters.note_done(active.name, [letter.number for letter in letters])
        self.deliveries.serve_soon(active)
        return {"retried": len(letters)}

    async def purge_dead_letters(self, subscription_id: str, numbers: list[int] | None = None) -> dict[str, int]:
        """Forget dead letters."""
        active = self.active(subscription_id)
        letters = await self._chosen(subscription_id, numbers)
        active.check_in_service()
        await self._dead_letters.note_done(subscription_id, [letter.number for letter in letters])
        return {"purged": len(letters)}

    async def _chosen(self, subscription_id: str, numbers: list[int] | None) -> list[DeadLetterView]:
        letters = await self.dead_letters(subscription_id, ALL)
        if numbers is None:
            return letters
        if len(numbers) > NAMED:
            raise BadRequest(f"{len(numbers)} dead letters are too many for one request: name at most {NAMED}, or all")
        known = {letter.number: letter for letter in letters}
        missing = [number for number in numbers if number not in known]
        if missing:
            raise BadRequest(f"subscription {subscription_id!r} has no dead letter {missing[0]}")
        return [known[number] for number in numbers]
