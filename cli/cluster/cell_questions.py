"""Asking one broker about its cell, whether it owns it or not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qb.clients.blocking.connection.socket_calls import connect
from qb.clients.credentials import Credentials
from qb.clients.protocol.conversation import Conversation, RequestAnswered, TurnedAway, Welcome, answer_of
from qb.core.wire.addresses import BrokerAddress

ASK_WITHIN = 2.0  # seconds for one broker


def ask(address: BrokerAddress, credentials: Credentials, method: str = "cluster", **arguments: Any) -> Any:
    """Return what one broker answers, whether it owns its cell or not. Raises OSError, BrokerError, RequestRefused."""
    talk = Conversation("qb cluster", idempotent=False, credentials=credentials)
    with connect(address, credentials.connecting(address), ASK_WITHIN) as sock:
        sock.sendall(talk.open())
        while True:
            while (event := talk.next_event()) is not None:
                if isinstance(event, Welcome) or (isinstance(event, TurnedAway) and event.error.code == "NOT_OWNER"):
                    sock.sendall(talk.request(method, arguments)[1])
                elif isinstance(event, TurnedAway):
                    raise event.error
                elif isinstance(event, RequestAnswered):
                    return answer_of(event.frame)
            if not (data := sock.recv(65_536)):
                raise ConnectionError(f"{address} closed the connection")
            talk.receive(data)


def verdict(found: Mapping[str, Any]) -> str:
    """Return what would happen if one more node of NATS died."""
    journal = found["journal"]
    nodes, current = len(journal["nodes"]), sum(each["current"] for each in journal["nodes"])
    most = nodes // 2 + 1
    if journal["error"] is not None:
        return f"nothing can be stored: {journal['error']}"
    if current > most:
        return (
            f"{current} of {nodes} NATS nodes have all of the journal: with one less nothing is lost, and work goes on"
        )
    if current == most and nodes > 1:
        return f"{current} of {nodes} NATS nodes have all of the journal: with one less nothing is lost, but work stops"
    return f"{current} of {nodes} NATS nodes has all of the journal: if it dies, what is not in a broker's copy is lost"
