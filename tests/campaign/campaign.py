"""Trials one after another: a cell that works, one fault, and the ledger compared with what is stored."""

from __future__ import annotations

import json
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import msgspec

from qb.storage.verification import verify
from tests.campaign.campaign_cell import BROKERS, NATS, CampaignCell
from tests.campaign.faults import FAULTS, Fault
from tests.support.cluster_ledger import Findings
from tests.support.cluster_load import ClusterLoad
from tests.support.journal_reading import behind_fences, stored_records
from tests.support.machines import Machines
from tests.support.waiting import wait_until

PATIENCE = 120.0  # seconds that anything waits for the cell
PAUSE = 0.005  # seconds between two pieces of work of each thread of the load
KEPT = 2  # loads of earlier trials that are compared again
TRIALS_A_CELL = 10
LEAST_ROOM = 150 << 20  # bytes that each disk has, else a new cell is made


class Trial(msgspec.Struct):
    """One fault and what came of it."""

    number: int  # its seed
    fault: str
    acks: int = 0
    reads: int = 0  # answers that had to be current
    lost: int = 0
    doubled: int = 0
    torn: int = 0
    stale: int = 0
    outdated: int = 0  # answers that were stale and need not be current, since clocks differed
    longest_gap: float = 0.0  # seconds
    takeovers: int = 0
    seconds: float = 0.0
    error: str = ""
    steps: list[str] = []

    @property
    def failed(self) -> bool:
        return bool(self.lost or self.doubled or self.torn or self.stale or self.error)


class CampaignState(msgspec.Struct):
    """What is kept of a campaign, so that it can go on."""

    seed: int
    trials: list[Trial] = []
    cells: int = 0
    behind_fences: int = 0  # records of older epochs behind a fence
    findings: list[str] = []  # in the directories of brokers


class Campaign:
    """Runs trials in a directory, where its state and the logs of all processes are kept."""

    def __init__(self, directory: Path, state: CampaignState, skipped: Callable[[Fault], str]) -> None:
        """`skipped` says why a fault cannot be done here; empty if it can."""
        self.directory, self.state = directory, state
        self.faults = [each for each in FAULTS if not skipped(each)]
        kinds = {need for each in self.faults for need in each.needs.split()}
        self._machines = Machines([*NATS, *BROKERS]) if "networks" in kinds else None
        self._disks = "disks" in kinds
        self._cell: CampaignCell | None = None
        self._trials_of_cell = 0
        self._kept: list[ClusterLoad] = []
        self._steps: list[str] = []
        self._began = time.monotonic()

    def run(self, goes_on: Callable[[int], bool], names: Sequence[str] = ()) -> None:
        """Do trials as long as `goes_on(trials so far)` says so, of all faults or of those with these names."""
        chosen = [each for each in self.faults if not names or each.name in names]
        try:
            done = 0
            while chosen and goes_on(done):
                number = self.state.seed + len(self.state.trials)
                self._try(number, fault_of(number, chosen))
                done += 1
        finally:
            self._end_cell()
            self._save()

    def _save(self) -> None:
        written = self.directory / "campaign.json.new"
        written.write_bytes(msgspec.json.format(msgspec.json.encode(self.state)))
        written.replace(self.directory / "campaign.json")

    def _note(self, step: str) -> None:
        self._steps.append(f"{time.monotonic() - self._began:8.2f}  {step}")

    # One trial

    def _try(self, number: int, fault: Fault) -> None:
        trial = Trial(number, fault.name)
        self._steps.clear()
        began = time.monotonic()
        print(f"{number}: {fault.name}", end=" ", file=sys.stderr, flush=True)
        try:
            self._harm(self._whole_cell(), trial, fault)
        except Exception as error:
            trial.error = "".join(traceback.format_exception(error)).strip()
        trial.seconds = round(time.monotonic() - began, 1)
        trial.steps = list(self._steps)
        self.state.trials.append(trial)
        print(in_words(trial), file=sys.stderr, flush=True)
        if trial.failed:
            self._give_up_cell(trial)
        self._save()

    def _harm(self, cell: CampaignCell, trial: Trial, fault: Fault) -> None:
        epoch = cell.wait_for_owner(1, PATIENCE)["epoch"]
        load = ClusterLoad(cell.servers, f"t{trial.number}", cell.lines, patience=PATIENCE, pause=PAUSE)
        load.ledger.clocks_differ = fault.spoils_clocks
        try:
            with load.running() as ledger:
                ledger.longest_gap = 0.0
                self._note(f"{fault.name}: the owner is {cell.owner()}")
                try:
                    fault.act(cell, Random(trial.number))
                finally:
                    cell.heal()
                self._note("healed")
                self._wait_for_work(load)
                self._note("it works again")
                trial.longest_gap = round(ledger.longest_gap, 3)
        finally:
            trial.acks, trial.reads = len(load.ledger.stored) + len(load.ledger.committed), load.ledger.reads
        trial.outdated = len(load.ledger.outdated)
        trial.takeovers = cell.status()["epoch"] - epoch
        if load.ledger.faults:
            raise load.ledger.faults[0]
        for each in (load, *self._kept):
            self._count(trial, each.judge())
        cell.wait_until_whole(PATIENCE)
        self._note("it is whole")
        self._kept.append(load)
        while len(self._kept) > KEPT:
            self._kept.pop(0).delete()

    def _wait_for_work(self, load: ClusterLoad) -> None:
        ledger = load.ledger
        acked, committed = len(ledger.stored), len(ledger.committed)
        more = lambda: len(ledger.stored) > acked + 100 and len(ledger.committed) > committed + 1  # noqa: E731
        wait_until(lambda: ledger.faults or more(), PATIENCE)

    def _count(self, trial: Trial, found: Findings) -> None:
        trial.lost += len(found.lost)
        trial.doubled += len(found.doubled)
        trial.torn += len(found.torn)
        trial.stale += len(found.stale)
        for kind, each in found._asdict().items():
            for what in each[:5]:
                self._note(f"{kind}: {what}")

    # Cells

    def _whole_cell(self) -> CampaignCell:
        """Return a cell in which all is well."""
        cell = self._cell
        if cell is not None:
            full = any(disk.free_bytes < LEAST_ROOM for disk in cell.disks.values())
            if full or self._trials_of_cell >= TRIALS_A_CELL:
                self._end_cell()
        if self._cell is None:
            self.state.cells += 1
            self._trials_of_cell = 0
            directory = self.directory / f"cell-{self.state.cells}"
            shutil.rmtree(directory, ignore_errors=True)
            self._cell = CampaignCell(directory, machines=self._machines, disks=self._disks)
            self._cell.start()
        self._trials_of_cell += 1
        self._cell.wait_until_whole(PATIENCE)
        return self._cell

    def _end_cell(self) -> None:
        """Stop the brokers in good order, and prove the journal and every copy."""
        cell, self._cell = self._cell, None
        self._kept.clear()
        if cell is None:
            return
        try:
            cell.heal()
            cell.wait_until_whole(PATIENCE)  # what has just been started does not know SIGTERM yet
            cell.end(*BROKERS)
            self.state.behind_fences += behind_fences(stored_records(cell.urls, "main"))
            for name in BROKERS:
                found = verify(cell.directory / name / "data").findings
                self.state.findings += [f"cell {self.state.cells}, {name}: {each}" for each in found]
        except Exception as error:
            self.state.findings.append(f"cell {self.state.cells} did not end in good order: {error!r}")
        finally:
            cell.stop()

    def _give_up_cell(self, trial: Trial) -> None:
        """Keep the logs of a cell in which a trial failed, and have a new one made."""
        cell, self._cell = self._cell, None
        self._kept.clear()
        print("\n".join([again(trial), *trial.steps, trial.error]), file=sys.stderr, flush=True)
        if cell is not None:
            print("\n".join(cell.last_words()), file=sys.stderr, flush=True)
            cell.stop()


def fault_of(number: int, faults: Sequence[Fault]) -> Fault:
    """Return the fault of a trial: each of them comes once in every so many trials, in an order of chance."""
    turn, place = divmod(number, len(faults))
    return Random(turn).sample(faults, len(faults))[place]


def again(trial: Trial) -> str:
    """Return how a trial is repeated."""
    return f"again: python -m tests.campaign --seed {trial.number} --faults '{trial.fault}' --trials 1"


def in_words(trial: Trial) -> str:
    """Return a line about a trial."""
    counts = f"{trial.acks} acks, {trial.lost} lost, {trial.doubled} doubled, {trial.torn} torn, {trial.stale} stale"
    failed = " FAILED" if trial.failed else ""
    return f"({counts}, longest gap {trial.longest_gap:.1f} s, {trial.takeovers} takeovers, {trial.seconds} s){failed}"


def table(state: CampaignState, skipped: Sequence[tuple[str, str]]) -> str:
    """Return what was found, as a table in Markdown."""
    lines = [
        "| fault | times | failed | acks | lost | doubled | torn | stale reads | of reads | longest gap |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(each.name for each in FAULTS):
        rows = [trial for trial in state.trials if trial.fault == name]
        if rows:
            lines.append(_row(name, rows))
    lines.append(_row("all", state.trials))
    for name, why in skipped:
        lines.append(f"not run: {name} ({why})")
    if outdated := sum(trial.outdated for trial in state.trials):
        lines.append(
            f"{outdated} answers were outdated while clocks differed, none of them asked for with consistent=1"
        )
    lines.append(f"{state.behind_fences} records of older epochs behind a fence, in {state.cells} cells")
    lines += [f"finding: {each}" for each in state.findings]
    return "\n".join(lines)


def _row(name: str, rows: Sequence[Trial]) -> str:
    def total(what: str) -> int:
        return sum(int(getattr(each, what)) for each in rows)

    counts = [total(each) for each in ("failed", "acks", "lost", "doubled", "torn", "stale", "reads")]
    gap = max((each.longest_gap for each in rows), default=0.0)
    return f"| {name} | {len(rows)} | {' | '.join(map(str, counts))} | {gap:.1f} s |"


def load_state(directory: Path) -> CampaignState:
    """Return the state of a campaign that is to go on. Raises OSError."""
    return msgspec.json.decode((directory / "campaign.json").read_bytes(), type=CampaignState)


def as_json(state: CampaignState) -> str:
    """Return the sums in one line of JSON."""
    sums = {
        name: sum(int(getattr(each, name)) for each in state.trials)
        for name in ("failed", "acks", "reads", "lost", "doubled", "torn", "stale", "takeovers")
    }
    gap = max((each.longest_gap for each in state.trials), default=0.0)
    return json.dumps(
        {"seed": state.seed, "trials": len(state.trials), **sums, "longest_gap": gap}
        | {"behind_fences": state.behind_fences, "findings": state.findings}
    )


def has_failed(state: CampaignState) -> bool:
    """Has any promise been broken?"""
    return bool(any(each.failed for each in state.trials) or state.behind_fences or state.findings)
