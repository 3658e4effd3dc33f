"""A minute of the campaign against whole cells; `python -m tests.campaign --hours 2` is the whole one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from tests.campaign.campaign import CampaignState, Trial, fault_of, has_failed, table
from tests.campaign.faults import FAULTS
from tests.support.brokers import ROOT

SHORT = ("owner killed", "owner cut off from NATS", "power cut of all NATS nodes")


@pytest.mark.cluster
@pytest.mark.process
@pytest.mark.timeout(240)
@pytest.mark.skipif(sys.platform != "linux", reason="it stops and cuts off processes as Linux can")
def test_nothing_acked_is_lost_doubled_or_read_stale(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.campaign", "--directory", str(tmp_path), "--trials", str(len(SHORT))]
    done = subprocess.run([*command, "--faults", *SHORT], cwd=ROOT, capture_output=True, text=True, timeout=220)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["acks"] > 0
    assert found["trials"] == len(SHORT)


def test_each_fault_comes_once_in_every_turn_and_a_number_names_the_same_one_again() -> None:
    numbers = range(len(FAULTS) * 5, len(FAULTS) * 6)
    assert sorted(fault_of(number, FAULTS).name for number in numbers) == sorted(each.name for each in FAULTS)
    assert [fault_of(number, FAULTS) for number in numbers] == [fault_of(number, FAULTS) for number in numbers]


@pytest.mark.parametrize("what", ["lost", "doubled", "torn", "stale"])
def test_one_broken_promise_makes_a_campaign_fail(what: str) -> None:
    name = Random(1).choice(FAULTS).name
    good, bad = Trial(1, name, acks=5), Trial(2, name, acks=7, **{what: 1})
    assert not has_failed(CampaignState(1, [good]))
    assert has_failed(CampaignState(1, [good, bad]))
    assert has_failed(CampaignState(1, [good], findings=["a log is damaged"]))
    assert f"| {name} | 2 | 1 | 12 |" in table(CampaignState(1, [good, bad]), [])
