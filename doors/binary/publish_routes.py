"""Where a publish wants to go, read from the properties of its frame."""

from __future__ import annotations

from typing import NamedTuple

from qb.core.wire.errors import BadRequest
from qb.core.wire.frames import decode_properties
from qb.core.wire.message_rules import check_frame_properties

MOST_KNOWN = 1_024  # properties of one peer
LONGEST_KNOWN = 1_024  # bytes of properties; longer ones are parsed each time, or a peer could fill our memory


class Route(NamedTuple):
    """Where a publish wants to go."""

    topic: str
    partition: int | None
    key: str | None


class PublishRoutes(dict[bytes, Route]):
    """The routes of encoded properties, by these: a publisher repeats them, so they are parsed once.

    `routes[properties]` raises PeerMisbehaved or BadRequest for properties that a PUBLISH cannot have.
    """

    def __missing__(self, encoded: bytes) -> Route:
        route = _route(encoded)
        if len(self) >= MOST_KNOWN:
            self.clear()
        if len(encoded) <= LONGEST_KNOWN:
            self[encoded] = route
        return route


def _route(encoded: bytes) -> Route:
    properties = decode_properties(encoded)
    topic, partition = properties.get("topic"), properties.get("partition")
    if topic is None:
        raise BadRequest("PUBLISH needs a property 'topic'")
    check_frame_properties(properties)
    if partition is None:
        return Route(topic, None, properties.get("key"))
    if not (partition.isascii() and partition.isdigit() and len(partition) < 10):
        raise BadRequest(f"partition must be a number from 0 on, not {partition[:40]!r}")
    return Route(topic, int(partition), properties.get("key"))
