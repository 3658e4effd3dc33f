"""Log aggregation: services publish their lines, the broker keeps a week of them, and a tail follows them live.

`python -m examples.log_aggregation` runs against the broker that the environment names.
"""

from __future__ import annotations

import logging
import queue

from qb import BrokerClient, Message

LINES = [("web", "GET / 200"), ("db", "checkpoint took 3 s"), ("web", "GET /orders 500")]


class BrokerHandler(logging.Handler):
    """A handler of Python's own logging that publishes what is logged. The key keeps a service's lines in order."""

    def __init__(self, broker: BrokerClient) -> None:
        super().__init__()
        self._broker = broker

    def emit(self, record: logging.LogRecord) -> None:
        self._broker.publish_text("logs", self.format(record), key=record.name, level=record.levelname)


def main() -> list[str]:
    """Log some lines, and return what a tail of the topic has seen."""
    seen: queue.Queue[str] = queue.Queue()

    def show(message: Message) -> None:
        seen.put(f"{message.key} {message.properties['level']} {message.text()}")

    with BrokerClient.from_env() as broker:
        broker.create_topic("logs", retention_hours=7 * 24, retention_bytes=1 << 30)
        handler = BrokerHandler(broker)
        with broker.subscribe("logs", "latest", show):  # a tail: from now on, and gone when it ends
            for service, line in LINES:
                logger = logging.getLogger(service)
                logger.propagate = False
                logger.addHandler(handler)
                logger.warning(line)
                logger.removeHandler(handler)
            return [seen.get(timeout=60) for _ in LINES]


if __name__ == "__main__":
    print("\n".join(main()))
