"""A cell of real processes to measure."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.harness import Server, qb_server
from qb import BrokerClient
from qb.cli.cluster.cell_questions import ask
from qb.clients.credentials import Credentials
from qb.clients.protocol.client_errors import RequestRefused
from qb.core.wire.addresses import parse_address
from qb.core.wire.errors import BrokerError

NAME = "cluster"
PATIENCE = 60.0  # seconds


class Cell:
    """Three NATS nodes and some brokers."""

    def __init__(self, stack: ExitStack, directory: Path, nodes: Mapping[str, Server]) -> None:
        """The stack ends the brokers."""
        self._stack, self._directory = stack, directory
        self.nodes = dict(nodes)
        self.urls = [f"nats://127.0.0.1:{node.port}" for node in nodes.values()]
        self.brokers: dict[str, Server] = {}  # those that live, by name
        self._made = 0

    def start_broker(self) -> None:
        """Start one more broker, with an empty copy."""
        name = f"broker{self._made}"
        self._made += 1
        settings = {"QB_STORAGE_ENGINE": "jetstream", "QB_NATS_SERVERS": ",".join(self.urls), "QB_CLUSTER_PORT": "0"}
        settings |= {"QB_NODE_NAME": name, "QB_FAST_TAKEOVER": "true"}
        self.brokers[name] = self._stack.enter_context(qb_server(self._directory / name, **settings))

    @property
    def addresses(self) -> list[str]:
        return [f"127.0.0.1:{broker.port}" for broker in self.brokers.values()]

    def client(self) -> BrokerClient:
        """Return a client that finds the owner."""
        return BrokerClient(servers=self.addresses, connect_wait=PATIENCE, request_timeout=PATIENCE)

    def status(self) -> dict[str, Any]:
        """Return what the broker says that knows the newest epoch, once there is one that knows an owner."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            found = [each for each in map(_asked, self.addresses) if each["owner"]]
            if found:
                return max(found, key=lambda each: int(each["epoch"]))
            time.sleep(0.05)
        raise TimeoutError("the cell has no owner")

    def owner(self) -> str:
        """Return the name of the owner."""
        return str(self.status()["owner"])

    def wait_until_whole(self) -> None:
        """Return when every broker has said that it follows, and every NATS node has everything."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            found = self.status()
            lags = {each["name"]: each["lag"] for each in found["brokers"]}
            nodes = found["journal"]["nodes"]
            live = all(lags.get(name) is not None for name in self.brokers)
            if live and len(nodes) == len(self.nodes) and all(node["current"] for node in nodes):
                return
            time.sleep(0.1)
        raise TimeoutError("the cell does not become whole")

    def move(self) -> None:
        """Ask the owner to give the cell to another broker."""
        ask(parse_address(f"127.0.0.1:{self.brokers[self.owner()].port}"), Credentials(), "move_cell", to=None)


def _asked(address: str) -> dict[str, Any]:
    try:
        answer: dict[str, Any] = ask(parse_address(address), Credentials())
    except (OSError, BrokerError, RequestRefused):
        return {"owner": None, "epoch": 0}
    return answer
