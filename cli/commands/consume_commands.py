"""A consumer: a member of a group, or of one partition alone, configured by flags or a file."""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from threading import Event

from qb.cli.commands.pull_commands import START
from qb.cli.terminal.command import Command, Outcome, UsageError, of_kind
from qb.cli.terminal.message_output import show_message
from qb.cli.terminal.programs import add_config, configured, configured_broker, ended_by_signals, required
from qb.clients.blocking.client import BrokerClient
from qb.clients.protocol.client_errors import BrokerUnavailable, ConnectionLost
from qb.clients.protocol.message import Message
from qb.core.settings import ConsumerConfig, ProgramConfig
from qb.core.wire.harmless_text import one_line
from qb.core.wire.value_kinds import INTEGER

WORD_OF: dict[int, str | int] = {-2: "earliest", -1: "latest"}
CONFIGURED_FORMAT = "[{topic}:{partition}:{offset}] {value}"


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--group", metavar="GROUP")
    parser.add_argument("--topic", metavar="TOPIC", action="append", help="may be given several times")
    parser.add_argument(
        "--from",
        metavar="OFFSET",
        dest="start",
        type=of_kind(START),
        help="where a group begins that has committed nothing: earliest, latest or an offset (earliest)",
    )
    parser.add_argument("--count", metavar="N", type=of_kind(INTEGER.within(1)), help="stop after so many (never)")
    parser.add_argument(
        "--format", metavar="TEXT", type=_format, help=f"how to print a message ('{CONFIGURED_FORMAT}' with --config)"
    )
    add_config(parser, "consumer", frozenset({"topic", "group_id"}))


def _format(text: str) -> str:
    try:
        text.format(topic="", partition=0, offset=0, key="", value="", timestamp=0)
    except (KeyError, IndexError, ValueError):
        names = "{topic} {partition} {offset} {key} {value} {timestamp}"
        raise argparse.ArgumentTypeError(f"must be text with {names}, not {text!r}") from None
    return text


def _consume(args: argparse.Namespace) -> Outcome:
    """Print messages; what was printed is committed."""
    given = {"earliest": -2, "latest": -1}.get(args.start, args.start)
    config = configured(args, consumer__group_id=args.group, consumer__offset=given)
    topics = args.topic or [required(config.consumer.topic, "consumer.topic", "--topic")]
    if config.consumer.partition is None:
        required(config.consumer.group_id, "consumer.group_id", "--group, or --partition for one partition alone")
        _consume_group(args, config, topics)
    elif len(topics) > 1:
        raise UsageError("--partition is of one topic: give --topic once")
    else:
        with configured_broker(args, config) as client:
            reader = _PartitionReader(args, client, topics[0], config.consumer.partition, config.consumer)
            with ended_by_signals(reader.end):
                reader.run()
    return Outcome(None)


def _show(args: argparse.Namespace, message: Message) -> None:
    form = args.format or (CONFIGURED_FORMAT if args.config is not None else None)
    if form is None or args.json:
        show_message(message, as_json=args.json, raw=args.raw)
        return
    harmless = one_line if sys.stdout.isatty() and not args.raw else str
    text = form.format(
        topic=message.topic,
        partition=message.partition,
        offset=message.offset,
        key=harmless(message.key or ""),
        value=harmless(message.body.decode(errors="backslashreplace")),
        timestamp=message.timestamp,
    )
    print(text, flush=True)


def _consume_group(args: argparse.Namespace, config: ProgramConfig, topics: list[str]) -> None:
    """As a member of a group: its partitions are given out by the broker."""
    shown, about = 0, config.consumer
    consumer = configured_broker(args, config).consumer(
        str(about.group_id),
        topics,
        start=WORD_OF.get(about.offset, about.offset),
        auto_commit=about.auto_commit,
        auto_commit_interval_ms=about.auto_commit_interval_ms,
        max_bytes=about.max_bytes,
        max_wait_ms=about.max_wait_ms,
        min_bytes=about.min_bytes,
    )
    with ended_by_signals(consumer.stop), consumer:
        for message in consumer:
            _show(args, message)
            shown += 1
            if shown == args.count:
                if about.auto_commit:
                    consumer.commit()
                break


class _PartitionReader:
    """Reads one partition from where its group has committed, or from an offset; commits if it has a group."""

    def __init__(
        self, args: argparse.Namespace, client: BrokerClient, topic: str, partition: int, about: ConsumerConfig
    ) -> None:
        self._args, self._client, self._about = args, client, about
        self._topic, self._partition = topic, partition
        self._ended = Event()
        self._retries = 0
        self._position = self._committed = self._start()

    def end(self) -> None:
        """End after the message in hand; for signal handlers."""
        self._ended.set()

    def _start(self) -> int:
        group = self._about.group_id
        for each in self._client.committed_offsets(group, self._topic) if group is not None else ():
            if each["partition"] == self._partition:
                return int(each["offset"])
        kept = self._client.offsets(self._topic, self._partition)
        return {-2: kept.first, -1: kept.next}.get(self._about.offset, self._about.offset)

    def run(self) -> None:
        """Print messages until a signal, or as many as are wanted."""
        about, shown, commit_at = self._about, 0, time.monotonic() + self._about.auto_commit_interval_ms / 1000
        while not self._ended.is_set() and shown != self._args.count:
            for message in self._fetch():
                _show(self._args, message)
                self._position, shown = message.offset + 1, shown + 1
                if self._ended.is_set() or shown == self._args.count:
                    break
            if time.monotonic() >= commit_at:
                self._commit()
                commit_at = time.monotonic() + about.auto_commit_interval_ms / 1000
        self._commit()

    def _fetch(self) -> list[Message]:
        """Return what follows; nothing, after a pause, if there is nothing."""
        about = self._about
        fetch = partial(self._client.fetch, self._topic, self._partition, self._position)
        try:
            wait = about.max_wait_ms / 1000
            found = list(fetch(max_bytes=about.max_bytes, max_wait=wait, min_bytes=about.min_bytes))
        except ConnectionLost:  # the next one waits for the broker
            found = []
        if not found:
            self._ended.wait(about.poll_interval_ms / 1000)
        return found

    def _commit(self) -> None:
        group = self._about.group_id
        if group is not None and self._about.auto_commit and self._position != self._committed:
            try:
                self._client.commit_offsets(group, [(self._topic, self._partition, self._position)])
                self._committed = self._position
            except (ConnectionLost, BrokerUnavailable):
                if self._ended.is_set():
                    raise


COMMANDS = (
    Command(
        "consume",
        "print the messages of topics, as a member of a group or of one partition",
        "consume --group billing --topic orders",
        _arguments,
        _consume,
    ),
)
