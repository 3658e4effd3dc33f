"""Messages as they come: join a subscription, follow a topic, run a worker."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from qb.cli.commands.subscription_commands import POSITION, position
from qb.cli.terminal.command import Command, CommandFailed, Outcome, UsageError, broker, of_kind
from qb.cli.terminal.message_output import show_message
from qb.cli.terminal.output import log_to_standard_error
from qb.clients.blocking.client import BrokerClient
from qb.clients.blocking.subscribing.subscriber import Subscriber
from qb.clients.protocol.client_errors import BrokerUnavailable
from qb.clients.protocol.message import Message
from qb.core.wire.value_kinds import INTEGER

LOOK_EVERY = 0.2  # seconds; a wait without end would not notice Ctrl-C on every platform
FETCH_WAIT = 10.0  # seconds that a fetch of `tail` waits for the next message
log = logging.getLogger("qb.worker")


def _join_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("subscription", metavar="SUBSCRIPTION")
    _receive_arguments(parser)
    parser.add_argument(
        "--exec",
        metavar="CMD",
        dest="command",
        help="run this for each message, its body on standard input; exit code 0 acks it",
    )


def _receive_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--count", metavar="N", type=of_kind(INTEGER.within(1)), help="stop after so many (never)")


def _join(args: argparse.Namespace) -> Outcome:
    handle = _executing(args.command) if args.command else _printing(args)
    with broker(args) as client:
        _receive(
            args.count,
            handle,
            lambda handler: client.subscribe_to_subscription(args.subscription, handler, window=args.count),
        )
    return Outcome(None)


def _subscribe_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("topic", metavar="TOPIC")
    parser.add_argument(
        "--offset", metavar="POSITION", type=position, default=0, help=f"where to begin: {POSITION} (0)"
    )
    _receive_arguments(parser)


def _subscribe(args: argparse.Namespace) -> Outcome:
    with broker(args) as client:
        _receive(args.count, _printing(args), lambda handler: client.subscribe(args.topic, args.offset, handler))
    return Outcome(None)


def _receive(count: int | None, handle: Callable[[Message], None], join: Callable[[Any], Subscriber]) -> None:
    """Handle messages until `count` of them were, or for ever. Raises BrokenPipeError when the output is not read."""
    handled, enough, unread = 0, threading.Event(), threading.Event()

    def handler(message: Message) -> None:
        nonlocal handled
        try:
            handle(message)
        except BrokenPipeError:
            unread.set()
            enough.set()
            threading.Event().wait()  # until we exit: to return would ack the message, to raise blame it
        handled += 1
        if handled == count:
            subscriber.unsubscribe()  # by its own handler: returns at once
            enough.set()

    ready = threading.Event()

    def when_joined(message: Message) -> None:
        ready.wait()  # `subscriber` is bound a moment after the first message may come
        handler(message)

    subscriber = join(when_joined)
    ready.set()
    try:
        while not enough.is_set() and not subscriber.wait(LOOK_EVERY):
            pass
    finally:
        subscriber.unsubscribe(0 if unread.is_set() else None)
    if unread.is_set():
        raise BrokenPipeError


def _printing(args: argparse.Namespace) -> Callable[[Message], None]:
    return lambda message: show_message(message, as_json=args.json, raw=args.raw)


def _executing(command: str) -> Callable[[Message], None]:
    """Return a handler that runs a shell command; whatever it prints is printed."""

    def run(message: Message) -> None:
        facts = {
            "MESSAGE_TOPIC": message.topic,
            "MESSAGE_PARTITION": str(message.partition),
            "MESSAGE_OFFSET": str(message.offset),
            "MESSAGE_KEY": message.key or "",
            "MESSAGE_ATTEMPT": str(message.attempt),
        }
        ended = subprocess.run(command, shell=True, input=message.body, env=os.environ | facts, check=False)
        if ended.returncode:
            raise RuntimeError(f"exit code {ended.returncode}")

    return run


def _tail_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("topic", metavar="TOPIC")
    _receive_arguments(parser)


def _tail(args: argparse.Namespace) -> Outcome:
    """Follow every partition from its end, each in a thread; no cursor is kept anywhere."""
    arrived: SimpleQueue[Message | Exception] = SimpleQueue()
    with broker(args) as client:
        for partition in range(client.describe_topic(args.topic)["partitions"]):
            Thread(target=_follow, args=(client, args.topic, partition, arrived.put), daemon=True).start()
        shown = 0
        while shown != args.count:
            message = _next(arrived)
            if isinstance(message, Exception):
                raise message
            show_message(message, as_json=args.json, raw=args.raw)
            shown += 1
    return Outcome(None)


def _follow(client: BrokerClient, topic: str, partition: int, notify: Callable[[Message | Exception], None]) -> None:
    try:
        offset: int = client.offsets(topic, partition).next
        while True:
            messages = client.fetch(topic, partition, offset, max_wait=FETCH_WAIT)
            offset = messages.next_offset
            for message in messages:
                notify(message)
    except Exception as error:  # is shown by the caller; at the end it says that the connection was closed
        notify(error)


def _next(arrived: SimpleQueue[Message | Exception]) -> Message | Exception:
    while True:
        try:
            return arrived.get(timeout=LOOK_EVERY)
        except Empty:
            continue


def _worker_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("function", metavar="MODULE:FUNCTION", help="called with each message")
    parser.add_argument("--subscription", metavar="S", required=True)
    parser.add_argument("--concurrency", metavar="N", type=of_kind(INTEGER.within(1)), default=1, help="(1)")
    parser.add_argument("--batch", action="store_true", help="the function takes a list of messages")


def _worker(args: argparse.Namespace) -> Outcome:
    """Handle messages until SIGTERM or Ctrl-C; then finish what is in hand."""
    function = load_function(args.function)
    log_to_standard_error()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with _patient(args, stop) as client:
        given: dict[str, Any] = {"batch_handler": function} if args.batch else {"handler": function}
        subscriber = client.subscribe_to_subscription(args.subscription, concurrency=args.concurrency, **given)
        log.info("%s handles '%s' of %s:%d", args.function, args.subscription, client.host, client.port)
        while not stop.wait(LOOK_EVERY) and not subscriber.wait(0):
            pass
        log.info("finishing what is in hand")
        subscriber.unsubscribe()
    return Outcome(None)


def _patient(args: argparse.Namespace, stop: threading.Event) -> BrokerClient:
    """Return a connected client, however long the broker is away."""
    client = broker(args)
    while not stop.is_set():
        try:
            client.connect()
            break
        except BrokerUnavailable as error:
            log.warning("%s", error)
            stop.wait(1.0)
    return client


def load_function(name: str) -> Callable[..., Any]:
    """Return the function that `module:function` names, with the working directory first on the path.

    Raises UsageError, CommandFailed.
    """
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise UsageError(f"{name!r} is not of the form MODULE:FUNCTION")
    sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise CommandFailed(f"there is no module {error.name!r} in {os.getcwd()}") from None
    function: Callable[..., Any] | None = getattr(module, function_name, None)
    if not callable(function):
        raise CommandFailed(f"module {module_name!r} has no function {function_name!r}")
    return function


COMMANDS = (
    Command(
        "join-subscription",
        "receive the messages of a subscription",
        "join-subscription till --exec 'jq .id'",
        _join_arguments,
        _join,
    ),
    Command(
        "subscribe",
        "receive a topic from an offset on",
        "subscribe orders --offset earliest",
        _subscribe_arguments,
        _subscribe,
    ),
    Command("tail", "follow a topic, without a cursor", "tail orders", _tail_arguments, _tail),
    Command(
        "worker",
        "run a Python function on every message, for ever",
        "worker tasks:handle --subscription till --concurrency 4",
        _worker_arguments,
        _worker,
    ),
)
