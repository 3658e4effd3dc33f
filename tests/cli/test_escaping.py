"""What messages and peers wrote does not act on the operator's terminal, whichever command shows it."""

from __future__ import annotations

import io
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qb import BrokerClient
from qb.cli.main import main
from qb.cli.terminal.escaping import for_stream
from qb.core.wire.harmless_text import escaped, one_line
from tests.support.commands import on_terminal

EVIL = "\x1b]0;owned\x07\x9b2J\u202e"
SHOWN = r"\x1b]0;owned\x07\x9b2J\u202e"


class Terminal(io.TextIOWrapper):
    """A stream that says that it is a terminal, and keeps what is written."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8")

    def isatty(self) -> bool:
        return True

    @property
    def text(self) -> str:
        self.flush()
        return self.buffer.getvalue().decode()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain é 漢 👩‍👧", "plain é 漢 👩‍👧"),
        ("\x1b[2J", r"\x1b[2J"),
        ("\x9b2J", r"\x9b2J"),
        ("a\rb\x08", r"a\rb\x08"),
        ("\u202eabc", r"\u202eabc"),
        ("\udc80", r"\udc80"),
        ("two\nlines\tand a tab", "two\nlines\tand a tab"),
    ],
)
def test_what_a_terminal_would_act_on_is_written_out(text, shown):
    assert escaped(text) == shown


@given(st.text())
def test_escaped_text_can_be_encoded_and_holds_no_control_character(text):
    shown = escaped(text)
    shown.encode()
    assert not any(character < " " or "\x7f" <= character <= "\x9f" for character in shown if character not in "\n\t")
    assert one_line(text).isprintable() or not text.isprintable()
    assert "\n" not in one_line(text)


def test_a_pipe_gets_everything_as_it_is():
    assert for_stream(EVIL, io.StringIO()) == EVIL


@pytest.fixture
def hostile(broker) -> int:
    """A broker with a hostile message that was dead-lettered for a hostile reason; returns its port."""
    with BrokerClient(port=broker.port) as client:
        client.create_topic("t")
        client.create_subscription("s", "t", max_deliveries=1)
        client.publish("t", EVIL.encode(), key=EVIL, note=EVIL)
        failed = threading.Event()

        def fail(message):
            failed.set()
            raise ValueError(EVIL)

        with client.subscribe_to_subscription("s", fail):
            assert failed.wait(20)
            while not client.dead_letters("s"):
                pass
    return broker.port


COMMANDS = [
    ("fetch", "t"),
    ("consume", "--group", "g", "--topic", "t", "--count", "1"),
    ("subscribe", "t", "--count", "1"),
    ("explain", "s", "0"),
    ("dead-letters", "list", "s"),
    ("describe-subscription", "s"),
]


@pytest.mark.process
def test_no_command_lets_an_escape_sequence_through_to_a_terminal(hostile, monkeypatch):
    shown = {command: run(monkeypatch, hostile, *command) for command in COMMANDS}
    for command, text in shown.items():
        assert is_harmless(text), command
    for command in COMMANDS[:3] + COMMANDS[4:5]:
        assert SHOWN in shown[command].replace("\n", "").replace(" ", ""), command


@pytest.mark.process
def test_raw_lets_it_through_and_so_does_a_pipe(hostile, monkeypatch, capfdbinary):
    assert EVIL in run(monkeypatch, hostile, "fetch", "t", "--raw")
    monkeypatch.undo()
    main(["--port", str(hostile), "fetch", "t"])
    assert capfdbinary.readouterr().out == EVIL.encode() + b"\n"


@pytest.mark.process
@pytest.mark.parametrize(
    "command",
    [
        ("fetch", "t"),
        ("subscribe", "t", "--count", "1"),
        ("consume", "--group", "g", "--topic", "t", "--count", "1"),
        ("consume", "--group", "h", "--topic", "t", "--count", "1", "--format", "{offset}\t{key}\t{value}"),
    ],
)
def test_a_body_with_line_ends_is_one_line_of_a_terminal(broker, monkeypatch, command):
    with BrokerClient(port=broker.port) as client:
        client.create_topic("t")
        client.publish("t", b"one\n0/1 forged\ttwo", key="k\ny")
    shown = run(monkeypatch, broker.port, *command)
    assert r"one\n0/1 forged\ttwo" in shown
    assert r"k\ny" in shown
    assert "one\n0/1 forged\ttwo" in run(monkeypatch, broker.port, "fetch", "t", "--raw")


@pytest.mark.process
def test_an_error_is_escaped_too(hostile, monkeypatch):
    assert is_harmless(shown := run(monkeypatch, hostile, "describe-topic", EVIL))
    assert "owned" in shown


@pytest.mark.process
def test_on_a_real_terminal(hostile):
    shown = on_terminal("--port", str(hostile), "fetch", "t")
    assert SHOWN in shown
    assert is_harmless(shown.replace("\r\n", "\n"))


def run(monkeypatch, port, *argv) -> str:
    """Run a command on a terminal and return all that it showed, without the styles of our own."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "300")
    main(["--port", str(port), *argv])
    return terminal.text


def is_harmless(text: str) -> bool:
    for style in ("\x1b[0m", "\x1b[1m", "\x1b[2m"):
        text = text.replace(style, "")
    return not any(character in text for character in "\x1b\x07\x9b\u202e\r")
