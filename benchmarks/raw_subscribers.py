"""Subscribers that do nothing but read and ack, so that the broker is what limits.

All of them live in one process on plain sockets and epoll. A DELIVER is acked as a whole, from its first two messages.
"""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Iterable

from qb.core.wire.frames import HEAD, LENGTH, MessageType, encode_frame

RECEIVE = 1 << 20


class RawSubscriber:
    """One connection that has joined one subscription."""

    def __init__(self, port: int, subscription_id: str) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.received = 0
        self._subscription = subscription_id
        self._settles = 0
        self._unread = bytearray()
        self.socket.sendall(encode_frame(MessageType.HELLO, 1, 0, {"protocol": "1"}))
        join = {"subscription_id": subscription_id, "announces": "true"}
        self.socket.sendall(encode_frame(MessageType.SUBSCRIBE, 2, 0, join))

    def read(self) -> None:
        """Read what is there, count it, ack it."""
        self._unread += self.socket.recv(RECEIVE)
        at, acks = 0, []
        while len(self._unread) - at >= HEAD.size:
            total, kind, _, _, properties_length = HEAD.unpack_from(self._unread, at)
            if total > len(self._unread) - at:
                break
            if kind == MessageType.DELIVER:
                acks.append(self._take(at, properties_length))
            at += total
        del self._unread[:at]
        if acks:
            self._settles += 1
            body = json.dumps({"acks": acks}).encode()
            frame = encode_frame(MessageType.SETTLE, self._settles, 0, {"subscription_id": self._subscription}, body)
            self.socket.sendall(frame)

    def _take(self, at: int, properties_length: int) -> list[int]:
        """Return the run (partition, first, count, step) of the DELIVER at `at`."""
        start = at + HEAD.size
        properties = dict(
            item.split("=", 1) for item in self._unread[start : start + properties_length - 1].decode().split("\0")
        )
        first_at = start + properties_length + LENGTH.size
        length, _, first, _, _ = HEAD.unpack_from(self._unread, first_at)
        count, step = int(properties["count"]), 1
        if count > 1:
            second_kind, second = HEAD.unpack_from(self._unread, first_at + length)[1:3]
            if second_kind == MessageType.DATA:
                step = second - first
        self.received += count
        return [int(properties["partition"]), first, count, step]


def drain(subscribers: Iterable[RawSubscriber], total: int, deadline: float = 120.0) -> float:
    """Read until all of them together have received `total` messages; returns the seconds that took."""
    subscribers = list(subscribers)
    by_fd = {each.socket.fileno(): each for each in subscribers}
    started = time.perf_counter()
    with select.epoll() as poll:
        for fd in by_fd:
            poll.register(fd, select.EPOLLIN)
        while sum(each.received for each in subscribers) < total:
            if time.perf_counter() - started > deadline:
                raise TimeoutError(
                    f"{sum(each.received for each in subscribers)} of {total} messages after {deadline} s"
                )
            for fd, _ in poll.poll(1.0):
                by_fd[fd].read()
    return time.perf_counter() - started
