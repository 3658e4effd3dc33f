"""Idempotent producers: what was stored before is found again, exactly."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qb.clients.protocol import conversation
from qb.clients.protocol import unacked_publishes as window
from qb.clients.protocol.partition_spread import RUN
from qb.core.broker import producers as producers_module
from qb.core.broker.numbered_publishes import NumberedPublishes
from qb.core.broker.producers import MAX_RANGES, SLACK, WINDOW, KnownProducer, NumberedRange, Producers
from qb.core.wire.errors import DiskFull, OutOfSequence, ProducerFenced
from qb.core.wire.frames import OVERHEAD
from qb.storage.engine import ProducerRange
from qb.storage.log import producer_ranges


def a_log(end_offset=10**9, ranges=()):
    return SimpleNamespace(topic="t", partition=0, durable_offset=end_offset, ranges=lambda: ranges)


def look_up(producer, number):
    stored, _ = producer.judge(number)
    return stored and (stored.log, stored.first_offset)


@given(st.lists(st.tuples(st.integers(1, 5), st.booleans(), st.integers(0, 2)), min_size=1, max_size=30), st.randoms())
def test_each_number_is_found_where_it_was_stored_and_no_other(runs, random):
    producer, logs, ends = KnownProducer(1), [a_log(), a_log(), a_log()], [0, 0, 0]
    model, number, late = {}, 1, []
    for count, lost, log in runs:
        if lost:
            late.append((number, count, log))
        else:
            _remember(producer, model, logs, ends, number, count, log)
        number += count
    random.shuffle(late)
    for first, count, log in late[: len(late) // 2]:
        assert all(producer.judge(n).stored is None for n in range(first, first + count))
        _remember(producer, model, logs, ends, first, count, log)
    for n in range(1, number):
        assert look_up(producer, n) == model.get(n)


def _remember(producer, model, logs, ends, number, count, log):
    ends[log] += 3
    producer.remember(NumberedRange(number, count, logs[log], ends[log]))
    for i in range(count):
        model[number + i] = (logs[log], ends[log] + i)
    ends[log] += count


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 9)), max_size=8), st.integers(1, 60))
def test_a_verdict_holds_for_as_many_numbers_as_it_says(stored, number):
    producer, log = KnownProducer(1), a_log()
    for first, count in stored:
        if all(producer.judge(n).stored is None for n in range(first, first + count)):
            producer.remember(NumberedRange(first, count, log, 1_000 * first))
    found, limit = producer.judge(number)
    for n in range(number, number + min(limit or 20, 20)):
        assert (producer.judge(n).stored is None) == (found is None)
        if found is not None:
            assert producer.judge(n).stored.first_offset == found.first_offset + n - number


def test_a_run_that_continues_the_last_one_costs_no_further_memory():
    producer, log = KnownProducer(1), a_log()
    for number in range(1, 50_001, 100):
        producer.remember(NumberedRange(number, 100, log, number))
    assert len(producer._stored) == 1


def test_numbers_older_than_the_window_are_forgotten_and_refused():
    producer, log = KnownProducer(1), a_log()
    for number in range(1, 3 * WINDOW, 2):
        producer.remember(NumberedRange(number, 1, log, number))
    assert len(producer._stored) <= (WINDOW + SLACK) // 2 + 1
    newest = number
    for old in (1, newest - WINDOW):
        with pytest.raises(OutOfSequence):
            producer.judge(old)
    assert producer.judge(newest - WINDOW + 2).stored


def test_a_client_has_fewer_numbers_in_flight_than_the_broker_and_its_logs_remember():
    longest = RUN // OVERHEAD  # of the messages that are sent at once, with nothing in them
    assert conversation.WINDOW_NUMBERS + longest < WINDOW == producer_ranges.WINDOW
    assert window.MAX_BATCHES <= producer_ranges.MAX_RANGES // 2 <= MAX_RANGES


def test_a_batch_that_failed_is_new_again():
    producer, log = KnownProducer(1), a_log()
    producer.remember(NumberedRange(1, 10, log, 0))
    producer.settled(NumberedRange(4, 3, log, 3), DiskFull("full"))
    assert [n for n in range(1, 11) if producer.judge(n).stored is None] == [4, 5, 6]


def test_of_numbers_that_failed_only_those_of_their_log_are_new_again():
    producer, log, other = KnownProducer(1), a_log(), a_log()
    for number in range(1, 11):
        producer.remember(NumberedRange(number, 1, log if number % 2 else other, number))
    producer.settled(NumberedRange(3, 5, log, 3), DiskFull("full"))
    assert [n for n in range(1, 11) if producer.judge(n).stored is None] == [3, 5, 7]


def test_a_publish_sent_again_waits_for_the_first_attempt():
    producer, log, answers = KnownProducer(1), a_log(end_offset=0), []
    numbers = NumberedRange(1, 2, log, 0)
    producer.remember(numbers)
    producer.when_settled(numbers, answers.append)
    assert answers == []
    log.durable_offset = 2
    producer.settled(numbers, None)
    assert answers == [None]
    producer.when_settled(numbers, answers.append)
    assert answers == [None, None]


def test_a_newer_connection_fences_the_older_one_off():
    producers, old, new = Producers(), object(), object()
    producer = producers.open("new", old)
    assert producers.open(str(producer.producer_id), new) is producer
    producer.judge(1, new)
    with pytest.raises(ProducerFenced):
        producer.judge(1, old)


async def test_a_producer_that_is_known_keeps_nothing_of_a_connection_that_has_ended():
    async def secret_of(_, owner):
        return "secret"

    producers = Producers()
    connection = NumberedPublishes(None, producers, SimpleNamespace(of=secret_of), lambda *_: None, pytest.fail)
    producer_id, _ = await connection.continue_as("new", None)
    ended = weakref.ref(connection)
    del connection
    gc.collect()
    assert ended() is None, "it would keep all that the peer had sent and not finished"
    assert producers.open(str(producer_id), None).producer_id == producer_id


def test_a_restart_knows_what_the_logs_remember():
    log, producers = a_log(ranges=[ProducerRange(7, 1, 100, 5), ProducerRange(7, 6, 200, 1)]), Producers()
    producers.restore([log])
    producer = producers.open("7", None)
    assert [look_up(producer, n) for n in (1, 5, 6, 7)] == [(log, 100), (log, 104), (log, 200), None]


def test_a_restart_takes_numbers_of_several_logs_in_their_order():
    logs = [
        a_log(ranges=[ProducerRange(7, number, number // 3, 1) for number in range(1 + place, 3_001, 3)])
        for place in range(3)
    ]
    producers = Producers()
    producers.restore(logs)
    producer = producers.open("7", None)
    for number in (1, 2, 3, 1_500, 3_000):
        assert look_up(producer, number) == (logs[(number - 1) % 3], number // 3)
    assert look_up(producer, 3_001) is None


def test_what_a_log_had_to_drop_is_refused_after_a_restart_and_what_it_has_is_known():
    log, other = (
        a_log(ranges=[ProducerRange(7, 500, 0, 0), ProducerRange(7, 501, 90, 5)]),
        a_log(ranges=[ProducerRange(7, 100, 40, 1)]),
    )
    producers = Producers()
    producers.restore([log, other])
    producer = producers.open("7", None)
    assert [look_up(producer, n) for n in (100, 501, 505)] == [(other, 40), (log, 90), (log, 94)]
    assert look_up(producer, 506) is None
    for lost in (99, 101, 500):
        with pytest.raises(OutOfSequence):
            producer.judge(lost)
    producers.restore([a_log(ranges=[ProducerRange(8, 300, 0, 0)])])
    with pytest.raises(OutOfSequence):
        producers.open("8", None).judge(300)


def test_one_producer_alone_is_known_as_far_back_as_a_client_can_ask():
    producers, log = Producers(), a_log()
    producer = producers.open("new", None)
    for number in range(1, MAX_RANGES + 50_000):
        producer.remember(NumberedRange(number, 1, log, 2 * number))
        if number % 1_000 == 0 and number > window.MAX_BATCHES:
            assert look_up(producer, number - window.MAX_BATCHES) == (log, 2 * (number - window.MAX_BATCHES))
    assert producer.ranges <= MAX_RANGES


def test_a_peer_that_only_asks_for_ids_does_not_displace_producers_that_publish(monkeypatch):
    monkeypatch.setattr(producers_module, "MAX_PRODUCERS", 100)
    producers, log = Producers(), a_log()
    publishing = [producers.open("new", None) for _ in range(20)]
    for place, producer in enumerate(publishing):
        producer.remember(NumberedRange(1, 1, log, place))
    for _ in range(1_000):
        producers.open("new", None)
    assert all(producers.open(str(each.producer_id), None) is each for each in publishing)
    for _ in range(300):  # all publish: then the one that connected longest ago is forgotten
        producers.open("new", None).remember(NumberedRange(1, 1, log, 100))
    assert producers.open(str(publishing[0].producer_id), None) is not publishing[0]


def test_memory_is_bounded_and_what_was_forgotten_is_refused_not_stored_twice():
    producers, log = Producers(), a_log()
    many = [producers.open("new", None) for _ in range(5)]
    for number in range(1, 60_000):
        for place, producer in enumerate(many):  # interleaved: no two numbers of one producer are neighbours in the log
            producer.remember(NumberedRange(number, 1, log, 5 * number + place))
    assert sum(producer.ranges for producer in many) <= MAX_RANGES
    assert look_up(many[0], 59_999) == (log, 5 * 59_999)
    with pytest.raises(OutOfSequence):
        many[0].judge(100)
