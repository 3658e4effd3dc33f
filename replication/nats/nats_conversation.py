"""A client's side of one conversation with NATS, across reconnects: bytes in, bytes and calls out. No I/O, no clock."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from qb.replication.nats.nats_protocol import (
    NatsCredentials,
    NatsError,
    NatsEvent,
    NatsMessage,
    NatsParser,
    NatsServerInfo,
    ServerPing,
    ServerPong,
    ServerRefusal,
    connect_command,
    publish_command,
    subscribe_command,
    unsubscribe_command,
)

logger = logging.getLogger(__name__)

NO_RESPONDERS = 503
MOST_PINGS = 2  # unanswered, before the connection counts as lost

Received = Callable[[NatsMessage], None]
Replied = Callable[[NatsMessage | NatsError], None]


class NoResponders(NatsError):
    """No server or service listens on that subject."""


class NatsDisconnected(NatsError):
    """The connection was lost before the answer came; what was asked for may have happened."""


class NatsConversation:
    """Subscriptions and open requests outlive a connection; an open request is answered with NatsDisconnected."""

    def __init__(self, name: str, credentials: NatsCredentials) -> None:
        self._name, self._credentials = name, credentials
        self._parser = NatsParser()
        self._sids = 1  # 1 is the inbox
        self._subscriptions: dict[int, tuple[str, Received, Callable[[], None] | None]] = {}
        self._inbox = f"_INBOX.{secrets.token_hex(11)}."
        self._requests: dict[str, tuple[Replied, bool]] = {}  # and whether it may have many answers
        self._tokens = 0
        self._out = bytearray()
        self._pings = 0
        self.info: NatsServerInfo | None = None  # of the server that is connected
        self.is_ready = False
        self.refusal = ""  # what the server said before it closed the connection

    def take_output(self) -> bytearray:
        """Return what has to be sent now."""
        out, self._out = self._out, bytearray()
        return out

    def give_back(self, rest: bytearray) -> None:
        """What was taken as output was not sent; nothing has been said since."""
        self._out = rest

    @property
    def has_output(self) -> bool:
        return bool(self._out)

    @property
    def is_idle(self) -> bool:
        """Is nothing to be sent, and no answer awaited?"""
        return not self._out and not self._requests

    def greet(self, *, tls: bool) -> None:
        """INFO has come, and TLS is up if it was wanted: present ourselves, and subscribe to everything again."""
        self._out += connect_command(self._name, self._credentials, tls=tls)
        self._out += subscribe_command(1, f"{self._inbox}*")
        for sid, (subject, _, _) in self._subscriptions.items():
            self._out += subscribe_command(sid, subject)
        self.ping()

    @property
    def rest(self) -> memoryview:
        """Where what comes next may be received; empty if it may not."""
        return self._parser.rest

    def receive(self, data: bytes | bytearray | memoryview, filled: int = 0) -> None:
        """Take bytes of the server that came behind the first `filled` ones of `rest`, and call what they concern.

        Raises NatsMisbehaved.
        """
        self._parser.filled(filled)
        self._parser.receive(data)
        for event in self._parser.events():
            self._handle(event)

    def _handle(self, event: NatsEvent) -> None:
        if isinstance(event, NatsMessage):
            self._deliver(event)
        elif isinstance(event, ServerPing):
            self._out += b"PONG\r\n"
        elif isinstance(event, ServerPong):
            self._pings = 0
            self.is_ready = True
        elif isinstance(event, NatsServerInfo):
            self.info = event
        elif isinstance(event, ServerRefusal):
            self.refusal = event.text
            logger.warning("NATS says: %s", event.text)

    def _deliver(self, message: NatsMessage) -> None:
        if message.sid == 1:
            self._answer(message.subject[len(self._inbox) :], message)
        elif message.sid in self._subscriptions:
            _call(self._subscriptions[message.sid][1], message)

    def _answer(self, token: str, message: NatsMessage) -> None:
        replied, many = self._requests.get(token, (None, False))
        refused = message.status == NO_RESPONDERS
        if not many or refused:
            self._requests.pop(token, None)
        if replied is not None:
            _call(replied, NoResponders("no server answers this request") if refused else message)

    def publish(
        self, subject: str, payload: bytes, headers: Mapping[str, object] | None = None, *, reply: str = ""
    ) -> None:
        """Send a message. It is lost if there is no connection."""
        if self.is_ready:
            self._out += publish_command(subject, payload, reply=reply, headers=headers)

    def request(
        self,
        subject: str,
        payload: bytes,
        replied: Replied,
        headers: Mapping[str, object] | None = None,
        *,
        many: bool = False,
    ) -> str | None:
        """Send a request; `replied` is called once, later, or for each answer if there are to be many.

        Returns its token for forget(), or None if there is no connection.
        """
        if not self.is_ready:
            return None
        self._tokens += 1
        token = f"{self._tokens:x}"
        self._requests[token] = replied, many
        self._out += publish_command(subject, payload, reply=self._inbox + token, headers=headers)
        return token

    def forget(self, token: str) -> Replied | None:
        """Stop waiting for an answer; returns what waits, if it has not come."""
        return self._requests.pop(token, (None, False))[0]

    def subscribe(self, subject: str, received: Received, lost: Callable[[], None] | None = None) -> int:
        """Have messages handed to `received` as they come, on this and every later connection. Returns its number.

        `lost` is called whenever a connection is gone: messages of it may be missing.
        """
        self._sids += 1
        self._subscriptions[self._sids] = subject, received, lost
        if self.is_ready:
            self._out += subscribe_command(self._sids, subject)
        return self._sids

    def unsubscribe(self, sid: int) -> None:
        """End a subscription."""
        if self._subscriptions.pop(sid, None) and self.is_ready:
            self._out += unsubscribe_command(sid)

    def new_inbox(self) -> str:
        """Return a subject that no other subscription has."""
        self._tokens += 1
        return f"{self._inbox[:-1]}-{self._tokens:x}"

    def ping(self) -> bool:
        """Ask whether the server is there; returns False if it has not answered the pings before."""
        if self._pings >= MOST_PINGS:
            return False
        self._pings += 1
        self._out += b"PING\r\n"
        return True

    def disconnected(self) -> None:
        """The connection is gone: open requests are answered, and everything is ready for the next one."""
        self._parser = NatsParser()
        self._out.clear()
        self._pings = 0
        self.info, self.is_ready, self.refusal = None, False, ""
        requests, self._requests = self._requests, {}
        for replied, _ in requests.values():
            _call(replied, NatsDisconnected("the connection to NATS was lost before the answer came"))
        for _, _, lost in list(self._subscriptions.values()):
            if lost is not None:
                lost()


def _call(call: Callable[[Any], None], argument: Any) -> None:
    try:
        call(argument)
    except Exception:
        logger.exception("a callback of the NATS client failed")
