"""A consumer in a process of its own: notes in a file what it has handled, until it is killed or stopped.

A line is `generation partition offset`; it is in the file before the message counts as handled.
"""

from __future__ import annotations

import os
import signal
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from qb import Consumer, Message


def main(port: str, group: str, topic: str, path: str) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    consumer = Consumer(group, topic, port=int(port), session_timeout=1.0, auto_commit_interval_ms=100)
    signal.signal(signal.SIGTERM, lambda *_: consumer.stop())

    def handle(message: Message) -> None:
        generation = consumer._member.state._synced
        os.write(file, b"%d %d %d\n" % (generation, message.partition, message.offset))

    with consumer:
        consumer.run(handle)


if __name__ == "__main__":
    main(*sys.argv[1:])
