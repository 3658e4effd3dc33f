"""Forks of a test's own process, and a program that forks while it receives.

As a program: `forks.py PORT subscriber|consumer sys.exit|os._exit`; ends with 0 if the child did not disturb it.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import sys
import traceback
from collections.abc import Callable
from queue import SimpleQueue
from time import monotonic
from typing import Any

PATIENCE = 30.0


class Child:
    """A forked process that calls a function and ends, without any cleaning up."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._reader, writer = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            _answer(function, writer)
        os.close(writer)

    def result(self) -> Any:
        """Return what the function returned; fails if it raised or takes too long."""
        answer, deadline = b"", monotonic() + PATIENCE
        try:
            while select.select([self._reader], [], [], max(deadline - monotonic(), 0))[0]:
                if not (some := os.read(self._reader, 1 << 16)):
                    break
                answer += some
        finally:
            os.close(self._reader)
            os.kill(self.pid, signal.SIGKILL)  # it has answered, or never will
            os.waitpid(self.pid, 0)
        assert answer, "the child did not answer in time"
        returned, value = pickle.loads(answer)
        assert returned, value
        return value


def _answer(function: Callable[[], Any], writer: int) -> None:
    try:
        answer = True, function()
    except BaseException:
        answer = False, traceback.format_exc()
    with os.fdopen(writer, "wb") as pipe:
        pipe.write(pickle.dumps(answer))
    os._exit(0)


def child(function: Callable[[], Any]) -> Any:
    """Return what the function returns in a child."""
    return Child(function).result()


def raised_by(function: Callable[[], Any]) -> str:
    """Return the name of the type that the function raises."""
    try:
        function()
    except Exception as error:
        return type(error).__name__
    return "nothing"


def _child_publishes_and_ends(client: Any, ending: str) -> None:
    if pid := os.fork():
        assert os.waitpid(pid, 0)[1] == 0
        return
    client.publish("child", b"c")
    if ending == "os._exit":
        os._exit(0)
    sys.exit(0)  # through all blocks, and all that runs at exit


def _subscriber(port: int, ending: str) -> None:
    from qb import BrokerClient

    got: SimpleQueue[bytes] = SimpleQueue()
    with BrokerClient(port=port, request_timeout=10) as client:
        client.create_topic("t")
        client.create_topic("child")
        with client.create_and_subscribe("s", "t", lambda message: got.put(message.body)) as subscriber:
            client.publish("t", b"before")
            assert got.get(timeout=PATIENCE) == b"before"
            _child_publishes_and_ends(client, ending)
            client.publish("t", b"after")
            assert got.get(timeout=PATIENCE) == b"after"
            assert not subscriber.wait(0)
        assert len(client.fetch("child")) == 1


def _consumer(port: int, ending: str) -> None:
    from qb import BrokerClient

    with BrokerClient(port=port, request_timeout=10) as client:
        client.create_topic("t")
        client.create_topic("child")
        client.publish_many("t", [b"0", b"1", b"2"])
        with client.consumer("g", "t", max_poll_records=1) as consumer:
            messages = iter(consumer)
            assert next(messages).body == b"0"
            _child_publishes_and_ends(client, ending)
            assert len(client.describe_group("g")["members"]) == 1
            assert [next(messages).body, next(messages).body] == [b"1", b"2"]
            consumer.commit()
        assert [row["offset"] for row in client.committed_offsets("g")] == [3]
        assert len(client.fetch("child")) == 1


if __name__ == "__main__":
    {"subscriber": _subscriber, "consumer": _consumer}[sys.argv[2]](int(sys.argv[1]), sys.argv[3])
