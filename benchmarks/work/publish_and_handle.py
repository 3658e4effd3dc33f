"""Cases 1, 2 and 3: keyed JSON published in bulk, and handled at default options, shared and by key."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from benchmarks.harness import (
    BenchmarkOptions,
    PeerMissing,
    case_name,
    judge,
    median_ratio,
    report_rate,
    scratch,
    skipped,
    timed,
)
from benchmarks.work.brokers import PEERS, Qb, WorkBroker, handle_backlog
from benchmarks.work.orders import PARSERS, lines, orders
from qb import BrokerClient

NAME = "real"
MESSAGES = 400_000
KEYS = (1, 10, 1_000, 100_000)
HANDLE_TARGETS = {
    ("msgspec", False): 4.0,
    ("msgspec", True): 6.0,
    ("json.loads", False): 2.5,
    ("json.loads", True): 3.0,
}
Rates = dict[str, list[float]]


def run(options: BenchmarkOptions) -> None:
    """Print what all brokers make of the same orders, round by round in turn."""
    with scratch(options) as directory, ExitStack() as stack:
        brokers: list[WorkBroker] = []
        kinds: tuple[type[WorkBroker], ...] = (Qb, *PEERS)
        for kind in kinds:
            place = directory / kind.name
            place.mkdir()
            try:
                brokers.append(stack.enter_context(kind.started(place)))
            except PeerMissing as missing:
                skipped(NAME, kind.name, str(missing))
        ours = brokers[0]
        assert isinstance(ours, Qb)
        _publish_and_handle(brokers, options)
        _mixed_lengths(ours.client, options)
        _key_shared(ours.client, options)


def _publish_and_handle(brokers: list[WorkBroker], options: BenchmarkOptions) -> None:
    published: Rates = {broker.name: [] for broker in brokers}
    handled: dict[tuple[str, bool], Rates] = {case: {broker.name: [] for broker in brokers} for case in HANDLE_TARGETS}
    for _ in range(options.rounds):
        for broker in brokers:
            bodies, keys = orders(max(2_000, int(options.scaled(MESSAGES) * broker.share)))
            published[broker.name].append(len(bodies) / timed(partial(broker.publish, bodies, keys)))
            for (parser, batches), rates in handled.items():
                if batches and not isinstance(broker, Qb):
                    continue  # their clients read and ack in batches already
                if isinstance(broker, Qb) or _reads_again(broker):
                    seconds = broker.handle(len(bodies), PARSERS[parser], batches=batches)
                    rates[broker.name].append(len(bodies) / seconds)
    size = sum(map(len, orders(1_000)[0])) // 1_000
    for name, rates_of in published.items():
        report_rate(NAME, case_name(name, size, "publish-keyed-json-4-partitions"), size, rates_of)
    _judge(published, "keyed JSON, publish_many", 12.0)
    for (parser, batches), rates in handled.items():
        what = f"{'batch_handler' if batches else 'handler'}-{parser}"
        for name, rates_of in rates.items():
            if rates_of:
                report_rate(NAME, case_name(name, size, what), size, rates_of)
        theirs = handled[parser, False]["redis"] if "redis" in rates else []
        _judge({"qb": rates["qb"], "redis": theirs}, what, HANDLE_TARGETS[parser, batches])


def _reads_again(broker: WorkBroker) -> bool:
    """Can a second group read what a first one has acked? Not from a queue."""
    return broker.name != "rabbitmq"


def _judge(rates: Rates, what: str, target: float) -> None:
    if rates.get("redis"):
        ratio = median_ratio(rates["qb"], rates["redis"])
        judge(NAME, f"{what}: at least {target:g} times redis", ratio, ratio >= target)


def _mixed_lengths(client: BrokerClient, options: BenchmarkOptions) -> None:
    mixed = lines(options.scaled(1_000_000))
    equal = [b"x" * 100] * len(mixed)
    rates: Rates = {"mixed": [], "equal": []}
    for number in range(options.rounds):
        for name, bodies in (("mixed", mixed), ("equal", equal)):
            topic = f"lengths-{name}-{number}"
            client.create_topic(topic)
            rates[name].append(len(bodies) / timed(partial(client.publish_many, topic, bodies)))
            client.delete_topic(topic)
    for name, measured in rates.items():
        report_rate(NAME, case_name("qb", 100, f"publish-{name}-lengths"), 100, measured)
    ratio = median_ratio(rates["mixed"], rates["equal"])
    judge(NAME, "50 to 150 bytes, no key: at least 0.45 of the rate of equal lengths", ratio, ratio >= 0.45)


def _key_shared(client: BrokerClient, options: BenchmarkOptions) -> None:
    """Compare key_shared with shared, for few and many keys, partitions and subscribers."""
    count = options.scaled(200_000)
    bodies, _ = orders(count)
    for partitions in (1, 16):
        for kinds in KEYS:
            topic = f"keys-{partitions}-{kinds}"
            client.create_topic(topic, partitions=partitions)
            client.publish_many(topic, bodies, keys=[f"key-{number % kinds}" for number in range(count)])
            for subscribers in (1, 4):
                rates: Rates = {"shared": [], "key_shared": []}
                for _ in range(min(options.rounds, 3)):
                    for mode, measured in rates.items():
                        measured.append(count / _handle_by(client, topic, count, subscribers, mode))
                what = f"{kinds}-keys-{partitions}-partitions-{subscribers}-subscribers"
                for mode, measured in rates.items():
                    report_rate(NAME, case_name("qb", 240, f"{mode}-{what}"), 240, measured)
                ratio = median_ratio(rates["key_shared"], rates["shared"])
                judge(NAME, f"key_shared, {what}: at least 0.5 of shared", ratio, ratio >= 0.5)
            client.delete_topic(topic)


def _handle_by(client: BrokerClient, topic: str, count: int, subscribers: int, mode: str) -> float:
    handle: Callable[..., float] = partial(handle_backlog, client, topic, count, PARSERS["msgspec"], mode=mode)
    return handle() if subscribers == 1 else handle(subscribers=subscribers)
