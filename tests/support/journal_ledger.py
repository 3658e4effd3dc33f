"""Owners of a journal in processes of their own, and the ledger of what they acked."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

from qb.replication.journal.journal import JournalEntry
from tests.support.brokers import ROOT
from tests.support.journal_owner import payload_of

WINDOW = 16


class OwnerProcess:
    """An owner in a process of its own, and the ledger of what it acked."""

    def __init__(self, urls: str, cell: str, name: str = "process") -> None:
        self.name = name
        command = [sys.executable, "-m", "tests.support.journal_owner", urls, cell, name, str(WINDOW)]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        self.epoch = 0
        self.acks: dict[int, int] = {}  # number of the payload: its position
        self.is_fenced = False
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if not line.endswith("\n"):
                return  # it was killed in the middle of the line
            word, *numbers = line.split()
            if word == "owner":
                self.epoch = int(numbers[0])
            elif word == "ack":
                self.acks[int(numbers[0])] = int(numbers[1])
            else:
                self.is_fenced = word == "fenced"

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """As kill -9; returns when everything that it printed has been read."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._thread.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


def check(owner: OwnerProcess, entries: list[JournalEntry]) -> None:
    """Every ack is at its position, byte for byte, and no payload is there twice."""
    assert lost(owner, entries) == []
    payloads = [entry.payload for entry in entries if entry.payload is not None]
    assert len(set(payloads)) == len(payloads)


def lost(owner: OwnerProcess, entries: list[JournalEntry]) -> list[int]:
    """Return the numbers of the payloads that were acked and do not lie where the ack says."""
    stored = {entry.position: entry.payload for entry in entries}
    acks = owner.acks.items()
    return [number for number, position in acks if stored.get(position) != payload_of(owner.name, number)]
