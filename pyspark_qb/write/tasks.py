"""What the tasks of a write and its driver have in common."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from pyspark_qb.options.spark_options import SinkOptions
from qb.clients.blocking.client import BrokerClient


class StagedRows(NamedTuple):
    """What became of the rows of one task. No stage: there were no rows, or the transaction was committed before."""

    stage: str | None = None
    messages: int = 0
    replayed: bool = False


@contextmanager
def connected(options: SinkOptions) -> Iterator[BrokerClient]:
    """A client of the broker, which is waited for. Raises BrokerUnavailable after `requestTimeout`."""
    straight = options.delivery == "at-least-once"  # then the broker has to know a publish that is sent again
    client = BrokerClient(
        client_id="spark",
        servers=options.servers,
        request_timeout=options.request_timeout,
        idempotent=straight,
        compression=options.compression,
        token_file=options.token_file,
        ca_file=options.ca_file,
    )
    client.connect(wait=options.request_timeout)
    try:
        yield client
    finally:
        client.disconnect()
