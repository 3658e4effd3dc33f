"""The fetches of a consumer that are on their way."""

from __future__ import annotations

from qb.clients.consuming.assigned_partitions import AssignedPartitions, PartitionProgress
from qb.clients.protocol.client_errors import RequestRefused
from qb.clients.protocol.conversation import Conversation
from qb.clients.protocol.fetch_requests import FetchRequest, portion_in
from qb.core.wire.errors import PeerMisbehaved
from qb.core.wire.frames import Frame, MessageType


class Fetcher:
    """Asks for what the assigned partitions want, and hands them what comes."""

    def __init__(self, assigned: AssignedPartitions, conversation: Conversation) -> None:
        self._assigned, self._conversation = assigned, conversation
        self._sent: dict[int, tuple[PartitionProgress, FetchRequest]] = {}
        self._connected = False

    def is_due(self, now: float) -> bool:
        """Is there something to fetch, and a connection?"""
        return self._connected and bool(self._assigned.wanting(now))

    def compose(self, now: float) -> bytes:
        """Return the fetches to send now; they count as sent."""
        frames = []
        for held in self._assigned.wanting(now):
            wanted = self._assigned.fetch(held)
            number, frame = self._conversation.compose(MessageType.FETCH, wanted.properties())
            self._sent[number] = held, wanted
            frames.append(frame)
        return b"".join(frames)

    def answered(self, answer: Frame, now: float) -> Exception | None:
        """Take in an answer, if it is one to a fetch; return why there are no messages in it."""
        if answer.sequence_number not in self._sent:
            return None
        held, wanted = self._sent.pop(answer.sequence_number)
        try:
            self._assigned.fetched(held, portion_in(answer, wanted))
        except (RequestRefused, PeerMisbehaved) as error:
            self._assigned.not_fetched(held, error, now)
            return error
        return None

    def welcomed(self) -> None:
        """There is a connection."""
        self._connected = True

    def lost(self) -> None:
        """It is gone, and the answers with it."""
        self._connected = False
        for held, _ in self._sent.values():
            held.fetching = False
        self._sent.clear()
