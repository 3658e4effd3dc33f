"""No fuzzed HELLO and no fuzzed auth line logs in, harms another peer, or has a traceback logged."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import trio

from qb.core.rights.log_in_pace import LogInPace
from qb.core.rights.users_file import hash_of, make_token, parse_user, write_users
from qb.core.wire.frames import MessageType, encode_frame
from tests.support.line_peers import LinePeer

PIECES = [
    "",
    "qb_",
    "sha256:",
    "\ufffd",
    "é" * 50,
    "x" * 5_000,
    "new",
    "1",
    "-1",
    "anonymous",
    "ops",
    " ",
    "\n",
    "NaN",
    "{}",
]
NAMES = ["token", "protocol", "producer_id", "producer_secret", "compression", "compressed_answers", "client_id", "x"]


def properties(chance: random.Random, known: str) -> dict[str, str]:
    """Return the properties of a HELLO that is nearly right, with no token of a user."""
    pieces = [*PIECES, known[:-1], known + "x", hash_of(known), known.swapcase()]
    made = {name: "".join(chance.choices(pieces, k=chance.randrange(1, 3))) for name in chance.sample(NAMES, k=4)}
    made = {name: text for name, text in made.items() if text != known}
    return {"protocol": "1", **made} if chance.random() < 0.7 else made


@pytest.mark.parametrize("seed", range(4))
async def test_no_fuzzed_hello_logs_in_and_the_broker_goes_on(
    a_broker: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    chance, token = random.Random(seed), make_token()
    write_users(str(tmp_path / "users"), [parse_user(["user", "ops", f"sha256:{hash_of(token)}", "admin:*"])])
    with trio.fail_after(50):
        async with a_broker(security={"users_file": str(tmp_path / "users")}) as connect:
            ops = await connect()
            answer = await ops.ask(MessageType.HELLO, 1, protocol="1", token=token)
            assert answer.properties["status"] == "success"
            for _ in range(60):
                peer = await connect()
                connect.broker.access.log_ins = LogInPace()  # or the failures would slow each other down
                data = bytearray(encode_frame(MessageType.HELLO, 1, 0, properties(chance, token)))
                for _ in range(chance.choice([0, 0, 1, 3])):
                    data[chance.randrange(4, len(data))] = chance.randrange(256)
                await peer.stream.send_all(bytes(data))
                await peer.stream.send_all(encode_frame(MessageType.REQUEST, 2, 0, {"method": "list_topics"}, b"{}"))
                await peer.stream.send_eof()
                while (answer := await peer.receive()) is not None:
                    assert answer.properties.get("status") != "success", answer
                line: LinePeer = await connect.lines()
                await line.send(type="auth", token=properties(chance, token).get("token", chance.choice(PIECES)))
                assert not (await line.receive())["ok"]
                await trio.aclose_forcefully(line.stream)
            assert await ops.call("list_topics") == []
    assert "Traceback" not in caplog.text
    assert token not in caplog.text
