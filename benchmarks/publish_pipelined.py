"""How many messages a second does one publisher get onto stable storage?

100-byte bodies against Redis Streams and NATS JetStream, both set to sync before they answer and each driven with the
pipeline depth that suits it best; 1 KiB bodies against the bare disk. The sides take turns, round by round.
"""

from __future__ import annotations

import random
import statistics
from contextlib import ExitStack
from pathlib import Path

from benchmarks.harness import (
    BenchmarkOptions,
    PeerMissing,
    bare_appends,
    case_name,
    judge,
    median_ratio,
    qb_server,
    report_rate,
    scratch,
    skipped,
    timed,
)
from benchmarks.peers import ComparedBroker, JetStream, RedisStreams, best_depth, rate
from qb import BrokerClient

NAME = "publish_pipelined"
SMALL, LARGE, CHUNK = 100, 1024, 1 << 20
RATE_TARGET = 300_000
PEER_TARGETS = {RedisStreams.name: 5, JetStream.name: 10}
DISK_TARGET = 0.5


def run(options: BenchmarkOptions) -> None:
    """Compare with the peers at 100 bytes, then with the disk at 1 KiB."""
    with scratch(options) as directory, ExitStack() as stack:
        server = stack.enter_context(qb_server(directory / "qb"))
        client = stack.enter_context(BrokerClient(port=server.port))
        _against_peers(client, _peers(directory, stack), options)
    with scratch(options) as directory, qb_server(directory / "qb") as server, BrokerClient(port=server.port) as client:
        _against_the_disk(client, directory, options)


def _peers(directory: Path, stack: ExitStack) -> list[ComparedBroker]:
    peers: list[ComparedBroker] = []
    kinds: tuple[type[ComparedBroker], ...] = (RedisStreams, JetStream)
    for kind in kinds:
        try:
            peers.append(stack.enter_context(kind.started(directory)))
        except PeerMissing as missing:
            skipped(NAME, case_name(kind.name, SMALL, "pipelined"), str(missing))
    return peers


def _against_peers(client: BrokerClient, peers: list[ComparedBroker], options: BenchmarkOptions) -> None:
    body = b"x" * SMALL
    client.create_topic("small")
    depths = {peer.name: best_depth(peer, body) for peer in peers}
    ours: list[float] = []
    theirs: dict[str, list[float]] = {peer.name: [] for peer in peers}
    for _ in range(options.rounds):
        ours.append(_publish_many(client, "small", [body] * options.scaled(1_000_000)))
        for peer in peers:
            theirs[peer.name].append(rate(peer, body, peer.count, depths[peer.name]))
    report_rate(NAME, case_name("qb", SMALL, "publish_many"), SMALL, ours)
    mixed = [_publish_many(client, "small", _mixed(options.scaled(1_000_000))) for _ in range(options.rounds)]
    report_rate(NAME, case_name("qb", SMALL, "publish_many-of-50-to-150-bytes"), SMALL, mixed)
    median = statistics.median(ours)
    judge(NAME, f"{SMALL} B: at least {RATE_TARGET:,} msg/s", median, median >= RATE_TARGET, "msg/s")
    for name, rates in theirs.items():
        report_rate(NAME, case_name(name, SMALL, f"in-flight-{depths[name]}"), SMALL, rates)
        ratio, target = median_ratio(ours, rates), PEER_TARGETS[name]
        judge(NAME, f"{SMALL} B: at least {target} times {name}", ratio, ratio >= target)


def _against_the_disk(client: BrokerClient, directory: Path, options: BenchmarkOptions) -> None:
    client.create_topic("large")
    ours, disk = [], []
    for _ in range(options.rounds):
        ours.append(_publish_many(client, "large", [b"x" * LARGE] * options.scaled(200_000)))
        count = options.scaled(200)
        disk.append(count / sum(bare_appends(directory, CHUNK, count)))
    report_rate(NAME, case_name("qb", LARGE, "publish_many"), LARGE, ours)
    report_rate(NAME, case_name("bare-append+fdatasync", CHUNK, "one-at-a-time"), CHUNK, disk)
    ratio = median_ratio([each * LARGE for each in ours], [each * CHUNK for each in disk])
    target = f"1 KiB: at least {DISK_TARGET} of the MB/s of bare 1 MiB append + fdatasync"
    judge(NAME, target, ratio, ratio >= DISK_TARGET)


def _mixed(count: int) -> list[bytes]:
    """Return bodies of 100 bytes on the average, all different: nothing can be done by columns then."""
    lengths = random.Random(1).choices(range(50, 151), k=count)
    whole = b"x" * max(lengths)
    return [whole[:length] for length in lengths]


def _publish_many(client: BrokerClient, topic: str, bodies: list[bytes]) -> float:
    """Return acked messages a second."""
    count = len(bodies)
    before = client.describe_topic(topic)["messages"]
    seconds = timed(lambda: client.publish_many(topic, bodies))
    stored = client.describe_topic(topic)["messages"] - before
    if stored != count:
        raise RuntimeError(f"{count} messages were published and {stored} are stored")
    return count / seconds
