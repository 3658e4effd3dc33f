"""Whole cells are harmed, one fault after another, and the ledger of acks is compared with what is stored.

python -m tests.campaign --hours 2 [--seed N] [--resume DIR]
python -m tests.campaign --seed 17 --faults 'owner killed' --trials 1

Three brokers and three NATS nodes run as processes, each with a network and a disk of its own, for which it must be
root on Linux; without that it does what it can, and says what it left out. It prints each fault, and at the end a
table and one JSON line; its directory keeps the table and all trials. It exits with 1 if an ack was lost, something
stored twice, a stale answer given, or a cell did not serve again. The same seed gives the same faults, not the same
outcome: the processes are real.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import signal
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from tests.campaign.campaign import Campaign, CampaignState, as_json, has_failed, load_state, table
from tests.campaign.faults import FAKETIME, FAULTS, OTHER_VERSION, Fault
from tests.support.machines import ISOLATED, can_isolate, can_mount, isolated


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaign")
    parser.add_argument("--hours", type=float, default=None, help="how long")
    parser.add_argument("--trials", type=int, default=None, help="how many faults")
    parser.add_argument("--seed", type=int, default=None, help="number of the first trial; default: drawn, and printed")
    parser.add_argument("--faults", nargs="+", default=[], choices=[each.name for each in FAULTS], metavar="FAULT")
    parser.add_argument("--directory", type=Path, metavar="DIR", help="where all is kept; default: a temporary one")
    parser.add_argument("--resume", type=Path, metavar="DIR", help="go on in the directory of an earlier campaign")
    parser.add_argument("--list", action="store_true", help="list the faults")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(each.name for each in FAULTS))
        return 0
    if ISOLATED not in os.environ and not can_isolate():
        os.execvp("unshare", isolated([sys.executable, *sys.orig_argv[1:]]))
    return _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    seed = random.randrange(1 << 20) if arguments.seed is None else arguments.seed
    directory = arguments.resume or arguments.directory or Path(tempfile.mkdtemp(prefix="qb-campaign-"))
    state = load_state(directory) if arguments.resume else CampaignState(seed)
    print(f"seed {state.seed}, in {directory}", file=sys.stderr, flush=True)
    logging.disable(logging.WARNING)  # what clients say of lost connections
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so it ends in good order
    end = time.monotonic() + 3600 * (arguments.hours if arguments.hours is not None else 24)
    most = arguments.trials if arguments.trials is not None else len(FAULTS) if arguments.hours is None else 1 << 30
    campaign = Campaign(directory, state, _skipped)
    try:
        campaign.run(lambda done: done < most and time.monotonic() < end, arguments.faults)
    except KeyboardInterrupt:
        print(f"interrupted; go on with --resume {directory}", file=sys.stderr)
    wanted = [each for each in FAULTS if not arguments.faults or each.name in arguments.faults]
    skipped = [(each.name, why) for each in wanted if (why := _skipped(each))]
    found = table(state, skipped)
    (directory / "table.md").write_text(found + "\n")
    print(f"{found}\n{as_json(state)}")
    return int(has_failed(state))


def _skipped(fault: Fault) -> str:
    """Return why a fault cannot be done here; empty if it can."""
    return ", ".join(why for each in fault.needs.split() if (why := _missing(each)))


def _missing(need: str) -> str:
    if need == "networks":
        return "" if ISOLATED in os.environ else can_isolate()
    if need == "disks":
        return can_mount() if ISOLATED in os.environ else can_isolate()
    if need == "faketime":
        return "" if FAKETIME.exists() else f"there is no {FAKETIME}"
    if need == "spark":
        return "" if find_spec("pyspark") else "pyspark is not installed"
    if need == "versions":
        return "" if OTHER_VERSION in os.environ else f"{OTHER_VERSION} names no server.py of another version"
    return ""


if __name__ == "__main__":
    raise SystemExit(main())
