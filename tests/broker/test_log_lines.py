"""No text of a peer forges a line of the log, or drives the terminal that shows it."""

from __future__ import annotations

import logging
import re

import pytest

from qb.core.log_lines import LogLineFormatter
from tests.support.peers import Peer
from tests.support.waiting import wait_until

FORGED = "2026-01-01 00:00:00,000 INFO qb.server: stopped"


def formatted(message: str, *arguments: object, error: BaseException | None = None) -> str:
    info = (type(error), error, error.__traceback__) if error else None
    return LogLineFormatter().format(logging.LogRecord("qb.test", logging.INFO, "", 1, message, arguments, info))


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n", "\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\u2029"])
def test_a_line_end_of_any_kind_in_a_name_ends_no_line(end):
    shown = formatted("dropped %s: silent", f"me{end}{FORGED}")
    assert len(shown.splitlines()) == 1
    assert shown.endswith(f"{FORGED}: silent")


def test_an_escape_sequence_is_shown_and_not_acted_on():
    assert formatted("dropped %s", "\x1b]0;title\x07 \u202egpj").endswith("dropped \\x1b]0;title\\x07 \\u202egpj")


def test_only_an_event_begins_a_line_and_a_traceback_is_indented():
    try:
        raise ValueError(f"bad\n{FORGED}\x1b[2J")
    except ValueError as error:
        lines = formatted("failed", error=error).splitlines()
    assert lines[0].endswith("qb.test: failed")
    assert len(lines) > 3
    assert all(line.startswith("    ") for line in lines[1:])
    assert "\x1b" not in "".join(lines)


@pytest.mark.process
def test_a_client_id_with_a_newline_forges_no_line_in_the_log_of_a_broker(start_broker):
    broker = start_broker(heartbeat_interval=0.2)
    with Peer(broker.port) as peer:
        peer.hello(client_id=f"me\n{FORGED}")
        wait_until(lambda: "dropped me" in broker.log)
    assert not re.search(f"^{re.escape(FORGED)}", broker.log, re.MULTILINE)
