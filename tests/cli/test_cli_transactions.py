"""`qb transactions`, for operators: what is under way, and what becomes of a transaction that cannot be finished."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import msgspec
import pytest

from qb.cli.main import main
from qb.core.wire.frames import MessageType
from tests.support.brokers import BrokerProcess
from tests.support.peers import Peer
from tests.support.transaction_peers import data
from tests.support.waiting import wait_until

pytestmark = pytest.mark.process
Run = Callable[..., tuple[int, str]]


@pytest.fixture
def qb(broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command against the broker; returns the exit code and what it printed."""
    for name in [name for name in os.environ if name.startswith("QB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("QB_SERVER_PORT", str(broker.port))

    def run(*argv: str) -> tuple[int, str]:
        code = main(["transactions", *argv])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return run


def test_a_transaction_that_cannot_be_finished_is_shown_and_abandoned(broker: BrokerProcess, qb: Run) -> None:
    assert qb("list") == (0, "nothing is staged; 0 committed transactions remembered\n")
    with Peer(broker.port) as peer:
        peer.hello()
        peer.create_topic("t")
        stage = peer.call("begin_transaction", transaction="x")["stage"]
        peer.send(MessageType.STAGE, 1, data("t", b"lost"), stage=stage, topic="t", partition="0", first="0")
        assert peer.receive().properties["status"] == "success"
        assert qb("show", "x") == (0, f"x: open\n  stage {stage}: 1 message\n")
        (broker.data_dir / "staged" / f"{stage}.log").write_bytes(b"")
        commit = msgspec.json.encode({"transaction": "x", "stages": [{"stage": stage, "messages": 1}]})
        peer.send(MessageType.REQUEST, 2, commit, method="commit_transaction")
        wait_until(lambda: qb("show", "x")[1].startswith("x: unfinished"))
        assert [each["transaction"] for each in json.loads(qb("list", "--json")[1])["unfinished"]] == ["x"]
        code, text = qb("finish", "x")
        assert (code, text.startswith("qb: transaction 'x' is committed but not visible yet")) == (1, True)
        code, text = qb("abandon", "x")
        assert (code, "t/0: 0 of 1 message copied" in text, "add --yes" in text) == (1, True, True)
        assert qb("abandon", "x", "--yes") == (0, "x is abandoned: 0 messages of it can be seen\n")
        assert qb("show", "x") == (0, "x: abandoned\n")
    assert qb("list") == (0, "nothing is staged; 1 committed transaction remembered\n")
    code, text = qb("finish", "none")
    assert (code, text) == (1, "qb: there is no transaction 'none'; see: qb transactions list\n")
