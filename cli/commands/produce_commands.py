"""A producer configured by a file: a line a message, or a file a message."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

from qb.cli.terminal.command import Command, CommandFailed, Outcome, UsageError, counted, of_kind, reason
from qb.cli.terminal.input_lines import open_source, portions
from qb.cli.terminal.programs import add_config, configured, configured_broker, ended_by_signals, required
from qb.clients.blocking.sending.producer import Producer
from qb.clients.producing.send_batch import Delivery
from qb.core.settings import sending_options
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
    timeout, lines = config.producer.timeout_ms, _LineProducer(args.rate)
    with (
        configured_broker(args, config, timeout and timeout / 1000) as client,
        ended_by_signals(lines.end),
        client.producer(topic, **sending_options(config), on_delivery=lines.delivered) as producer,
    ):
        lines.run(producer, _entries(args))
    if lines.failure is not None:
        stored = f"known to be stored: {counted(lines.done, 'message')}"
        raise CommandFailed(f"{reason(lines.failure)}\n{stored}") from lines.failure
    done = "stored" if config.producer.required_acks != "0" else "sent, without waiting for acks,"
    data = {"topic": topic, "messages": lines.done}
    return Outcome(data, f"{done} {counted(lines.done, 'message')} in topic '{topic}'")


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
    """Sends entries; a signal, or a failure, ends it when what was read is stored."""

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._ended = self._waiting = False
        self.done = 0  # messages that are stored, or sent if acks are not waited for
        self.failure: Exception | None = None  # the first one

    def end(self) -> None:
        """End after what was read; for signal handlers."""
        self._ended = True
        if self._waiting:
            raise _Ended

    def delivered(self, delivery: Delivery) -> None:
        """Count a message; called by the producer."""
        self.failure = self.failure or delivery.error
        self.done += delivery.error is None

    def run(self, producer: Producer, entries: Iterator[list[Entry]]) -> None:
        """Send all entries, or those before a signal or a failure."""
        sent, started = 0, time.monotonic()
        while portion := self._next(entries):
            for key, body in portion:
                if self.failure is not None:
                    return
                self._keep_pace(sent, started)
                producer.send(body, key)
                sent += 1

    def _next(self, entries: Iterator[list[Entry]]) -> list[Entry]:
        """Return what was read; nothing at the end of input, or after a signal."""
        found: list[Entry] = []
        try:
            self._waiting = True
            while not found and not self._ended:
                found = next(entries)
        except (_Ended, StopIteration):
            pass
        finally:
            self._waiting = False
        return found

    def _keep_pace(self, sent: int, started: float) -> None:
        if self._rate is None:
            return
        try:
            self._waiting = True
            if not self._ended:
                time.sleep(max(0.0, started + sent / self._rate - time.monotonic()))
        except _Ended:
            pass
        finally:
            self._waiting = False


COMMANDS = (
    Command(
        "produce",
        "publish lines or files as a program that a YAML file configures",
        "produce --config config/producer.yaml --file events.log",
        _arguments,
        _produce,
    ),
)
