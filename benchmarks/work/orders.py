"""The messages of every case, and how a handler reads them: the same for all brokers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any
from zlib import crc32

import msgspec

KEYS = 1_000
PARTITIONS = 4
Parse = Callable[[bytes], Any]
PARSERS: dict[str, Parse] = {"msgspec": msgspec.json.decode, "json.loads": json.loads}


def orders(count: int) -> tuple[list[bytes], list[str]]:
    """Return JSON bodies of 80 to 400 bytes and their keys, always the same."""
    chance = Random(1)
    bodies = [_order(number, chance) for number in range(min(count, 20_000))]
    keys = [f"customer-{chance.randrange(KEYS)}" for _ in bodies]
    times = -(-count // len(bodies))
    return (bodies * times)[:count], (keys * times)[:count]


def _order(number: int, chance: Random) -> bytes:
    order = {"id": number, "customer": f"customer-{chance.randrange(KEYS)}", "total": chance.randrange(100_000) / 100}
    wanted = chance.randint(80, 400)
    order["note"] = "x" * max(0, wanted - len(json.dumps(order)) - 12)
    return json.dumps(order).encode()


def lines(count: int) -> list[bytes]:
    """Return bodies of 50 to 150 bytes."""
    chance = Random(2)
    some = [b"x" * chance.randint(50, 150) for _ in range(min(count, 20_000))]
    return (some * -(-count // len(some)))[:count]


def partition_of(key: str) -> int:
    """Return the partition of a key, for brokers whose clients have to choose."""
    return crc32(key.encode()) % PARTITIONS


def by_partition(bodies: Sequence[bytes], keys: Sequence[str]) -> list[list[bytes]]:
    """Return the bodies of each partition, in order."""
    parts: list[list[bytes]] = [[] for _ in range(PARTITIONS)]
    for body, key in zip(bodies, keys, strict=True):
        parts[partition_of(key)].append(body)
    return parts
