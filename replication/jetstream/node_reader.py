"""Reads one node's own copy of a stream.

A consumer with one replica in memory lives on one node of the stream, and reads what that node has. Which node that is
the answer to its creation says; it cannot be chosen. So consumers are made until each wanted node has one.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress

import msgspec
import trio

from qb.replication.jetstream.jetstream_api import JetStreamRefused, call
from qb.replication.jetstream.stream_follower import StreamPull, consumer_config
from qb.replication.journal.journal_store import StoredRecord
from qb.replication.nats.nats_client import NatsClient
from qb.replication.nats.nats_protocol import NatsError

TRIES = 40  # consumers that are made for one node; with three nodes one of 10 million series misses it
EXPIRES = 1.0  # seconds in which a node gives something, if it has it
SPARE = 1.0  # seconds more, for the answer that it has nothing
FAILURES = (JetStreamRefused, NatsError, trio.TooSlowError)


class NodeReader:
    """Reads on from a position. Belongs to the event loop's thread; close() it."""

    def __init__(self, client: NatsClient, stream: str, node: str, consumer: str) -> None:
        """Use open_readers()."""
        self.node = node
        self._client, self._stream, self._consumer = client, stream, consumer
        self._pull = StreamPull()
        self._inbox = client.new_inbox()
        self._sid = client.subscribe(self._inbox, self._pull.replied)

    async def read(self, most: int, most_bytes: int) -> list[StoredRecord]:
        """Return what comes next, in order; nothing if the node gives nothing for a second, or has gone."""
        request = msgspec.json.encode({"batch": most, "max_bytes": most_bytes, "expires": int(EXPIRES * 1e9)})
        self._pull.begin(most)
        self._client.publish(f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._consumer}", request, reply=self._inbox)
        with trio.move_on_after(EXPIRES + SPARE):
            while not self._pull.is_over:
                await self._pull.changed.wait()
        return self._pull.take()

    async def close(self) -> None:
        """Remove the consumer; if that fails the server does so by itself after a minute."""
        self._client.unsubscribe(self._sid)
        with suppress(*FAILURES):
            await call(self._client, f"CONSUMER.DELETE.{self._stream}.{self._consumer}", timeout=EXPIRES)


async def open_readers(
    client: NatsClient, stream: str, nodes: Collection[str], first: int, most_tries: int = TRIES
) -> dict[str, NodeReader]:
    """Return readers of these nodes, each from position `first` on; without those that give no answer."""
    found: dict[str, NodeReader] = {}
    request = {"stream_name": stream, "config": consumer_config(first)}
    for _ in range(most_tries * len(nodes)):
        if len(found) == len(nodes):
            break
        try:
            made = await call(client, f"CONSUMER.CREATE.{stream}", request)
        except FAILURES:
            await trio.sleep(EXPIRES / 10)
            continue
        server = client.server
        node = (made.get("cluster") or {}).get("leader") or (server.server_name if server else "")
        reader = NodeReader(client, stream, node, str(made["name"]))
        if node in nodes and node not in found:
            found[node] = reader
        else:
            await reader.close()
    return found
