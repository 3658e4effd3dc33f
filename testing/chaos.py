"""Faults on request: what a network, an operator or a power station does to a broker and its clients."""

from __future__ import annotations

from qb.testing.fault_proxy import FaultProxy
from qb.testing.running_broker import RunningBroker


class Chaos:
    """Breaks things between a broker and its clients. Every method returns when the fault has happened or is set up."""

    def __init__(self, broker: RunningBroker, proxy: FaultProxy) -> None:
        self._broker, self._proxy = broker, proxy

    def __repr__(self) -> str:
        return f"<Chaos between {self._broker!r} and its clients>"

    def drop_connections(self) -> None:
        """End every connection of the broker's clients; they may connect again at once."""
        self._proxy.drop_connections()

    def restart_broker(self) -> None:
        """Have the broker finish what it received, stop, and start again."""
        self._broker.stop()
        self._broker.start()

    def kill_broker(self, restart: bool = True) -> None:
        """End the broker as `kill -9` does.

        Args:
            restart: Start it again; without that it is down until start_broker().
        """
        self._broker.kill()
        if restart:
            self._broker.start()

    def cut_power(self, restart: bool = True) -> None:
        """Kill the broker, and make it forget all that it had not synced. What it had when it started counts as synced.

        Args:
            restart: Start it again; without that it is down until start_broker().
        """
        self._broker.cut_power()
        if restart:
            self._broker.start()

    def start_broker(self) -> None:
        """Start a broker that is down."""
        self._broker.start()

    def delay_acks(self, seconds: float) -> None:
        """Let every answer of the broker come later from now on, the acks of publishes among them.

        Args:
            seconds: By how much at least; 0 ends it.
        """
        self._proxy.answer_delay = seconds

    def deliver_twice(self, times: int = 1) -> None:
        """Lose the next acks of a subscriber, with its connection, so that what it has handled is delivered again.

        That is how a message comes twice in production. A subscriber acks several messages at once: all of them, and
        those that it has not handled yet, come again. A message that was pulled is not acked, and does not.

        Args:
            times: How often.
        """
        self._proxy.lose_acks(times)
