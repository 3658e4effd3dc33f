"""Asking one broker about its cell, whether it owns it or not."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from qb.cli.terminal.command import CommandFailed
from qb.clients.blocking.connection.socket_calls import connect
from qb.clients.credentials import Credentials
from qb.clients.protocol.client_errors import RequestRefused
from qb.clients.protocol.conversation import Conversation, RequestAnswered, TurnedAway, Welcome, answer_of
from qb.core.wire.addresses import BrokerAddress, parse_address
from qb.core.wire.errors import BrokerError

NO_ANSWERS = ("NOT_OWNER", "JOURNAL_LOST")  # to HELLO, of a broker that says how its cell is nevertheless
ASK_WITHIN = 2.0  # seconds for one broker


def ask(address: BrokerAddress, credentials: Credentials, method: str = "cluster", **arguments: Any) -> Any:
    """Return what one broker answers, whether it owns its cell or not. Raises OSError, BrokerError, RequestRefused."""
    talk = Conversation("qb cluster", idempotent=False, credentials=credentials)
    with connect(address, credentials.connecting(address), ASK_WITHIN) as sock:
        sock.sendall(talk.open())
        while True:
            while (event := talk.next_event()) is not None:
                if isinstance(event, Welcome) or (isinstance(event, TurnedAway) and event.error.code in NO_ANSWERS):
                    sock.sendall(talk.request(method, arguments)[1])
                elif isinstance(event, TurnedAway):
                    raise event.error
                elif isinstance(event, RequestAnswered):
                    return answer_of(event.frame)
            if not (data := sock.recv(65_536)):
                raise ConnectionError(f"{address} closed the connection")
            talk.receive(data)


def addresses(args: argparse.Namespace) -> Sequence[BrokerAddress]:
    """Return where the flags say that brokers are."""
    return [parse_address(each) for each in args.servers] or [parse_address(args.host, args.port)]


def best(args: argparse.Namespace) -> dict[str, Any]:
    """Return the answer of the broker that knows the newest epoch, and an owner. Raises CommandFailed."""
    answers, troubles = [], []
    for address in addresses(args):
        try:
            answers.append(ask(address, Credentials(**args.credentials)))
        except (OSError, BrokerError, RequestRefused) as error:
            troubles.append(f"{address}: {error}")
    if not answers:
        raise CommandFailed("no broker answers\n" + "\n".join(troubles))
    return max(answers, key=lambda each: (each.get("epoch", 0), each.get("owner") is not None))
