"""Every option of `format("qb")`, checked in one place.

Spark hands options over as text and takes `topic` for `Topic`; an option that there is not would be ignored in
silence. So each is listed here with its kind, and anything else is refused by name.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from datetime import UTC, datetime
from typing import Annotated, Any, NamedTuple, TypeVar, get_type_hints

import msgspec

from pyspark_qb.options.spark_errors import BadOption
from qb.core.wire.addresses import parse_address
from qb.core.wire.errors import BadName
from qb.core.wire.names import check_name, check_transaction
from qb.core.wire.value_kinds import BOOLEAN, INTEGER, SECONDS, TEXT, Kind, one_of

EARLIEST, LATEST = -2, -1  # as an offset: in the options, as in a FETCH

# What Spark itself passes on, or reads from the same options.
OF_SPARK = frozenset({"checkpointlocation", "queryname", "outputmode"})


class Option(NamedTuple):
    """How an option is written: its name, the kind of its value, and what it is for."""

    name: str
    kind: Kind
    purpose: str


def _to_servers(text: str) -> tuple[str, ...]:
    return tuple(_to_server(each.strip()) for each in text.split(","))


def _to_server(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not 0 < int(port) < 65536:
        raise ValueError(text)
    return str(parse_address(text if "/" in host or not host.count(":") else f"[{host.strip('[]')}]:{port}"))


def _to_topic(text: str) -> str:
    return check_name("topic", text.strip())


def _to_topics(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_to_topic(each) for each in text.split(",")))


def _to_pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(text) from error
    return text


def _to_transaction(text: str) -> str:
    return check_transaction(text.strip())


def _to_milliseconds(text: str) -> int:
    digits = text.strip().removeprefix("@")
    if digits.isdigit():
        return int(digits)
    moment = datetime.fromisoformat(text.strip())
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return int(moment.timestamp() * 1000)


Offsets = str | dict[str, dict[int, int]]
_LISTED = msgspec.json.Decoder(dict[str, dict[int, Annotated[int, msgspec.Meta(ge=EARLIEST)]]])


def _to_offsets(text: str) -> Offsets:
    word = text.strip().lower()
    if word in ("earliest", "latest"):
        return word
    try:
        return _LISTED.decode(text)
    except msgspec.DecodeError as error:
        raise ValueError(text) from error


SERVERS = Kind("the broker's host:port, or those of a cluster with commas between", _to_servers)
TOPIC = Kind("a topic's name", _to_topic)
TOPICS = Kind("names of topics with commas between them", _to_topics)
PATTERN = Kind("a regular expression", _to_pattern)
TRANSACTION = Kind("1 to 200 of A-Z a-z 0-9 . _ : -", _to_transaction)
MOMENT = Kind("a time such as 2026-01-31T12:00:00Z, or milliseconds since 1970", _to_milliseconds)
OFFSETS = Kind('earliest, latest, or JSON such as {"events": {"0": 42, "1": -2}} (-2 earliest, -1 latest)', _to_offsets)
COUNT = INTEGER.within(1)


@dataclass(frozen=True)
class SinkOptions:
    """How rows are published."""

    servers: Annotated[tuple[str, ...], Option("servers", SERVERS, "where the broker listens")]
    topic: Annotated[str | None, Option("topic", TOPIC, "where rows without a topic of their own go")] = None
    delivery: Annotated[
        str, Option("delivery", one_of("exactly-once", "at-least-once"), "in transactions, or straight through")
    ] = "exactly-once"
    transaction_id: Annotated[
        str | None, Option("txnId", TRANSACTION, "names this write, so that a repetition of it is recognised")
    ] = None
    transaction_number: Annotated[
        int | None, Option("txnVersion", INTEGER.within(0), "the number of this write among those of its txnId")
    ] = None
    value_format: Annotated[
        str | None, Option("valueFormat", one_of("json"), "publish whole rows, as JSON objects")
    ] = None
    request_timeout: Annotated[
        float, Option("requestTimeout", SECONDS.within(0.001), "how long the broker is waited for")
    ] = 30.0
    compression: Annotated[
        str | None, Option("compression", one_of("zstd", "lz4"), "what travels is compressed with it")
    ] = None
    token_file: Annotated[str | None, Option("tokenFile", TEXT, "file with the token to log in with")] = None
    ca_file: Annotated[str | None, Option("caFile", TEXT, "authority of the broker's certificate")] = None


@dataclass(frozen=True)
class SourceOptions:
    """What is read. `servers` is None only where `path` is given."""

    servers: Annotated[tuple[str, ...] | None, Option("servers", SERVERS, "where the broker listens")] = None
    path: Annotated[str | None, Option("path", TEXT, "read the files of this data directory instead")] = None
    topics: Annotated[tuple[str, ...], Option("subscribe", TOPICS, "the topics to read")] = ()
    pattern: Annotated[str | None, Option("subscribePattern", PATTERN, "read every topic whose whole name matches")] = (
        None
    )
    starting_offsets: Annotated[
        Offsets | None, Option("startingOffsets", OFFSETS, "where to begin; batch: earliest, streaming: latest")
    ] = None
    ending_offsets: Annotated[Offsets | None, Option("endingOffsets", OFFSETS, "where a batch ends, exclusively")] = (
        None
    )
    starting_timestamp: Annotated[
        int | None, Option("startingTimestamp", MOMENT, "begin with the first message appended at this time or later")
    ] = None
    ending_timestamp: Annotated[
        int | None, Option("endingTimestamp", MOMENT, "a batch ends before the first message of this time or later")
    ] = None
    max_rows_per_trigger: Annotated[
        int | None, Option("maxRowsPerTrigger", COUNT, "the most rows that one micro-batch reads")
    ] = None
    fail_on_data_loss: Annotated[
        bool, Option("failOnDataLoss", BOOLEAN, "fail when messages were dropped before they were read")
    ] = True
    include_properties: Annotated[bool, Option("includeProperties", BOOLEAN, "have the column `properties`")] = True
    group_id: Annotated[
        str | None, Option("groupId", TEXT, "the group under which the broker shows how far the query has come")
    ] = None
    min_partitions: Annotated[
        int | None, Option("minPartitions", COUNT, "split a batch into at least so many Spark partitions")
    ] = None
    rows_per_partition: Annotated[
        int | None, Option("rowsPerPartition", COUNT, "split a batch into Spark partitions of at most so many rows")
    ] = None
    request_timeout: Annotated[
        float, Option("requestTimeout", SECONDS.within(0.001), "how long the broker is waited for")
    ] = 30.0
    compression: Annotated[
        str | None, Option("compression", one_of("zstd", "lz4"), "what travels is compressed with it")
    ] = None
    token_file: Annotated[str | None, Option("tokenFile", TEXT, "file with the token to log in with")] = None
    ca_file: Annotated[str | None, Option("caFile", TEXT, "authority of the broker's certificate")] = None


def sink_options(given: Mapping[str, str]) -> SinkOptions:
    """Return the checked options of a sink. Raises BadOption."""
    options = _parse(SinkOptions, given, "writing")
    if options.transaction_number is not None and options.transaction_id is None:
        raise BadOption("option txnVersion numbers the writes of a txnId; give txnId too")
    if options.transaction_id is not None and options.delivery == "at-least-once":
        raise BadOption("option txnId names a transaction, and delivery at-least-once has none; leave one of them out")
    return options


def source_options(given: Mapping[str, str]) -> SourceOptions:
    """Return the checked options of a source. Raises BadOption."""
    options = _parse(SourceOptions, given, "reading")
    if (options.servers is None) == (options.path is None):
        raise BadOption("reading needs option servers (a running broker) or option path (its data directory), not both")
    if (options.pattern is None) == (not options.topics):
        raise BadOption("reading needs option subscribe (topics) or option subscribePattern, not both")
    _check_contradiction(options.starting_offsets, options.starting_timestamp, "starting")
    _check_contradiction(options.ending_offsets, options.ending_timestamp, "ending")
    return options


def _check_contradiction(offsets: Offsets | None, timestamp: int | None, which: str) -> None:
    if offsets is not None and timestamp is not None:
        raise BadOption(f"options {which}Offsets and {which}Timestamp contradict each other; give one of them")


T = TypeVar("T", SinkOptions, SourceOptions)


def _parse(kind: type[T], given: Mapping[str, str], use: str) -> T:
    """Return the options as their dataclass. Raises BadOption for one that is unknown, wrong or missing."""
    table = option_table(kind)
    by_name = {option.name.lower(): field for field, option in table.items()}
    values: dict[str, Any] = {}
    for name, text in given.items():
        field = by_name.get(name.lower())
        if field is not None:
            values[field] = _value(table[field], text)
        elif name.lower() not in OF_SPARK:
            raise BadOption(_unknown(name, [option.name for option in table.values()], use))
    for each in fields(kind):
        if each.default is MISSING and each.name not in values:
            option = table[each.name]
            raise BadOption(f"{use} needs option {option.name}: {option.kind.must_be}")
    return kind(**values)


def option_table(kind: type[SinkOptions] | type[SourceOptions]) -> dict[str, Option]:
    """Return the options of a sink or a source by the names of their fields."""
    return {name: hint.__metadata__[0] for name, hint in get_type_hints(kind, include_extras=True).items()}


def _value(option: Option, text: str) -> Any:
    try:
        return option.kind.parse(text)
    except (ValueError, OverflowError, BadName):
        raise BadOption(f"option {option.name} must be {option.kind.must_be}, not {text[:80]!r}") from None


def _unknown(name: str, names: list[str], use: str) -> str:
    by_lower = {each.lower(): each for each in names}
    close = difflib.get_close_matches(name.lower(), by_lower, 1)
    hint = f"did you mean {by_lower[close[0]]}?" if close else "there are " + ", ".join(names)
    return f"there is no option {name!r} for {use}; {hint}"
