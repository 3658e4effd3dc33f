"""A message that kills its handler's process is found, isolated and dead-lettered; its neighbours do not suffer."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any, NamedTuple

import msgspec
import pytest

from qb.core.subscriptions.snapshot import SubscriptionSnapshot
from tests.support.subscription_tools import Bench, reopened


class How(NamedTuple):
    """How the processes work."""

    announces: bool = True
    threads: int = 1
    knows_suspects: bool = True


class Process:
    """A subscriber process that handles so many messages at a time and acks in batches, as the clients do."""

    def __init__(self, bench: Bench, name: str, poison: set[int], how: How) -> None:
        self.bench, self.name, self.poison, self.how = bench, name, poison, how
        self.finished: list[int] = []
        bench.subscription.join(name, announces=how.announces)

    def handle(self, offsets: list[int]) -> bool:
        """Handle a delivery; False if that was the end of the process."""
        while offsets:
            in_hand = self.take(offsets)
            offsets = offsets[len(in_hand) :]
            in_the_open = self.how.announces and self.bench.attempts[0, in_hand[0]] > 1
            if in_the_open:
                self.flush()
                for offset in in_hand:
                    self.bench.subscription.started(self.name, 0, offset)
            if self.poison.intersection(in_hand):
                self.bench.die(self.name)
                return False
            self.finished += in_hand
            if in_the_open or len(self.finished) >= 64:
                self.flush()
        self.flush()
        return True

    def take(self, offsets: list[int]) -> list[int]:
        """Return what is handled at the same time: one suspect, or as many other messages as there are threads."""
        others = [(0, offset) not in self.bench.suspects for offset in offsets]
        if not self.how.knows_suspects or all(others):
            return offsets[: self.how.threads]
        return offsets[: min(self.how.threads, max(1, others.index(False)))]

    def flush(self) -> None:
        self.bench.ack(self.name, *self.finished)
        self.finished.clear()


class Fleet:
    """As many processes as there should be: each that dies is replaced at once."""

    def __init__(self, bench: Bench, size: int, poison: set[int], **how: Any) -> None:
        self.bench, self.poison, self.how = bench, poison, How(**how)
        self.deaths = 0
        self.deliveries: Counter[int] = Counter()
        self.processes: dict[str, Process] = {}
        for _ in range(size):
            self.start()

    def start(self) -> None:
        name = f"p{len(self.processes) + self.deaths}"
        self.processes[name] = Process(self.bench, name, self.poison, self.how)

    def work(self) -> None:
        """Go on until everything is settled."""
        bench = self.bench
        while bench.subscription.describe(bench.ends).lag:
            for name, offsets in bench.deliver().items():
                self.deliveries.update(offsets)
                if not self.processes[name].handle(offsets):
                    del self.processes[name]
                    self.deaths += 1
                    self.start()
            bench.store_dead_letters()
            bench.letters, self.letters = [], [*getattr(self, "letters", []), *bench.letters]
            if not bench.subscription.describe(bench.ends).in_flight:
                bench.now = max(bench.now, bench.wakeup() or 0)


@pytest.mark.parametrize("processes", [1, 3])
@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("max_deliveries", [2, 3, 5])
def test_a_killer_is_dead_lettered_after_max_deliveries_deaths(
    processes: int, threads: int, max_deliveries: int
) -> None:
    bench = Bench(2000, max_deliveries=max_deliveries)
    fleet = Fleet(bench, processes, poison={700}, threads=threads)
    fleet.work()
    assert fleet.deaths == max_deliveries
    assert [(letter.offset, letter.attempts) for letter in fleet.letters] == [(700, max_deliveries)]
    assert "died while it had this message in hand" in fleet.letters[0].reason


def test_the_neighbours_of_a_killer_are_neither_lost_nor_dead_lettered_nor_sent_round_again_and_again() -> None:
    bench = Bench(2000, max_deliveries=5)
    fleet = Fleet(bench, 3, poison={700})
    fleet.work()
    neighbours = {offset: times for offset, times in fleet.deliveries.items() if offset != 700}
    assert set(neighbours) == set(range(2000)) - {700}
    assert max(neighbours.values()) <= 3, "once, once more as a suspect, once behind the culprit in the same window"


def test_several_killers_in_one_window_are_distinguished() -> None:
    bench = Bench(500, max_deliveries=3)
    fleet = Fleet(bench, 2, poison={10, 11, 300})
    fleet.work()
    assert sorted(letter.offset for letter in fleet.letters) == [10, 11, 300]
    assert fleet.deaths <= 3 * 3 + 1


def test_a_client_that_announces_nothing_is_served_with_more_care() -> None:
    bench = Bench(300, max_deliveries=3, max_in_flight=100)
    fleet = Fleet(bench, 2, poison={42}, announces=False)
    fleet.work()
    assert [letter.offset for letter in fleet.letters] == [42]
    assert fleet.deaths <= 4


@pytest.mark.parametrize("max_deliveries", [2, 3, 5])
def test_a_client_that_names_suspects_together_costs_a_death_more_only_if_two_are_enough(max_deliveries: int) -> None:
    bench = Bench(300, max_deliveries=max_deliveries)
    fleet = Fleet(bench, 1, poison={42}, threads=4, knows_suspects=False)
    fleet.work()
    assert [letter.offset for letter in fleet.letters] == [42]
    assert fleet.deaths == max(3, max_deliveries), "every death that it was a suspect of is charged to it"


def test_suspects_are_marked_until_the_death_is_explained() -> None:
    bench = Bench(3, "a", max_deliveries=5)
    bench.deliver()
    assert not bench.suspects
    bench.die("a")
    bench.subscription.join("b", announces=True)
    bench.deliver()
    assert bench.suspects == {(0, 0), (0, 1), (0, 2)}
    bench.nack("b", 2, delay=0)
    bench.deliver()
    assert bench.suspects == {(0, 0), (0, 1)}, "a handler has survived it"
    bench.subscription.started("b", 0, 0)
    bench.die("b")
    bench.subscription.join("c", announces=True)
    assert bench.deliver() == {"c": [1, 2]}
    assert (0, 1) not in bench.suspects, "the death has been explained"


def test_suspects_of_several_deaths_remember_them_all_also_after_a_restart() -> None:
    bench = Bench(3, "a", max_deliveries=4)
    for name in ("b", "c"):
        bench.deliver()
        bench.die("a" if name == "b" else "b")
        bench.subscription.join(name)
    bench.restart("d")
    assert bench.deliver() == {"d": [0]}, "they are suspects for the second time, so they go alone"
    bench.die("d")
    bench.subscription.join("e")
    bench.ack("e", *bench.deliver()["e"])
    assert not bench.letters, "three deaths so far"
    bench.wait(10)
    bench.die("e")
    bench.deliver()
    assert [letter.offset for letter in bench.letters] == [0]


def test_a_single_message_in_flight_is_charged_at_once() -> None:
    bench = Bench(1, "a", "b", max_deliveries=2)
    bench.deliver()
    bench.die("a")
    assert bench.deliver() == {}, "it rests first"
    assert bench.wait(1) == {"b": [0]}
    bench.die("b")
    bench.deliver()
    assert [letter.offset for letter in bench.letters] == [0]


def test_only_the_named_message_is_charged() -> None:
    bench = Bench(3, "a", "b", max_deliveries=1)
    bench.subscription.leave("b")
    bench.deliver()
    bench.subscription.started("a", 0, 1)
    bench.die("a")
    bench.subscription.join("b")
    assert bench.deliver() == {"b": [0, 2]}
    assert [letter.offset for letter in bench.letters] == [1]


def test_a_name_does_not_outlive_the_delivery() -> None:
    bench = Bench(2, "a", max_deliveries=1)
    bench.deliver()
    bench.subscription.started("a", 0, 0)
    bench.nack("a", 0, delay=0)
    bench.letters.clear()
    bench.deliver()
    bench.letters.clear()
    bench.subscription.join("b")
    bench.die("a")
    bench.deliver()
    assert [letter.offset for letter in bench.letters] == [1], "the only one in flight, not the one named before"


def test_extending_a_lease_does_not_forget_who_was_named() -> None:
    bench = Bench(3, "a", max_deliveries=1)
    bench.deliver()
    bench.subscription.started("a", 0, 1)
    bench.subscription.extend("a", 0, [range(1, 2)], 60, bench.now)
    bench.die("a")
    bench.deliver()
    assert [letter.offset for letter in bench.letters] == [1]


def test_messages_named_together_are_offered_alone_one_after_the_other() -> None:
    bench = Bench(4, "a", max_deliveries=3)
    bench.deliver()
    for offset in (1, 2):
        bench.subscription.started("a", 0, offset)
    bench.die("a")
    bench.subscription.join("b")
    assert bench.deliver() == {"b": [1]}
    bench.ack("b", 1)
    assert bench.deliver() == {"b": [2]}
    bench.ack("b", 2)
    assert bench.deliver() == {"b": [0, 3]}


def test_an_isolated_message_takes_the_idle_subscriber_and_the_others_go_on() -> None:
    bench = Bench(1, "a")
    bench.deliver()
    bench.die("a")
    bench.subscription.join("b")
    bench.subscription.join("c")
    bench.publish(1)
    assert bench.deliver() == {"b": [1]}
    bench.publish(4)
    assert bench.wait(1) == {"c": [0], "b": [2, 3, 4, 5]}
    bench.publish(2)
    assert bench.deliver() == {"b": [6, 7]}
    bench.ack("c", 0)
    bench.publish(2)
    assert sorted(bench.deliver()) == ["b", "c"]


def test_an_isolated_message_waits_for_a_subscriber_to_become_idle() -> None:
    bench = Bench(1, "a")
    bench.deliver()
    bench.die("a")
    bench.subscription.join("b")
    bench.publish(2)
    assert bench.deliver() == {"b": [1, 2]}
    bench.publish(1)
    assert bench.wait(1) == {}, "b is being emptied"
    bench.ack("b", 1)
    assert bench.deliver() == {}
    bench.ack("b", 2)
    assert bench.deliver() == {"b": [0]}
    bench.ack("b", 0)
    assert bench.deliver() == {"b": [3]}


def test_a_nack_ends_isolation() -> None:
    bench = Bench(1, "a", "b")
    bench.deliver()
    bench.die("a")
    assert bench.wait(1) == {"b": [0]}
    bench.nack("b", 0, delay=0)
    bench.publish(1)
    assert bench.deliver() == {"b": [0, 1]}


def test_a_nack_ends_suspicion() -> None:
    bench = Bench(2, "a", max_deliveries=3)
    bench.deliver()
    bench.die("a")
    bench.subscription.join("b")
    bench.deliver()
    bench.nack("b", 0, delay=0)
    assert bench.deliver() == {"b": [0]}
    bench.subscription.started("b", 0, 0)
    bench.die("b")
    bench.subscription.join("c")
    bench.ack("c", *bench.deliver()["c"])
    assert bench.wait(2) == {"c": [0]}, "charged with a nack and a death, not with the death before the nack"


def test_suspicion_survives_a_restart() -> None:
    bench = Bench(2, "a", max_deliveries=2)
    bench.deliver()
    bench.die("a")
    bench.restart("b")
    bench.deliver()
    bench.ack("b", 0)
    bench.die("b")
    bench.deliver()
    assert [letter.offset for letter in bench.letters] == [1], "charged with this death and with the one before"


def test_a_death_is_charged_to_one_message_only() -> None:
    bench = Bench(2, "a", max_deliveries=2)
    bench.deliver()
    bench.die("a")
    bench.subscription.join("b", announces=True)
    bench.deliver()
    bench.subscription.started("b", 0, 0)
    bench.die("b")
    bench.subscription.join("c", announces=True)
    assert bench.deliver() == {"c": [1]}
    assert [letter.offset for letter in bench.letters] == [0]
    bench.subscription.started("c", 0, 1)
    bench.die("c")
    bench.subscription.join("d")
    assert bench.wait(1) == {"d": [1]}, "one death of its own; the first one has been explained"


def test_killing_healthy_workers_condemns_nothing() -> None:
    bench = Bench(1000, max_deliveries=3)
    for generation in range(10):
        bench.subscription.join(f"w{generation}", announces=True)
        offsets = bench.deliver()[f"w{generation}"]
        bench.ack(f"w{generation}", *offsets[:50])
        bench.die(f"w{generation}")
    assert not bench.letters


@pytest.mark.parametrize("written", [1, [1]], ids=["a number", "a list"])
def test_suspicion_is_read_as_it_was_written_at_any_time(written: Any) -> None:
    bench = Bench(2, "a", max_deliveries=2)
    bench.deliver()
    bench.die("a")
    saved = msgspec.to_builtins(bench.subscription.snapshot())
    saved["partitions"][0]["open"] = [[0, 2, 1, 1, 0, written]]
    bench.subscription = reopened("jobs", msgspec.convert(saved, SubscriptionSnapshot), bench.now, Random(1))
    bench.subscription.join("b")
    bench.deliver()
    assert bench.suspects == {(0, 0), (0, 1)}
    bench.ack("b", 0)
    bench.die("b")
    bench.deliver()
    assert [letter.offset for letter in bench.letters] == [1]
