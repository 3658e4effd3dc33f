"""Commands that run in this process, with a clean environment."""

from __future__ import annotations

import os

import pytest

from qb.cli.main import main
from tests.support.brokers import BrokerProcess
from tests.support.commands import Done, Run


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in this process, with a clean environment."""
    for name in [name for name in os.environ if name.startswith("QB_")]:
        monkeypatch.delenv(name)

    def run(*argv: str) -> Done:
        return Done(main(argv), *capsys.readouterr())

    return run


@pytest.fixture
def qb(offline: Run, shared: BrokerProcess, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command in this process against the shared broker, which the environment names."""
    monkeypatch.setenv("QB_SERVER_PORT", str(shared.port))
    return offline
