"""The settings of programs that produce and consume, declared once: the keys of their YAML files.

A setting is one annotated field below: its section and name are its key, and its name is its flag.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, get_type_hints

import msgspec

from qb.core.settings.settings_table import Setting
from qb.core.wire.addresses import parse_address
from qb.core.wire.errors import BadName
from qb.core.wire.names import check_name
from qb.core.wire.value_kinds import BOOLEAN, INTEGER, SECONDS, SIZE, TEXT, Kind, one_of


def _address(text: str) -> str:
    parse_address(text)
    return text


def _name(text: str) -> str:
    try:
        return check_name("", text)
    except BadName:
        raise ValueError(text) from None


ADDRESS = Kind("an address such as host:9999 or qb://host:9999", _address)
NAME = Kind("a name of up to 200 characters of A-Z a-z 0-9 . _ -", _name)
MILLISECONDS = INTEGER.within(0, 7 * 24 * 3600 * 1000)


def _row(kind: Kind, help: str) -> Setting:
    return Setting("", kind, help)


class BrokerConnection(msgspec.Struct, frozen=True, kw_only=True):
    """Where the broker is, and how patient a program is with it."""

    address: Annotated[str | None, _row(ADDRESS, "the broker, with or without qb://")] = None
    timeout_secs: Annotated[float | None, _row(SECONDS.within(0.001), "how long to wait for an answer")] = None
    max_retries: Annotated[int, _row(INTEGER.within(0, 1000), "how often to try again without a broker")] = 3
    compression: Annotated[str | None, _row(one_of("zstd", "lz4"), "what travels is compressed with it")] = None
    token_file: Annotated[str | None, _row(TEXT, "file with the token to log in with")] = None
    ca_file: Annotated[str | None, _row(TEXT, "authority of the broker's certificate, for qbs://")] = None


class ProducerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a producer sends, and how."""

    topic: Annotated[str | None, _row(NAME, "the topic")] = None
    partition: Annotated[int | None, _row(INTEGER.within(0), "the partition of all messages")] = None
    required_acks: Annotated[str, _row(one_of("0", "1", "all"), "what counts as sent")] = "all"
    timeout_ms: Annotated[int | None, _row(MILLISECONDS.within(1), "how long to wait for an ack")] = None
    batch_size: Annotated[int, _row(INTEGER.within(1, 1_000_000), "messages sent at once at most")] = 1000
    flush_interval_ms: Annotated[int, _row(MILLISECONDS, "how long a message waits for others")] = 5


class ConsumerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a consumer takes, and how."""

    topic: Annotated[str | None, _row(NAME, "the topic")] = None
    partition: Annotated[int | None, _row(INTEGER.within(0), "this partition alone")] = None
    group_id: Annotated[str | None, _row(NAME, "the group whose offsets are read and committed")] = None
    offset: Annotated[
        int, _row(INTEGER.within(-2), "where to begin without a committed offset: -2 earliest, -1 latest, or an offset")
    ] = -2
    max_bytes: Annotated[int, _row(SIZE.within(1), "bytes of one fetch at most")] = 1 << 20
    max_wait_ms: Annotated[int, _row(MILLISECONDS.within(0, 30_000), "how long the broker waits for min_bytes")] = 500
    min_bytes: Annotated[int, _row(SIZE.within(1), "bytes that are worth an answer")] = 1
    auto_commit: Annotated[bool, _row(BOOLEAN, "commit what was handled")] = True
    auto_commit_interval_ms: Annotated[int, _row(MILLISECONDS.within(1), "how often")] = 5000
    poll_interval_ms: Annotated[int, _row(MILLISECONDS, "how long to pause after a fetch without messages")] = 100


class ProgramConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that can be set of a program; each field is a section."""

    broker: BrokerConnection = BrokerConnection()
    producer: ProducerConfig = ProducerConfig()
    consumer: ConsumerConfig = ConsumerConfig()


def _rows() -> Iterator[Setting]:
    for section, struct in get_type_hints(ProgramConfig).items():
        for field, hint in get_type_hints(struct, include_extras=True).items():
            default: Any = getattr(struct(), field)
            yield hint.__metadata__[0]._replace(name=f"{section}.{field}", default=default)


PROGRAM_TABLE: tuple[Setting, ...] = tuple(_rows())
