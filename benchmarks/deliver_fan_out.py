"""What do many subscriptions cost: fifty busy ones, a stuck one, ten thousand idle ones?"""

from __future__ import annotations

import statistics
import threading
import time

from benchmarks.harness import (
    BenchmarkOptions,
    Server,
    case_name,
    cpu_seconds,
    judge,
    memory_megabytes,
    qb_server,
    report,
    report_rate,
    scratch,
    significant,
    timed,
)
from benchmarks.raw_subscribers import RawSubscriber, drain
from qb import BrokerClient

NAME = "deliver_fan_out"
SIZE = 100
SUBSCRIPTIONS = 50
IDLE = 10_000


def run(options: BenchmarkOptions) -> None:
    """Print deliveries a second, what a stuck subscriber costs the others, and what idle subscriptions cost."""
    with scratch(options) as directory, qb_server(directory / "qb") as server, BrokerClient(port=server.port) as client:
        _fan_out(client, server, options)
        _stuck(client, server, options)
    with scratch(options) as directory, qb_server(directory / "qb") as server, BrokerClient(port=server.port) as client:
        _idle(client, server, options)


def _fan_out(client: BrokerClient, server: Server, options: BenchmarkOptions) -> None:
    """One publisher, fifty subscriptions: every message is pushed fifty times."""
    count, rates = options.scaled(60_000), []
    for number in range(options.rounds):
        topic = f"fan-out-{number}"
        client.create_topic(topic)
        names = [f"{topic}-{each}" for each in range(SUBSCRIPTIONS)]
        for name in names:
            client.create_subscription(name, topic, max_in_flight=10_000)
        subscribers = [RawSubscriber(server.port, name) for name in names]
        publisher = threading.Thread(target=client.publish_many, args=(topic, [b"x" * SIZE] * count))
        publisher.start()
        rates.append(SUBSCRIPTIONS * count / drain(subscribers, SUBSCRIPTIONS * count))
        publisher.join()
        for each in subscribers:
            each.socket.close()
        client.delete_topic(topic)
    report_rate(NAME, case_name("qb", SIZE, f"{SUBSCRIPTIONS}-subscriptions-raw-readers"), SIZE, rates)
    rate = statistics.median(rates)
    judge(NAME, "50 subscriptions: at least 500,000 deliveries/s", rate, rate >= 500_000, "deliveries/s")


def _stuck(client: BrokerClient, server: Server, options: BenchmarkOptions) -> None:
    """A subscriber that has joined and never reads, beside one that does."""
    count = options.scaled(200_000)
    alone: list[float] = []
    beside: list[float] = []
    client.create_topic("stuck")
    client.publish_many("stuck", [b"x" * SIZE] * count)
    before = memory_megabytes(server.pid, "VmRSS")
    for number in range(options.rounds):
        for rates, stuck in ((alone, False), (beside, True)):
            good, bad = f"good-{number}-{stuck}", f"bad-{number}-{stuck}"
            client.create_subscription(good, "stuck", max_in_flight=10_000)
            client.create_subscription(bad, "stuck", max_in_flight=100_000)
            silent = RawSubscriber(server.port, bad) if stuck else None
            reader = RawSubscriber(server.port, good)
            rates.append(count / drain([reader], count))
            reader.socket.close()
            if silent is not None:
                silent.socket.close()
            client.delete_subscription(good)
            client.delete_subscription(bad)
    report_rate(NAME, case_name("qb", SIZE, "one-raw-reader"), SIZE, alone)
    report_rate(
        NAME,
        case_name("qb", SIZE, "one-raw-reader-beside-a-stuck-one"),
        SIZE,
        beside,
        server_memory_growth_mb=significant(memory_megabytes(server.pid, "VmRSS") - before),
    )


def _idle(client: BrokerClient, server: Server, options: BenchmarkOptions) -> None:
    """Ten thousand subscriptions without subscribers."""
    count = options.scaled(IDLE)
    client.create_topic("idle")
    bodies = [b"x" * SIZE] * options.scaled(500_000)
    without = len(bodies) / timed(lambda: client.publish_many("idle", bodies))
    before = memory_megabytes(server.pid, "VmRSS")
    for number in range(count):
        client.create_subscription(f"idle-{number}", "idle", start_offset="latest")
    grown = memory_megabytes(server.pid, "VmRSS") - before
    cpu, seconds = cpu_seconds(server.pid), 2.0 if options.quick else 10.0
    time.sleep(seconds)
    used = cpu_seconds(server.pid) - cpu
    with_them = len(bodies) / timed(lambda: client.publish_many("idle", bodies))
    report(
        NAME,
        f"qb/{count}-idle-subscriptions",
        memory_growth_mb=significant(grown),
        cpu_seconds_while_idle=significant(used),
        idle_seconds=seconds,
        publish_rate_with_them=round(with_them),
        publish_rate_without=round(without),
        ratio=significant(with_them / without),
    )
