"""Three NATS nodes and three brokers, each with a network and a disk of its own if this machine lets it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.support.brokers import ROOT, free_port
from tests.support.machines import ImageDisk, Machines
from tests.support.nats_cluster import NatsNode
from tests.support.running_cell import RunningCell
from tests.support.waiting import holds_for, wait_until

LOCALHOST = "127.0.0.1"
NODES = 3
MEGABYTES = 640  # of each disk
RESTART_AFTER = 1.0  # seconds before what has ended is started again
BROKERS = tuple(f"broker-{number + 1}" for number in range(NODES))
NATS = tuple(f"nats-{number + 1}" for number in range(NODES))


class CellBroker:
    """One broker, as an operator starts it."""

    def __init__(self, directory: Path, name: str, host: str, prefix: Sequence[str], nodes: Sequence[NatsNode]) -> None:
        self.name, self.host, self._prefix = name, host, prefix
        self.port, self.json_port = free_port(), free_port()
        self.log_file = directory / f"{name}.out"
        self.environment: dict[str, str] = {}  # more than the others have
        self.process: subprocess.Popen[bytes] | None = None
        flags = {
            "--storage-engine": "jetstream",
            "--nats-servers": ",".join(node.url for node in nodes),
            "--nats-monitors": ",".join(node.monitor for node in nodes),
            "--node-name": name,
            "--data-dir": str(directory / name / "data"),
            "--host": host,
            "--port": str(self.port),
            "--json-host": host,
            "--json-port": str(self.json_port),
            "--http-port": "0",
            "--cluster-host": host,
            "--cluster-port": str(free_port()),
            "--fast-takeover": "true",  # in these networks nothing refuses but a port without a process
        }
        self.program = str(ROOT / "server.py")
        self._flags = [*(word for flag in flags.items() for word in flag), "--insecure"]

    def start(self) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("QB_")}
        with self.log_file.open("ab") as output:
            self.process = subprocess.Popen(
                [*self._prefix, sys.executable, self.program, *self._flags],
                env=clean | self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def kill(self) -> None:
        """As kill -9; a stopped one too."""
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None


class CampaignCell(RunningCell):
    """All six processes. What ends is started again a moment later, unless it is held down."""

    def __init__(self, directory: Path, *, machines: Machines | None, disks: bool) -> None:
        """`machines` are named as the processes are; without them all is on this one."""
        directory.mkdir(parents=True)
        self.directory, self.machines = directory, machines
        names = [*NATS, *BROKERS] if disks else []
        self.disks = {name: ImageDisk(directory / name, MEGABYTES) for name in names}
        ports = {name: (free_port(), free_port()) for name in NATS}
        routes = ", ".join(f'"nats://{self._host(name)}:{ports[name][1]}"' for name in NATS)
        self.nodes = {
            name: NatsNode(
                directory,
                name,
                ports[name][0],
                host=self._host(name),
                prefix=self._prefix(name),
                cluster=f'cluster {{ name: test, listen: "{self._host(name)}:{ports[name][1]}", routes: [{routes}] }}',
            )
            for name in NATS
        }
        nodes = [*self.nodes.values()]
        self.brokers = {
            name: CellBroker(directory, name, self._host(name), self._prefix(name), nodes) for name in BROKERS
        }
        self._held: set[str] = set()
        self._due: dict[str, float] = {}
        self.ended: list[str] = []  # what ended by itself
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._keeper = threading.Thread(target=self._keep, daemon=True)

    def _host(self, name: str) -> str:
        return self.machines.addresses[name] if self.machines else LOCALHOST

    def _prefix(self, name: str) -> list[str]:
        return self.machines.prefix(name) if self.machines else []

    # The processes

    def start(self) -> None:
        for name in (*NATS, *BROKERS):
            self._process(name).start()
        self._keeper.start()

    def _process(self, name: str) -> NatsNode | CellBroker:
        return self.nodes[name] if name in self.nodes else self.brokers[name]

    def _keep(self) -> None:
        while not self._over.wait(0.05):
            with self._lock:
                for name in (*NATS, *BROKERS):
                    self._look_at(name)

    def _look_at(self, name: str) -> None:
        each = self._process(name)
        if each.process is not None and each.process.poll() is not None:
            self.ended.append(f"{name} ended with {each.process.returncode}")
            each.process = None
        if each.process is None and name not in self._held:
            due = self._due.setdefault(name, time.monotonic() + RESTART_AFTER)
            if time.monotonic() >= due:
                del self._due[name]
                each.start()

    def signal(self, name: str, number: signal.Signals) -> None:
        process = self._process(name).process
        if process is not None:
            process.send_signal(number)

    def hold_down(self, *names: str) -> None:
        """kill -9, until let_up()."""
        with self._lock:
            self._held |= {*names}
            for name in names:
                self._process(name).kill()

    def let_up(self) -> None:
        """Start what was held down."""
        with self._lock:
            for name in sorted(self._held):
                self._due.pop(name, None)
                if self._process(name).process is None:
                    self._process(name).start()
            self._held.clear()

    def end(self, *names: str) -> None:
        """SIGTERM, and wait."""
        with self._lock:
            self._held |= {*names}
            for name in names:
                self.signal(name, signal.SIGTERM)
            for name in names:
                each = self._process(name)
                if each.process is not None:
                    code = each.process.wait(60)
                    each.process = None
                    assert code == 0, f"{name} ended with {code}"

    def pids(self) -> list[int]:
        processes = [self._process(name).process for name in (*NATS, *BROKERS)]
        return [process.pid for process in processes if process is not None]

    def stop(self) -> None:
        """End everything at once."""
        self._over.set()
        if self._keeper.is_alive():
            self._keeper.join()
        self.heal()
        for name in (*BROKERS, *NATS):
            self._process(name).kill()
        for disk in self.disks.values():
            disk.unmount()

    def last_words(self) -> list[str]:
        """Return the ends of all logs, and what ended by itself."""
        words = list(self.ended)
        for name in (*NATS, *BROKERS):
            said = (self.directory / f"{name}.out").read_text(errors="replace").splitlines()
            words += [f"--- {name}", *said[-15:]]
        return words

    # Asking

    @property
    def servers(self) -> list[str]:
        return [f"{broker.host}:{broker.port}" for broker in self.brokers.values()]

    @property
    def lines(self) -> list[str]:
        return [f"{broker.host}:{broker.json_port}" for broker in self.brokers.values()]

    @property
    def urls(self) -> list[str]:
        return [node.url for node in self.nodes.values()]

    def current_nodes(self) -> set[str]:
        """Return the NATS nodes that have all of the journal, as its leader says."""
        journal = self.status().get("journal", {"nodes": ()})
        return {each["name"] for each in journal["nodes"] if each["current"]}

    def leader(self) -> str:
        """Return the NATS node that leads the journal, once one does."""
        found: list[dict[str, Any]] = []

        def known() -> bool:
            for each in self.answers():
                found[:] = [node for node in each["journal"]["nodes"] if node["role"] == "leader"] or found
            return bool(found)

        wait_until(known)
        return str(found[0]["name"])

    # Harm

    def cut(self, senders: Iterable[str], receivers: Iterable[str]) -> None:
        """Lose what these send to those."""
        assert self.machines is not None
        for sender in senders:
            for receiver in receivers:
                if sender != receiver:
                    self.machines.cut(sender, receiver)

    def cut_power(self, *names: str, after: float = 0.0) -> None:
        """Cut the power of some machines at one moment: what was not on their disks is gone."""
        with self._lock:
            self._held |= {*names}
            for name in names:
                self.signal(name, signal.SIGSTOP)
            for name in names:
                self.disks[name].note_power_cut()
            for name in names:
                self._process(name).kill()
                self.disks[name].cut_power()
        holds_for(after, lambda: True)
        self.let_up()

    def heal(self) -> None:
        """Undo all harm that a fault may have left."""
        if self.machines is not None:
            self.machines.heal()
        for disk in self.disks.values():
            disk.free()
        for name in (*NATS, *BROKERS):
            self.signal(name, signal.SIGCONT)
        if not self._over.is_set():
            self.let_up()
