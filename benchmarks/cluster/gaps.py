"""How long does a publisher of one message at a time wait at most, when a broker or a NATS node dies or leaves?

Its client knows all brokers. With each harm the longest time between two acks is taken; the worst of all rounds is
judged. A machine that vanishes is played by an owner that is stopped (SIGSTOP): its port refuses no connection.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import trio

from benchmarks.cluster.cell import NAME, PATIENCE, Cell
from benchmarks.harness import BenchmarkOptions, judge, report, significant
from qb.replication.jetstream.jetstream_api import JetStreamRefused, call
from qb.replication.nats.nats_client import NatsClient
from qb.replication.nats.nats_protocol import NatsError

BODY = b"x" * 100
TTL = 15.0  # seconds of a lease, as brokers have it by default
BEFORE = AFTER = 1.0  # seconds of publishes around a gap
LONGEST = 40.0  # seconds that a gap may take
STREAM = "QB_main"


class Harm(NamedTuple):
    """Something that is done to a cell."""

    name: str
    most: float  # seconds, for the longest gap
    do: Callable[[Cell], float]  # returns how many seconds of the gap are not the cell's own
    rounds: int  # at most


def compare(options: BenchmarkOptions, directory: Path, cell: Cell) -> None:
    """Do each harm some times, and print the longest gaps."""
    with cell.client() as client:
        client.create_topic("gaps")
    for harm in HARMS:
        gaps = [_gap(cell, harm) for _ in range(min(options.rounds, harm.rounds))]
        worst = max(gaps)
        report(
            NAME,
            f"longest gap of a publisher/{harm.name}",
            rounds=[significant(each) for each in gaps],
            seconds=significant(worst),
        )
        judge(NAME, f"{harm.name}: longest gap of a publisher at most {harm.most:g} s", worst, worst <= harm.most, "s")


def _gap(cell: Cell, harm: Harm) -> float:
    while len(cell.brokers) < 3:
        cell.start_broker()
    cell.wait_until_whole()
    acks, stop = [time.monotonic()], threading.Event()
    publisher = threading.Thread(target=_publish, args=(cell, acks, stop))
    publisher.start()
    try:
        time.sleep(BEFORE)
        began = time.monotonic()
        excused = harm.do(cell)
        _wait_until_acked(acks, began)
        time.sleep(AFTER)
    finally:
        stop.set()
        publisher.join()
    around = [each for each in acks if each > began - BEFORE / 2]
    return max(later - each for each, later in itertools.pairwise(around)) - excused


def _publish(cell: Cell, acks: list[float], stop: threading.Event) -> None:
    with cell.client() as client:
        while not stop.is_set():
            client.publish("gaps", BODY)
            acks.append(time.monotonic())


def _wait_until_acked(acks: list[float], began: float) -> None:
    """Return when publishes have been acked for a while, whatever had been done to the cell."""
    deadline = began + LONGEST
    while time.monotonic() < deadline:
        count = len(acks)
        time.sleep(AFTER)
        if len(acks) > count + 10:
            return
    raise TimeoutError(f"no publish was acked for {LONGEST:g} s")


# ---------------------------------------------------------------- the harms


def _signal_owner(number: signal.Signals) -> Callable[[Cell], float]:
    def do(cell: Cell) -> float:
        broker = cell.brokers.pop(cell.owner())
        os.kill(broker.pid, number)
        return 0.0

    return do


def _move(cell: Cell) -> float:
    cell.move()
    return 0.0


def _kill_nats_leader(cell: Cell) -> float:
    """Kill it, and return how long NATS took to elect another one."""
    nodes = cell.status()["journal"]["nodes"]
    leader = next(str(node["name"]) for node in nodes if node["role"] == "leader")
    return trio.run(_election, cell, leader)


async def _election(cell: Cell, leader: str) -> float:
    node = cell.nodes.pop(leader)
    client = NatsClient([f"nats://127.0.0.1:{other.port}" for other in cell.nodes.values()])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.run)
        with trio.fail_after(PATIENCE):
            await client.wait_connected()
            os.kill(node.pid, signal.SIGKILL)
            began = time.monotonic()
            while await _leads(client) in ("", leader):  # noqa: ASYNC110 - only by asking
                await trio.sleep(0.02)
        took = time.monotonic() - began
        nursery.cancel_scope.cancel()
    report(NAME, "election of NATS after its leader was killed", seconds=significant(took))
    return took


async def _leads(client: NatsClient) -> str:
    """Return the name of the node that leads the journal; empty: there is none just now."""
    try:
        found = await call(client, f"STREAM.INFO.{STREAM}", timeout=0.5)
    except (JetStreamRefused, NatsError, trio.TooSlowError):
        return ""
    return str((found.get("cluster") or {}).get("leader", ""))


HARMS = (
    Harm("move", 0.5, _move, 5),
    Harm("SIGTERM to the owner", 0.5, _signal_owner(signal.SIGTERM), 5),
    Harm("kill -9 of the owner, fast takeover", 1.0, _signal_owner(signal.SIGKILL), 5),
    Harm("the owner's machine vanishes", TTL + 2, _signal_owner(signal.SIGSTOP), 1),
    Harm("the NATS leader is killed, beyond NATS's own election", 1.0, _kill_nats_leader, 1),
)
