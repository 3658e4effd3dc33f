"""A broker's groups and logs without sockets or clocks, for consumers that are driven by hand."""

from __future__ import annotations

import struct
from itertools import accumulate, count
from operator import length_hint
from typing import Any

import msgspec

from qb.clients.consuming.assigned_partitions import PartitionProgress
from qb.clients.consuming.consumer_options import ConsumerOptions
from qb.clients.consuming.consumer_state import ConsumerRequest, ConsumerState
from qb.clients.consuming.fetcher import Fetcher
from qb.clients.protocol.client_errors import refusal
from qb.clients.protocol.conversation import Conversation
from qb.clients.protocol.fetch_requests import FetchRequest
from qb.core.groups.group_coordinator import GroupCoordinator
from qb.core.groups.rebalance import GroupPartition
from qb.core.wire.errors import REPLIES, BrokerError, OffsetOutOfRange
from qb.core.wire.frames import Frame, MessageType, decode_frame, encode_frame, frame_length

LIVES = count()


def options(**changed: Any) -> ConsumerOptions:
    usual = ConsumerOptions("g", ("t",), True, 5.0, "earliest", 500, 10.0, 60.0)
    return usual._replace(**changed)


class Broker:
    """The real groups, logs that are only as long as a number, and committed offsets."""

    def __init__(self, partitions: int = 4, messages: int = 10) -> None:
        self.partitions = partitions
        self.first, self.ends = [0] * partitions, [messages] * partitions
        self.committed: dict[GroupPartition, int] = {}
        self.groups = GroupCoordinator({"t": partitions})
        self.heard: list[str] = []  # the methods that were called

    def restart(self) -> None:
        """Forget the members, as a killed broker does."""
        self.groups = GroupCoordinator({"t": self.partitions}, 1_000_000)

    def call(self, ask: ConsumerRequest, now: float) -> Any:
        """Carry out a request. Raises BrokerError."""
        self.heard.append(ask.method)
        arguments = dict(ask.arguments)
        match ask.method:
            case "offsets":
                return {"first": self.first[arguments["partition"]], "next": self.ends[arguments["partition"]]}
            case "committed_offsets":
                return [{"topic": at.topic, "partition": at.partition, "offset": n} for at, n in self.committed.items()]
            case "commit_offsets":
                return self.commit(**arguments)
            case "leave_group":
                return self.groups.leave(arguments["group"], arguments["member"], now)
        call = getattr(self.groups, ask.method.removesuffix("_group"))
        return msgspec.to_builtins(call(now=now, **arguments))

    def commit(self, group: str, offsets: list[list[Any]], member: str, generation: int) -> None:
        asked = {GroupPartition(topic, partition): offset for topic, partition, offset in offsets}
        for at, offset in asked.items():
            first, end = self.first[at.partition], self.ends[at.partition]
            if not first <= offset <= end:
                raise OffsetOutOfRange(at.topic, at.partition, offset, first, end)
        self.groups.check_commit(group, member, generation, asked)
        self.committed |= asked

    def fetch(self, frame: Frame) -> Frame:
        """Answer a FETCH with up to three messages, as the binary door does."""
        wanted = FetchRequest("t", int(frame.properties["partition"]), int(frame.properties["offset"]))
        first, end = self.first[wanted.partition], self.ends[wanted.partition]
        if wanted.offset < first:
            about = {"status": "error", "code": "OFFSET_OUT_OF_RANGE", "first": str(first), "end": str(end)}
            return Frame(MessageType.ACK, frame.sequence_number, 0, about, b"")
        offsets = range(wanted.offset, max(min(wanted.offset + 3, end), wanted.offset))
        frames = [encode_frame(MessageType.DATA, offset, 1, {"topic": "t"}, b"%d" % offset) for offset in offsets]
        starts = list(accumulate(map(len, frames), initial=0))[:-1]
        body = struct.pack(f">{len(starts)}I", *starts) + b"".join(frames)
        about = {"status": "success", "offset": str(wanted.offset), "count": str(len(offsets))}
        return Frame(MessageType.ACK, frame.sequence_number, 0, about, body)


class Member:
    """A consumer without threads: one step at a time."""

    def __init__(self, broker: Broker, name: str = "a", **changed: Any) -> None:
        """Its ids start with `name`, which decides what it gets."""
        self.broker = broker
        self.state = ConsumerState(options(**changed), lambda: f"{name}-{next(LIVES)}")
        self.assigned = self.state.assigned
        self.fetcher = Fetcher(self.assigned, Conversation())
        self.fetcher.welcomed()
        self.in_hand: PartitionProgress | None = None
        self.got: list[tuple[int, int]] = []  # partition and offset of all that was handed out

    def say(self, now: float, *, answered: bool = True) -> ConsumerRequest | None:
        """Send the request that is due; the answer may get lost."""
        ask = self.state.next_ask(now)
        if ask is None:
            return None
        try:
            answer = self.broker.call(ask, now)
        except BrokerError as error:
            if answered:
                self.state.refused(ask, refusal(REPLIES[type(error)].code, str(error)), now)
        else:
            if answered:
                self.state.answered(ask, answer, now)
        if not answered:
            self.state.unanswered(ask, now)
        return ask

    def settle(self, now: float) -> list[str]:
        """Say all that there is to say; return the methods."""
        said = []
        while ask := self.say(now):
            said.append(ask.method)
        return said

    def fetch(self, now: float) -> None:
        """Fetch, and get the answers at once."""
        data, at = self.fetcher.compose(now), 0
        while at < len(data):
            self.fetcher.answered(self.broker.fetch(decode_frame(data, at)), now)
            at += frame_length(data, at)

    def next(self, now: float) -> tuple[int, int] | None:
        """Ask for the next message, as iteration does; return its partition and offset."""
        held = self.in_hand
        if held is not None:
            held.handled = held.handed
        if held is None or held.stopped or now >= self.state.sure_until or not length_hint(held.messages):
            self.assigned.finish()
            held = self.in_hand = self.state.take(now)
        message = next(held.messages, None) if held else None
        if held is None or message is None:
            self.assigned.finish()
            self.in_hand = None
            return None
        held.handed = message.offset + 1
        self.got.append((message.partition, message.offset))
        return self.got[-1]

    def consume(self, now: float) -> list[tuple[int, int]]:
        """Fetch and handle until there is no more; return what came."""
        before = len(self.got)
        while True:
            self.fetch(now)
            if self.next(now) is None:
                return self.got[before:]

    def lose_connection(self) -> None:
        self.fetcher.lost()
        self.state.connection_lost()
        self.fetcher.welcomed()
