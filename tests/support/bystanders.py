"""What must not suffer while others misbehave: a client that goes on publishing, and the broker's memory."""

from __future__ import annotations

import threading

from qb import BrokerClient
from tests.support.brokers import BrokerProcess
from tests.support.waiting import wait_until


def memory(broker: BrokerProcess, field: str = "VmRSS") -> int:
    """Return the broker's resident memory in bytes; VmHWM is the most that it has ever had."""
    with open(f"/proc/{broker.process.pid}/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))


class GoodClient(threading.Thread):
    """Publishes one message after another, all the time, and must never notice anything."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self._client = BrokerClient(port=port)
        self._client.create_topic("good")
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self.published = 0
        self.start()

    def run(self) -> None:
        try:
            while not self._stopping.is_set():
                receipt = self._client.publish("good", b"%d" % self.published)
                assert receipt.offset == self.published
                assert not receipt.duplicate  # which it would be if the connection had been lost
                self.published += 1
        except BaseException as error:
            self._failure = error

    def wait_for_more(self) -> None:
        """Return when it has gone on."""
        seen = self.published
        wait_until(lambda: self.published >= seen + 3 or self._failure is not None)
        self.check()

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        self._stopping.set()
        self.join(timeout=60)
        self._client.disconnect()
        self.check()
