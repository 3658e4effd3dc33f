"""An option is understood however it is spelt, and what is wrong with one is said in a sentence that names it."""

from __future__ import annotations

import pickle

import pytest

from pyspark_qb.options.spark_errors import BadOption
from pyspark_qb.options.spark_options import (
    EARLIEST,
    SinkOptions,
    SourceOptions,
    option_table,
    sink_options,
    source_options,
)
from tests.support.brokers import ROOT

SINK = {"servers": "broker:9999", "topic": "events"}
SOURCE = {"servers": "broker:9999", "subscribe": "events"}


def test_every_option_of_a_sink_is_read() -> None:
    given = {
        "SERVERS": "[::1]:9998",
        "topic": "events",
        "Delivery": "Exactly-Once",
        "txnid": "load:7",
        "TxnVersion": "3",
        "valueformat": "json",
        "requestTimeout": "2.5",
        "checkpointLocation": "Spark's own",
    }
    expected = SinkOptions(("[::1]:9998",), "events", "exactly-once", "load:7", 3, "json", 2.5)
    assert sink_options(given) == expected
    assert pickle.loads(pickle.dumps(expected)) == expected


def test_every_option_of_a_source_is_read() -> None:
    given = {
        "servers": "broker:9999",
        "subscribe": "a, b,a",
        "startingoffsets": '{"a": {"0": 5, "1": -2}}',
        "endingTimestamp": "2026-01-31T12:00:00+01:00",
        "maxRowsPerTrigger": "100",
        "failOnDataLoss": "FALSE",
        "includeproperties": "no",
        "groupId": "spark",
        "minPartitions": "4",
        "rowsPerPartition": "1000",
    }
    assert source_options(given) == SourceOptions(
        servers=("broker:9999",),
        topics=("a", "b"),
        starting_offsets={"a": {0: 5, 1: EARLIEST}},
        ending_timestamp=1_769_857_200_000,
        max_rows_per_trigger=100,
        fail_on_data_loss=False,
        include_properties=False,
        group_id="spark",
        min_partitions=4,
        rows_per_partition=1000,
    )
    assert source_options(SOURCE | {"startingTimestamp": "@17"}).starting_timestamp == 17
    assert source_options(SOURCE | {"startingTimestamp": "17"}).starting_timestamp == 17


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"topic": "events"}, "writing needs option servers: the broker's host:port"),
        (SINK | {"servers": "broker"}, "option servers must be the broker's host:port, or those of a cluster"),
        (SINK | {"servers": "a:1,b"}, "with commas between, not 'a:1,b'"),
        (SINK | {"servers": "a:0"}, "option servers must be"),
        (SINK | {"topic": "a b"}, "option topic must be a topic's name, not 'a b'"),
        (SINK | {"deliverey": "x"}, "there is no option 'deliverey' for writing; did you mean delivery?"),
        (SINK | {"xyz": "x"}, "there is no option 'xyz' for writing; there are servers, topic, delivery, txnId"),
        (SINK | {"requestTimeout": "soon"}, "option requestTimeout must be a number of seconds"),
        (SINK | {"valueFormat": "avro"}, "option valueFormat must be one of json, not 'avro'"),
        (SINK | {"txnId": "a b"}, "option txnId must be 1 to 200 of A-Z a-z 0-9 . _ : -, not 'a b'"),
        (SINK | {"txnId": "a", "delivery": "at-least-once"}, "leave one of them out"),
        (SINK | {"txnVersion": "1"}, "give txnId too"),
    ],
)
def test_a_wrong_option_of_a_sink_is_named(options: dict[str, str], words: str) -> None:
    with pytest.raises(BadOption) as refused:
        sink_options(options)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"subscribe": "a"}, "reading needs option servers (a running broker) or option path"),
        ({"servers": "a:1"}, "reading needs option subscribe (topics) or option subscribePattern, not both"),
        (SOURCE | {"subscribePattern": "e.*"}, "not both"),
        ({"servers": "a:1", "subscribePattern": "("}, "option subscribePattern must be a regular expression, not '('"),
        (SOURCE | {"startingOffsets": "first"}, "option startingOffsets must be earliest, latest, or JSON"),
        (SOURCE | {"startingOffsets": '{"a": {"0": -3}}'}, "option startingOffsets must be"),
        (SOURCE | {"endingTimestamp": "tomorrow"}, "option endingTimestamp must be a time such as"),
        (SOURCE | {"maxRowsPerTrigger": "0"}, "option maxRowsPerTrigger must be a whole number (at least 1), not '0'"),
        (SOURCE | {"failOnDataLoss": "perhaps"}, "option failOnDataLoss must be true or false, not 'perhaps'"),
        (SOURCE | {"startingOffsets": "latest", "startingTimestamp": "1"}, "contradict each other"),
    ],
)
def test_a_wrong_option_of_a_source_is_named(options: dict[str, str], words: str) -> None:
    with pytest.raises(BadOption) as refused:
        source_options(options)
    assert words in str(refused.value)


@pytest.mark.parametrize("kind", [SinkOptions, SourceOptions])
def test_every_option_says_what_it_is_for(kind: type[SinkOptions] | type[SourceOptions]) -> None:
    table = option_table(kind)
    assert len({option.name.lower() for option in table.values()}) == len(table)
    assert all(option.purpose for option in table.values())


@pytest.mark.parametrize(("kind", "section"), [(SinkOptions, "Writing"), (SourceOptions, "Reading")])
def test_every_option_is_in_the_manual(kind: type[SinkOptions] | type[SourceOptions], section: str) -> None:
    manual = (ROOT / "docs/SPARK.md").read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    assert [option.name for option in option_table(kind).values() if f"`{option.name}`" not in manual] == []
