"""What the campaign does to a cell: each function harms it, and may leave the healing to the campaign."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import NamedTuple

from tests.campaign.campaign_cell import BROKERS, NATS, CampaignCell
from tests.support.brokers import ROOT
from tests.support.waiting import holds_for, wait_until

FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1")
HERE = ("here",)

Act = Callable[[CampaignCell, Random], None]


class Fault(NamedTuple):
    """One kind of harm."""

    name: str
    act: Act
    needs: str  # "", "networks", "disks", "faketime", "spark", "versions"; several with a space between them
    spoils_clocks: bool = False  # only reads with consistent=1 have to be current


FAULTS: list[Fault] = []


def fault(name: str, needs: str = "", *, spoils_clocks: bool = False) -> Callable[[Act], Act]:
    """Add a function to the list."""

    def added(act: Act) -> Act:
        FAULTS.append(Fault(name, act, needs, spoils_clocks))
        return act

    return added


def last(draw: Random, least: float, most: float) -> None:
    """Let the harm last."""
    holds_for(draw.uniform(least, most), lambda: True)


def others(cell: CampaignCell) -> list[str]:
    owner = cell.owner()
    return [name for name in BROKERS if name != owner]


# The owner's process


@fault("owner killed")
def _kill_owner(cell: CampaignCell, draw: Random) -> None:
    cell.signal(cell.owner(), signal.SIGKILL)


@fault("owner and a follower killed")
def _kill_two(cell: CampaignCell, draw: Random) -> None:
    cell.hold_down(cell.owner(), draw.choice(others(cell)))
    last(draw, 0, 5)


@fault("owner stopped for 20 s")
def _stop_owner(cell: CampaignCell, draw: Random) -> None:
    owner = cell.owner()
    cell.signal(owner, signal.SIGSTOP)
    last(draw, 20, 20)
    cell.signal(owner, signal.SIGCONT)
    last(draw, 1, 2)


@fault("owner ended by SIGTERM")
def _end_owner(cell: CampaignCell, draw: Random) -> None:
    cell.signal(cell.owner(), signal.SIGTERM)


@fault("cell moved")
def _move(cell: CampaignCell, draw: Random) -> None:
    move(cell, draw.choice(others(cell)))


def move(cell: CampaignCell, to: str) -> None:
    """Move the cell as an operator does."""
    command = [sys.executable, str(ROOT / "client.py"), "cluster", "move", "--to", to, "--servers"]
    done = subprocess.run([*command, ",".join(cell.servers)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


# NATS nodes


@fault("leader of NATS killed")
def _kill_leader(cell: CampaignCell, draw: Random) -> None:
    cell.hold_down(cell.leader())
    last(draw, 0, 10)


@fault("another NATS node killed")
def _kill_node(cell: CampaignCell, draw: Random) -> None:
    cell.hold_down(draw.choice([name for name in NATS if name != cell.leader()]))
    last(draw, 0, 10)


@fault("all NATS nodes killed")
def _kill_all_nodes(cell: CampaignCell, draw: Random) -> None:
    cell.hold_down(*NATS)
    last(draw, 0, 6)


@fault("two NATS nodes stopped")
def _stop_two_nodes(cell: CampaignCell, draw: Random) -> None:
    for name in draw.sample(NATS, 2):
        cell.signal(name, signal.SIGSTOP)
    last(draw, 3, 25)


@fault("a NATS node hangs")
def _stop_node(cell: CampaignCell, draw: Random) -> None:
    """Brokers that are connected to it hear nothing, and must find another one."""
    cell.signal(draw.choice(NATS), signal.SIGSTOP)
    last(draw, 12, 20)


@fault("a NATS node loses its disk")
def _wipe_node(cell: CampaignCell, draw: Random) -> None:
    wipe(cell, draw.choice(NATS))


def wipe(cell: CampaignCell, name: str) -> None:
    """Begin anew with an empty store, as docs/CLUSTER.md says of a damaged one."""
    cell.hold_down(name)
    for each in cell.nodes[name].store.iterdir():
        if each.name != "lost+found":
            shutil.rmtree(each)


@fault("blocks of a NATS node damaged")
def _damage(cell: CampaignCell, draw: Random) -> None:
    """Bits are flipped while it is down; when it has come back its store is emptied, as an operator would."""
    name = draw.choice(NATS)
    cell.hold_down(name)
    blocks = sorted(path for path in cell.nodes[name].store.rglob("*.blk") if "QB_" in str(path))
    for path in blocks:
        flip_bits(path, draw)
    cell.let_up()
    last(draw, 5, 10)
    wait_until(lambda: {*NATS} - {name} <= cell.current_nodes(), 60)  # else all copies could be gone
    wipe(cell, name)


def flip_bits(path: Path, draw: Random) -> None:
    """Flip a few bits of a file."""
    with path.open("r+b") as file:
        size = path.stat().st_size
        for _ in range(draw.randint(1, 4) if size else 0):
            place = draw.randrange(size)
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 1 << draw.randrange(8)]))


# Networks


@fault("owner cut off from NATS", "networks")
def _cut_from_nats(cell: CampaignCell, draw: Random) -> None:
    owner = (cell.owner(),)
    cell.cut(owner, NATS)
    cell.cut(NATS, owner)
    last(draw, 3, 25)


@fault("owner's packets to NATS lost", "networks")
def _cut_to_nats(cell: CampaignCell, draw: Random) -> None:
    cell.cut((cell.owner(),), NATS)
    last(draw, 3, 25)


@fault("packets of NATS to the owner lost", "networks")
def _cut_from_nats_alone(cell: CampaignCell, draw: Random) -> None:
    cell.cut(NATS, (cell.owner(),))
    last(draw, 3, 25)


@fault("clients cut off from the owner", "networks")
def _cut_from_clients(cell: CampaignCell, draw: Random) -> None:
    owner = (cell.owner(),)
    cell.cut(owner, HERE)
    cell.cut(HERE, owner)
    last(draw, 3, 15)


@fault("packets of the owner to clients lost", "networks")
def _cut_answers(cell: CampaignCell, draw: Random) -> None:
    cell.cut((cell.owner(),), HERE)
    last(draw, 3, 15)


@fault("owner cut off from all", "networks")
def _cut_from_all(cell: CampaignCell, draw: Random) -> None:
    """Its machine vanishes, with the NATS node there."""
    owner = cell.owner()
    machine = owner, NATS[BROKERS.index(owner)]
    rest = [name for name in (*NATS, *BROKERS, *HERE) if name not in machine]
    cell.cut(machine, rest)
    cell.cut(rest, machine)
    last(draw, 18, 25)


@fault("leader of NATS cut off from the other nodes", "networks")
def _cut_leader(cell: CampaignCell, draw: Random) -> None:
    """It goes on to speak with the brokers."""
    leader = (cell.leader(),)
    rest = [name for name in NATS if name not in leader]
    cell.cut(leader, rest)
    cell.cut(rest, leader)
    last(draw, 5, 25)


@fault("leader of NATS is not heard by the other nodes", "networks")
def _mute_leader(cell: CampaignCell, draw: Random) -> None:
    leader = (cell.leader(),)
    cell.cut(leader, [name for name in NATS if name not in leader])
    last(draw, 5, 25)


# Disks


@fault("disk of a NATS node full", "disks")
def _fill_node(cell: CampaignCell, draw: Random) -> None:
    fill_and_restart(cell, [draw.choice([cell.leader(), *NATS])], draw)


@fault("disks of two NATS nodes full", "disks")
def _fill_two_nodes(cell: CampaignCell, draw: Random) -> None:
    fill_and_restart(cell, draw.sample(NATS, 2), draw)


def fill_and_restart(cell: CampaignCell, names: Sequence[str], draw: Random) -> None:
    """A NATS node without room switches its JetStream off until it is started again."""
    for name in names:
        cell.disks[name].fill()
    last(draw, 5, 15)
    for name in names:
        cell.disks[name].free()
    cell.hold_down(*names)


@fault("disk of the owner full", "disks")
def _fill_owner(cell: CampaignCell, draw: Random) -> None:
    cell.disks[cell.owner()].fill()
    last(draw, 5, 15)


@fault("disk of a follower full", "disks")
def _fill_follower(cell: CampaignCell, draw: Random) -> None:
    cell.disks[draw.choice(others(cell))].fill()
    last(draw, 5, 15)


@fault("power cut of a NATS node", "disks")
def _power_of_node(cell: CampaignCell, draw: Random) -> None:
    cell.cut_power(draw.choice([cell.leader(), *NATS]), after=draw.uniform(0, 5))


@fault("power cut of two NATS nodes", "disks")
def _power_of_two_nodes(cell: CampaignCell, draw: Random) -> None:
    cell.cut_power(*draw.sample(NATS, 2), after=draw.uniform(0, 5))


@fault("power cut of all NATS nodes", "disks")
def _power_of_all_nodes(cell: CampaignCell, draw: Random) -> None:
    cell.cut_power(*NATS, after=draw.uniform(0, 5))


@fault("power cut of the owner", "disks")
def _power_of_owner(cell: CampaignCell, draw: Random) -> None:
    cell.cut_power(cell.owner(), after=draw.uniform(0, 5))


@fault("power cut of everything", "disks")
def _power_of_all(cell: CampaignCell, draw: Random) -> None:
    cell.cut_power(*NATS, *BROKERS, after=draw.uniform(0, 5))


# Clocks


@fault("clock of the owner jumps", "faketime")
def _jump(cell: CampaignCell, draw: Random) -> None:
    """A broker with a clock of its own gets the cell; the clock jumps, and the cell goes back."""
    clock = cell.directory / "clock"
    clock.write_text("+0\n")
    environment = {
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_CACHE_DURATION": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
    with owner_of_its_own_clock(cell, environment):
        for jump in draw.sample(("+1d", "-1d", "+3600", "-3600", "+10", "-10"), 3):
            clock.write_text(f"{jump}\n")
            last(draw, 3, 6)
        clock.write_text("+0\n")
        cell.wait_until_whole()
        move(cell, others(cell)[0])


@contextmanager
def owner_of_its_own_clock(cell: CampaignCell, environment: dict[str, str]) -> Iterator[str]:
    """Give the cell to a broker with another clock; at the end that is killed, and comes back with the usual one."""
    name = others(cell)[0]
    cell.brokers[name].environment = {"LD_PRELOAD": str(FAKETIME), **environment}
    try:
        cell.hold_down(name)
        cell.let_up()
        cell.wait_until_whole()
        move(cell, name)
        yield name
    finally:
        cell.brokers[name].environment = {}
        cell.hold_down(name)


@fault("clock of the owner four times too slow, and cut off from NATS", "networks faketime", spoils_clocks=True)
def _slow_clock(cell: CampaignCell, draw: Random) -> None:
    """It believes in its lease long after another broker has taken over: what needs no clock must hold still."""
    with owner_of_its_own_clock(cell, {"FAKETIME": "+0 x0.25"}) as owner:
        rest = [*NATS, *others(cell)]
        cell.cut((owner,), rest)
        cell.cut(rest, (owner,))
        last(draw, 25, 35)


# Programs


OF_SPARK = ("broker killed while staging", "broker killed before commit", "broker killed while committing")
KILLS = 10


@fault("owner killed ten times under the Spark sink", "spark")
def _kill_under_spark(cell: CampaignCell, draw: Random) -> None:
    from tests.spark.faulty_streams import publish_exactly_once  # only here: Spark is an extra

    work = cell.directory / f"spark-{draw.randrange(1 << 30)}"
    publish_exactly_once(cell, work, draw.choices(OF_SPARK, k=KILLS), seconds=120.0)


OTHER_VERSION = "CAMPAIGN_OTHER_VERSION"  # in the environment: the server.py of another version


@fault("brokers of two versions in the cell", "versions")
def _mix_versions(cell: CampaignCell, draw: Random) -> None:
    """From the other version to this one, broker by broker, each version owning while the other follows."""
    other, ours = os.environ[OTHER_VERSION], cell.brokers[BROKERS[0]].program
    for name in (*others(cell), cell.owner()):
        replace(cell, name, other)
    for name in others(cell):  # an old owner, new followers
        replace(cell, name, ours)
    old = cell.owner()
    for to in (others(cell)[0], old, others(cell)[0]):  # a new owner, an old follower; back; and again
        move(cell, to)
        cell.wait_until_whole(120)  # the broker that gave the cell away begins anew
        last(draw, 2, 4)
    replace(cell, old, ours)


def replace(cell: CampaignCell, name: str, program: str) -> None:
    """Stop a broker in good order, and start that program in its place."""
    cell.end(name)
    cell.brokers[name].program = program
    cell.let_up()
    cell.wait_until_whole(120)
