"""What a compressed frame holds is checked as if it had been sent as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import trio

from qb.core.rights.users_file import hash_of, parse_user, write_users
from qb.core.wire.compression.compressed_frames import compress
from qb.core.wire.frames import MessageType, encode_frame


def run(topic: str, first: int) -> bytes:
    publishes = [
        encode_frame(MessageType.PUBLISH, n, 0, {"topic": topic}, b"tea" * 9) for n in range(first, first + 50)
    ]
    made = compress("zstd", (b"".join(publishes),), first)
    assert made is not None
    return made


async def test_a_compressed_run_needs_the_right_to_publish_to_its_topic(a_broker: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "users")
    words = ["user", "till", f"sha256:{hash_of('qb_till')}", "publish:orders", "manage:*"]
    write_users(path, [parse_user(words)])
    with trio.fail_after(30):
        async with a_broker(security={"users_file": path}) as connect:
            stranger, till = await connect(), await connect()
            assert (await stranger.ask(MessageType.HELLO, 1, protocol="1", compression="zstd")).properties["code"]
            answer = await till.ask(MessageType.HELLO, 1, protocol="1", compression="zstd", token="qb_till")
            assert answer.properties["compression"] == "zstd"
            for topic in ("orders", "secret"):
                await till.call("create_topic", topic=topic)
            await till.stream.send_all(run("orders", 1) + run("secret", 51))
            stored, refused = await till.receive(), await till.receive()
    by_number = {answer.sequence_number: answer.properties for answer in (stored, refused)}
    assert (by_number[1]["status"], by_number[1]["count"]) == ("success", "50")
    assert (by_number[51]["code"], by_number[51]["count"]) == ("FORBIDDEN", "50")
