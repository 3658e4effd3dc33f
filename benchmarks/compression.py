"""How many bytes travel for JSON, with compression and without?

Events of different lengths, of which a fifth is random, are published by publish_many and by a producer, fetched, and
pushed to a handler: plainly, with zstd and with lz4. A relay in front of the broker counts what passes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from random import Random

import msgspec

from benchmarks.harness import BenchmarkOptions, case_name, judge, qb_server, report, scratch, significant
from benchmarks.work.counting_relay import CountingRelay, counting_relay
from qb import BrokerClient, Message

NAME = "compression"
COUNT = 100_000
WORKS = ("publish_many", "producer", "fetch", "push-to-handler")
CODECS = (None, "zstd", "lz4")
TARGET = 4  # times fewer bytes, with zstd
ITEMS = ("green tea", "black tea", "coffee", "cup", "kettle", "sugar", "oat milk", "biscuits")
STREETS = ("Harbour Street", "Mill Road", "Station Road", "Park Avenue", "Church Street", "Queensway")


def events(count: int) -> list[bytes]:
    """Return JSON as services write it, always the same."""
    chance = Random(1)
    return [_event(number, chance) for number in range(count)]


def _event(number: int, chance: Random) -> bytes:
    bought = [
        {"item": chance.choice(ITEMS), "count": chance.randint(1, 5), "price": chance.randrange(100, 5_000) / 100}
        for _ in range(chance.randint(1, 4))
    ]
    return msgspec.json.encode(
        {
            "id": f"{chance.getrandbits(96):024x}",
            "type": "order-placed",
            "time": 1_763_000_000_000 + number * 37 + chance.randrange(30),
            "customer": {"id": chance.randrange(20_000), "street": f"{chance.choice(STREETS)} {chance.randint(1, 90)}"},
            "items": bought,
            "paid": chance.random() < 0.8,
        }
    )


def run(options: BenchmarkOptions) -> None:
    """Measure each work with each codec, then print the ratios."""
    bodies = events(options.scaled(COUNT))
    size = sum(map(len, bodies)) // len(bodies)
    with scratch(options) as directory, qb_server(directory / "qb") as broker, counting_relay(broker.port) as relay:
        figures = {codec: _figures(relay, codec, bodies) for codec in CODECS}
    for codec, by_work in figures.items():
        for work, bytes_each in by_work.items():
            report(NAME, case_name(f"qb-{codec or 'plain'}", size, work), bytes_each=significant(bytes_each))
    for work in WORKS:
        ratio = figures[None][work] / figures["zstd"][work]
        judge(NAME, f"{work}: zstd at least {TARGET} times fewer bytes", ratio, ratio >= TARGET)


def _figures(relay: CountingRelay, codec: str | None, bodies: list[bytes]) -> dict[str, float]:
    """Return the bytes that each work takes for a message."""
    topic = f"events-{codec}"
    works: dict[str, Callable[[BrokerClient], object]] = {
        "publish_many": lambda client: client.publish_many(topic, bodies),
        "producer": partial(_send_all, topic, bodies),
        "fetch": partial(_fetch_all, topic, len(bodies)),
        "push-to-handler": partial(_handle_all, topic, len(bodies)),
    }
    figures = dict[str, float]()
    for work in WORKS:
        with BrokerClient(port=relay.port, compression=codec) as client:
            if work == WORKS[0]:
                client.create_topic(topic)
            relay.take()
            works[work](client)
        figures[work] = sum(relay.take()) / len(bodies)
    return figures


def _send_all(topic: str, bodies: list[bytes], client: BrokerClient) -> None:
    with client.producer(topic) as producer:
        for body in bodies:
            producer.send(body)


def _fetch_all(topic: str, count: int, client: BrokerClient) -> None:
    at = 0
    while at < count:
        at += len(client.fetch(topic, 0, at, max_messages=100_000, max_bytes=1 << 20))


def _handle_all(topic: str, count: int, client: BrokerClient) -> None:
    left, done = [count], threading.Event()

    def handle(message: Message) -> None:
        left[0] -= 1
        if not left[0]:
            done.set()

    with client.create_and_subscribe(topic, topic, handler=handle):
        if not done.wait(120):
            raise TimeoutError(f"{left[0]} messages were not delivered")
