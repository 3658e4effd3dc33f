"""What a client can see of a data directory: everything that a broker on it answers."""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import trio

from qb.core.broker.fetching import FetchLimits
from qb.core.broker.message_broker import MessageBroker
from qb.core.rights.needs import Needs
from qb.core.rights.principals import UNRESTRICTED
from qb.core.settings import ServerSettings, Settings, StorageSettings
from qb.core.wire.errors import BrokerError
from qb.core.wire.frames import Frame, decode_frame
from qb.doors.binary.methods import call
from qb.server import serve
from qb.storage.local_engine import LocalEngine

DEADLINE = 60.0
# They differ each time that one asks, or say how something is stored.
TIMES = ("idle", "oldest_unacked_age", "timestamp", "bytes", "segments")


class ClientState(NamedTuple):
    """The answers, by what was asked about, and what was logged for the operator."""

    answers: dict[str, Any]
    logged: list[str]


class Asking:
    """A peer that may ask for everything."""

    principal = UNRESTRICTED

    def check(self, needs: Needs, arguments: object, action: str) -> None:
        pass


class Refused(NamedTuple):
    """A request that was refused."""

    code: str
    text: str


class _LoggedLines(logging.Handler):
    """Keeps what is logged as a warning or worse."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info:
            text += f"\nTraceback: {record.exc_info[1]!r}"
        self.lines.append(text)


def look(root: Path, stages: Sequence[Any] = ()) -> ClientState:
    """Open a directory as the broker does and ask about everything. Raises CannotOpen, and whatever is a fault.

    `stages` are committed at the end: by default those that the broker lists.
    """
    logged = _LoggedLines()
    logger = logging.getLogger("qb")
    before = logger.level, logger.propagate
    logger.addHandler(logged)
    logger.setLevel(logging.WARNING)
    logger.propagate = False
    try:
        settings = Settings(server=ServerSettings(port=0), storage=StorageSettings(data_dir=str(root)))
        engine = LocalEngine.open(settings.storage)
        try:
            answers = trio.run(_ask, settings, engine, stages)
        finally:
            engine.close()
    finally:
        logger.removeHandler(logged)
        logger.setLevel(before[0])
        logger.propagate = before[1]
    return ClientState(answers, [_anonymous(root, line) for line in [*engine.recovery.notes, *logged.lines]])


def _anonymous(root: Path, text: str) -> str:
    return text.replace(str(root), "DIR")


async def _ask(settings: Settings, engine: LocalEngine, stages: Sequence[Any]) -> dict[str, Any]:
    """Run a broker without doors and ask it."""
    ready, stop, answers = trio.Event(), trio.Event(), {}
    brokers: list[MessageBroker] = []

    def started(broker: MessageBroker) -> None:
        brokers.append(broker)
        ready.set()

    with trio.fail_after(DEADLINE):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(serve, settings, engine, [], stop, started=started))
            await ready.wait()
            answers = await _answers(brokers[0], stages)
            stop.set()
    return answers


async def _answers(broker: MessageBroker, stages: Sequence[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}

    async def ask(about: str, method: str, **arguments: Any) -> Any:
        answer = await _answer(call(broker, method, msgspec.json.encode(arguments), Asking()))
        found[about] = answer if isinstance(answer, Refused) else _timeless(msgspec.json.decode(answer))
        return found[about]

    topics = [topic["topic"] for topic in await ask("topics", "list_topics")]
    for topic in topics:
        await _ask_topic(broker, topic, found)
    for each in await ask("subscriptions", "list_subscriptions"):
        name = each["subscription_id"]
        await ask(f"subscription/{name}", "describe_subscription", subscription_id=name)
        await ask(f"dead letters/{name}", "dead_letters", subscription_id=name, max=100)
    for each in await ask("groups", "list_groups"):
        await ask(f"group/{each['group']}", "describe_group", group=each["group"])
        await ask(f"offsets/{each['group']}", "committed_offsets", group=each["group"])
    listed = await ask("transactions", "list_transactions")
    for name in ("committed", "numbered", "decided", "staged", "staged-too"):
        await ask(f"transaction/{name}", "show_transaction", transaction=name)
    for stage in sorted(stages or listed["stages"], key=itemgetter("transaction")):
        named = [{"stage": stage["stage"], "messages": STAGED}]
        arguments = {"transaction": stage["transaction"], "number": stage["number"], "stages": named}
        await ask(f"commit/{stage['transaction']}", "commit_transaction", **arguments)
    for topic in topics:
        for partition in range(broker.topics.get(topic).partitions):
            found[f"topic/{topic}/{partition}/next"] = _append(broker, topic, partition)
    return found


STAGED = 36  # messages of a stage that directories.py makes


async def _ask_topic(broker: MessageBroker, topic: str, found: dict[str, Any]) -> None:
    description = await _answer(broker.topics.describe(topic))
    found[f"topic/{topic}"] = _timeless(msgspec.to_builtins(description))
    for partition in range(broker.topics.get(topic).partitions):
        log = broker.engine.log(topic, partition)
        found[f"topic/{topic}/{partition}/messages"] = await _answer(_messages(broker, topic, partition))
        found[f"topic/{topic}/{partition}/producers"] = list(log.ranges())
        times = [await _answer(broker.offsets(topic, partition, time_ms)) for time_ms in (0, 2**50)]
        found[f"topic/{topic}/{partition}/times"] = times


async def _messages(broker: MessageBroker, topic: str, partition: int) -> list[Frame]:
    """Return every stored message; those that the start copied have the time of the start."""
    log = broker.engine.log(topic, partition)
    at, messages = log.first_offset, list[Frame]()
    while at < log.end_offset:
        chunk = await broker.fetch(topic, partition, at, FetchLimits())
        messages += [decode_frame(chunk.data, position) for position in chunk.positions]
        at = chunk.next_offset
    return [each._replace(timestamp=0) if each.body.startswith(b"decided") else each for each in messages]


def _append(broker: MessageBroker, topic: str, partition: int) -> Any:
    """Return which offset the next message gets."""
    log = broker.engine.log(topic, partition)
    try:
        log.check_writable()
    except BrokerError as error:
        return Refused(type(error).__name__, str(error))
    return log.next_offset


async def _answer(asked: Awaitable[Any]) -> Any:
    try:
        return await asked
    except BrokerError as error:
        return Refused(type(error).__name__, str(error))


def _timeless(answer: Any) -> Any:
    """Return an answer without what differs each time that one asks."""
    if isinstance(answer, dict):
        return {name: _timeless(value) for name, value in answer.items() if name not in TIMES}
    if isinstance(answer, list):
        return [_timeless(value) for value in answer]
    return re.sub(r"^/\S+/(?=topics/|staged/)", "DIR/", answer) if isinstance(answer, str) else answer
