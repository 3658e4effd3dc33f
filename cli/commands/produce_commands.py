"""A producer configured by a file: a line a message, or a file a message."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from itertools import groupby

from qb.cli.terminal.command import Command, CommandFailed, Outcome, UsageError, counted, of_kind, reason
from qb.cli.terminal.input_lines import open_source, portions
from qb.cli.terminal.programs import add_config, configured, configured_broker, ended_by_signals, required
from qb.clients.blocking.client import BrokerClient
from qb.clients.protocol.client_errors import BrokerUnavailable, PublishFailed, QBError
from qb.core.settings import ProgramConfig
from qb.core.wire.value_kinds import SECONDS, Kind

RATE = Kind("a number of messages a second", SECONDS.convert).within(0.001)
Entry = tuple[str | None, bytes]  # key and body


class _Ended(BaseException):
    """A signal has come while input was waited for."""


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--file", metavar="FILE", action="append", help="read this, may be given several times; - is standard input"
    )
    parser.add_argument("--whole", action="store_true", help="a file is one message, not a line")
    parser.add_argument("--rate", metavar="N", type=of_kind(RATE), help="messages a second at most")
    parser.add_argument("--key-separator", metavar="TEXT", help="a line is a key, this text, and the message")
    add_config(parser, "producer")


def _produce(args: argparse.Namespace) -> Outcome:
    config = configured(args)
    topic = required(config.producer.topic, "producer.topic", "--topic")
    if args.whole and args.key_separator is not None:
        raise UsageError("--whole and --key-separator exclude each other: a whole file has no key")
    timeout = config.producer.timeout_ms
    producer = _LineProducer(config, topic, args.rate)
    with configured_broker(args, config, timeout and timeout / 1000) as client, ended_by_signals(producer.end):
        producer.run(client, _entries(args))
    data = {"topic": topic, "messages": producer.stored}
    return Outcome(data, f"stored {counted(producer.stored, 'message')} in topic '{topic}'")


def _entries(args: argparse.Namespace) -> Iterator[list[Entry]]:
    """Yield what there is to send, as it arrives."""
    for path in args.file or ["-"]:
        with open_source(path) as source:
            if args.whole:
                yield [(None, source.read())]
                continue
            for lines in portions(source):
                yield [_entry(line, args.key_separator) for line in lines]


def _entry(line: bytes, separator: str | None) -> Entry:
    if separator is None:
        return None, line
    key, found, body = line.partition(separator.encode())
    return (key.decode(errors="replace"), body) if found else (None, line)


class _LineProducer:
    """Sends entries in batches; a signal ends it when what was read is stored."""

    def __init__(self, config: ProgramConfig, topic: str, rate: float | None) -> None:
        self._config, self._topic, self._rate = config, topic, rate
        self._ended = self._reading = False
        self.stored = 0

    def end(self) -> None:
        """End after what was read; for signal handlers."""
        self._ended = True
        if self._reading:
            raise _Ended

    def run(self, client: BrokerClient, entries: Iterator[list[Entry]]) -> None:
        """Send all entries. Raises CommandFailed, which says how much is stored."""
        most, started = self._config.producer.batch_size, time.monotonic()
        if self._rate is not None:
            most = max(1, min(most, int(self._rate / 10)))  # ten times a second, or for each message
        while portion := self._next(entries):
            for batch in self._batches(portion, most):
                self._keep_pace(started)
                self._send(client, batch)

    def _batches(self, portion: list[Entry], most: int) -> Iterator[list[Entry]]:
        """Cut what was read; in a partition that is given, a batch has one key."""
        one_key = self._config.producer.partition is not None
        for _, run in groupby(portion, lambda entry: entry[0] if one_key else None):
            entries = list(run)
            yield from (entries[start : start + most] for start in range(0, len(entries), most))

    def _next(self, entries: Iterator[list[Entry]]) -> list[Entry]:
        """Return what was read; nothing at the end of input, or after a signal."""
        found: list[Entry] = []
        try:
            self._reading = True
            while not found and not self._ended:
                found = next(entries)
        except (_Ended, StopIteration):
            pass
        finally:
            self._reading = False
        return found

    def _keep_pace(self, started: float) -> None:
        if self._rate is not None:
            time.sleep(max(0.0, started + self.stored / self._rate - time.monotonic()))

    def _send(self, client: BrokerClient, batch: list[Entry]) -> None:
        retries = self._config.broker.max_retries
        while batch:
            try:
                self._publish(client, batch)
                done = len(batch)
            except PublishFailed as error:
                done = len(error.stored)
                if not isinstance(error.__cause__, BrokerUnavailable) or not retries:
                    self.stored += done
                    raise self._failed(error.__cause__ or error) from error
                retries -= 1
            except QBError as error:
                raise self._failed(error) from error
            self.stored, batch = self.stored + done, batch[done:]

    def _publish(self, client: BrokerClient, batch: list[Entry]) -> None:
        partition, bodies, keys = (
            self._config.producer.partition,
            [body for _, body in batch],
            [key for key, _ in batch],
        )
        if partition is not None:
            client.publish_many(self._topic, bodies, partition, keys[0])
        else:
            client.publish_many(self._topic, bodies, keys=keys if any(keys) else None)

    def _failed(self, error: BaseException) -> CommandFailed:
        return CommandFailed(f"{reason(error)}\nknown to be stored: {counted(self.stored, 'message')}")


COMMANDS = (
    Command(
        "produce",
        "publish lines or files as a program that a YAML file configures",
        "produce --config config/producer.yaml --file events.log",
        _arguments,
        _produce,
    ),
)
