"""The audit: a line for each log-in, refusal and administrative act, and never a token or a body."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trio

from qb.core.rights import audit
from qb.core.rights.audit import Audit
from qb.core.rights.users_file import hash_of, parse_users, write_users
from qb.core.wire.frames import MessageType

OPS, BILLING, WRONG = "qb_ops-token", "qb_billing-token", "qb_wrong-token"
BODY = "a-very-private-body"


def secured(a_broker: Any, tmp_path: Path) -> Any:
    text = (
        f"user ops sha256:{hash_of(OPS)} admin:*\nuser billing sha256:{hash_of(BILLING)} publish:orders connections:2\n"
    )
    known = parse_users(f"{text}address 127.0.0.1 connections:6\n".encode(), "f")
    write_users(str(tmp_path / "users"), known.users.values(), known.addresses)
    return a_broker(security={"users_file": str(tmp_path / "users"), "audit_file": str(tmp_path / "audit")})


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_log_ins_refusals_and_administrative_acts_of_every_door_have_a_line(
    a_broker: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    with trio.fail_after(30):
        async with secured(a_broker, tmp_path) as connect:
            peer = await connect()
            await peer.ask(MessageType.HELLO, 1, protocol="1", token=WRONG)
            peer = await connect()
            await peer.ask(MessageType.HELLO, 1, protocol="1", token=OPS)
            for topic in ("orders", "secret"):
                await peer.call("create_topic", topic=topic)
            line = await connect.lines()
            await line.data("auth", token=BILLING)
            await line.data("produce", topic="orders", value=BODY)
            await line.error("produce", topic="secret", value=BODY)
            http, headers = await connect.http(), {"authorization": f"Bearer {BILLING}"}
            assert (await http.ask("DELETE", "/topics/orders", headers=headers)).status == 403
            assert (await http.ask("POST", "/login", {"token": WRONG})).status == 401
            late = await connect()
            assert (await late.ask(MessageType.HELLO, 1, protocol="1", token=BILLING)).properties["status"] == "success"
            over = await connect()
            await over.ask(MessageType.HELLO, 1, protocol="1", token=BILLING)
            last = [await connect() for _ in range(8)][-1]
            assert (await last.receive()).properties["code"] == "QUOTA_EXCEEDED"
    noted = [
        (each["user"], each["door"], each["action"], each["on"], each["outcome"])
        for each in lines_of(tmp_path / "audit")
    ]
    for expected in (
        ("anonymous", "frames", "log in", [], "UNAUTHENTICATED"),
        ("ops", "frames", "log in", [], "ok"),
        ("ops", "frames", "create_topic", ["secret"], "allowed"),
        ("billing", "json", "log in", [], "ok"),
        ("billing", "json", "produce", ["secret"], "UNKNOWN_TOPIC"),
        ("billing", "http", "DELETE /topics/{topic}", ["orders"], "FORBIDDEN"),
        ("anonymous", "http", "log in", [], "UNAUTHENTICATED"),
        ("billing", "frames", "log in", [], "QUOTA_EXCEEDED"),
        ("", "frames", "connect", [], "QUOTA_EXCEEDED"),
    ):
        assert expected in noted, expected
    everything = (tmp_path / "audit").read_text() + caplog.text
    assert [each for each in (OPS, BILLING, WRONG, BODY) if each in everything] == []


def test_a_file_is_rotated_and_the_oldest_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "FILE_BYTES", 2_000)
    monkeypatch.setattr(audit, "FILES", 3)
    kept = Audit(str(tmp_path / "audit"))
    for number in range(200):
        kept.note("a", "127.0.0.1:1", "frames", "publish", [f"topic-{number}", "x" * 10_000], "FORBIDDEN")
    kept.close()
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["audit", "audit.1", "audit.2", "audit.3"]
    assert all(path.stat().st_size <= 2_000 for path in tmp_path.iterdir())
    assert lines_of(tmp_path / "audit")[-1]["on"] == ["topic-199", "x" * audit.LONGEST_NAME]
