"""What proves that a peer may continue as a producer.

A secret is a keyed hash of the producer id, so nothing is kept for each producer: the broker makes the key once and
keeps it in its metadata. Producer ids are no secret: they stand in the seals, which any reader can fetch.
"""

from __future__ import annotations

import hmac
import secrets
from contextlib import suppress

from qb.core.wire.errors import ProducerFenced
from qb.storage.engine import Metadata, VersionConflict

KEY = "producers/key"
LENGTH = 32  # hex digits of a secret: 128 bits


class ProducerSecrets:
    """Makes and checks the secrets of producers."""

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata

    async def of(self, producer_id: int, owner: str = "") -> str:
        """Return the secret of a user's producer; the key is durable then. Raises DiskFull, Internal, ShuttingDown."""
        whose = f"{producer_id} {owner}" if owner else str(producer_id)
        return hmac.digest(await self._key(), whose.encode(), "sha256").hex()[:LENGTH]

    async def check(self, producer_id: int, secret: str, owner: str = "") -> None:
        """Raises ProducerFenced if this is not the secret of the producer, and as of()."""
        if not hmac.compare_digest((await self.of(producer_id, owner)).encode(), secret.encode()):
            raise ProducerFenced(f"this is not the secret of producer {producer_id}; ask for a new producer_id")

    async def _key(self) -> bytes:
        entry = self._metadata.get(KEY)
        if entry is None:
            with suppress(VersionConflict):  # another HELLO was first: its key is in force
                await self._metadata.put(KEY, secrets.token_hex(32), expected=0)
            entry = self._metadata.get(KEY)
            assert entry is not None
        return bytes.fromhex(entry.value)
