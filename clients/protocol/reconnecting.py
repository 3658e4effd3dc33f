"""How long to wait before the next attempt to connect, what to log meanwhile, and what is asked again."""

from __future__ import annotations

import logging
import random
import socket
import ssl
import time
from collections.abc import Sequence

from qb.clients.protocol.client_errors import (
    BrokerUnavailable,
    ConnectionLost,
    NotOwner,
    RequestRefused,
    RequestTimedOut,
)
from qb.core.wire.addresses import BrokerAddress, like

FIRST_PAUSE = 0.05
LONGEST_PAUSE = 2.0
CONNECT_TIMEOUT = 5.0  # for one attempt, the broker's answer to HELLO included
FIRST_TIMEOUT = 1.0  # the same, where there are other brokers to try
SHORT_ROUNDS = 6  # through all brokers; in later ones each may take a second longer than before
LONGEST_IN_CLUSTER = 0.5  # seconds between two rounds through the brokers of a cluster
REDIRECTS = 3  # that are followed at once; then there is a pause, for brokers that name each other
SILENT_FOR = 1.0  # seconds without a connection after which the log says what is waited for

log = logging.getLogger("qb.client")

_random = random.Random()  # of our own: a program's seeded random numbers are not ours to use up
# They change nothing at the broker, so a client may ask again what it has no answer to.
READ_ONLY_METHODS = frozenset(
    {
        "cluster",
        "committed_offsets",
        "dead_letters",
        "describe_group",
        "describe_subscription",
        "describe_topic",
        "describe_topics",
        "explain",
        "list_groups",
        "list_subscriptions",
        "list_topics",
        "list_transactions",
        "list_users",
        "offsets",
        "server_info",
        "show_transaction",
    }
)


class ReconnectBackoff:
    """Pauses that double up to a limit, jittered so that clients do not come back all at once."""

    def __init__(self) -> None:
        self._next = FIRST_PAUSE

    def reset(self) -> None:
        """Start anew: the last attempt succeeded."""
        self._next = FIRST_PAUSE

    def pause(self) -> float:
        """Return how many seconds to wait now."""
        pause, self._next = self._next, min(self._next * 2, LONGEST_PAUSE)
        return pause * _random.uniform(0.5, 1.0)


class ConnectionTrouble:
    """Which of the brokers to connect to, and what went wrong last, as log lines and the errors that callers get."""

    def __init__(self, servers: Sequence[BrokerAddress]) -> None:
        self._servers, self._turn = servers, 0
        self._text = f"no connection to {servers[0]} yet"
        self._refusal: RequestRefused | None = None
        self._up = False
        self._connections = 0
        self._failed_in_turn = 0  # attempts since the last connection
        self._owner: BrokerAddress | None = None  # where a broker of a cluster has sent us
        self._next_owner: BrokerAddress | None = None  # where the broker that we are connected to has sent us
        self._redirects = 0  # since the last connection
        self._in_cluster = len(servers) > 1
        self._down_since: float | None = None  # when the first of these failed
        self._logged = False  # has the log said what is waited for?
        self.failures = 0  # how often all brokers have failed in turn, and connections were lost, so far

    @property
    def server(self) -> BrokerAddress:
        """The broker that we are connected to, or the one to try next."""
        return self._owner or self._servers[self._turn]

    @property
    def connect_timeout(self) -> float:
        """How many seconds the next attempt may take."""
        rounds = self._failed_in_turn // len(self._servers)
        return (
            min(CONNECT_TIMEOUT, FIRST_TIMEOUT + max(0, rounds - SHORT_ROUNDS)) if self._in_cluster else CONNECT_TIMEOUT
        )

    def pause(self, backoff: ReconnectBackoff) -> float:
        """Return how many seconds to wait before the next attempt: none while there is another broker to try."""
        if self._redirects <= REDIRECTS and (self._owner or self._failed_in_turn % len(self._servers)):
            return 0.0
        if (
            self._redirects == 0 and self._failed_in_turn == 0 and self._in_cluster
        ):  # just lost: the next one may have it
            return 0.0
        return min(backoff.pause(), LONGEST_IN_CLUSTER if self._in_cluster else LONGEST_PAUSE)

    def moved(self, owner: str) -> None:
        """Take note of who takes over, as the broker said when it left; empty: it did not say."""
        self._next_owner = self._as_we_connect(owner)

    def _redirected(self, error: NotOwner) -> bool:
        """Take note of who owns the cell; False if the broker does not know."""
        self._in_cluster = True
        owner = self._as_we_connect(error.owner)
        if owner is None or self._redirects > 2 * REDIRECTS:
            self._redirects = 0
            return False
        self._owner, self._redirects = owner, self._redirects + 1
        return True

    def _as_we_connect(self, address: str) -> BrokerAddress | None:
        """Return the address of a broker that another one has named, with or without TLS as all of them."""
        try:
            return like(self._servers[0], address)
        except ValueError:
            return None

    def welcomed(self) -> None:
        """Take note of a connection."""
        self._up, self._failed_in_turn, self._down_since, self._logged = True, 0, None, False
        self._redirects = 0
        self._connections += 1
        log.info("connected to %s%s", self.server, " again" if self._connections > 1 else "")

    def closed(self) -> None:
        """Take note that no connection is wanted any more."""
        self._up, self._failed_in_turn, self._down_since, self._logged = False, 0, None, False

    def note(self, error: BaseException) -> None:
        """Take note of why there is no connection (any more)."""
        if isinstance(error, NotOwner) and self._redirected(error):
            return
        self._text = explain(self.server, error, self.connect_timeout)
        self._refusal = error if isinstance(error, RequestRefused) else None
        was_up, self._up = self._up, False
        self._owner, self._next_owner = self._next_owner, None
        if was_up:
            log.warning("lost the connection: %s; connecting again", self._text)
        else:
            self._failed_in_turn += 1
            now = time.monotonic()
            self._down_since = self._down_since or now
            if now - self._down_since >= SILENT_FOR:
                self.waited()
        if was_up or self._failed_in_turn % len(self._servers) == 0:
            self.failures += 1
        self._turn = (self._turn + 1) % len(self._servers)

    def waited(self) -> None:
        """A connection has been waited for SILENT_FOR seconds: say what for, if that is not said yet."""
        if not self._up and not self._logged:
            self._logged = True
            log.warning("waiting for a broker: %s%s", self._text, self._others())

    def _others(self) -> str:
        """Say that it was not the only broker that was tried."""
        return f" (of {', '.join(map(str, self._servers))})" if len(self._servers) > 1 else ""

    def unavailable(self) -> BrokerUnavailable:
        """For a call that was never sent."""
        error = BrokerUnavailable(self._text + self._others())
        if self._refusal is not None:
            error.code, error.__cause__ = self._refusal.code, self._refusal.with_traceback(None)
        return error

    def stalled(self) -> RequestTimedOut:
        """For a call that was never sent because earlier ones get no answer."""
        return RequestTimedOut(f"{self.server} answers nothing; nothing more was sent")

    def unanswered(self) -> RequestTimedOut:
        """For a request that was sent."""
        return RequestTimedOut(f"{self.server} did not answer in time; it may still carry out the request")

    def lost(self) -> ConnectionLost:
        """For a request that was sent, on a connection that is gone."""
        return ConnectionLost(f"the connection was lost before the answer came: {self._text}")


def explain(address: BrokerAddress, error: BaseException, seconds: float = CONNECT_TIMEOUT) -> str:
    """Return one sentence that says why there is no connection and what to check."""
    error = _first_cause(error)
    if not 1 <= address.port <= 65535:
        return f"there is no port {address.port}; a port is from 1 to 65535"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate of {address} is not trusted: {error.verify_message}; check the argument ca_file"
    if isinstance(error, ssl.SSLError) and error.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"):
        return f"{address} does not speak TLS: write qb:// in place of qbs://, or give the broker a certificate"
    if isinstance(error, ssl.SSLError):
        return f"TLS with {address} failed: {error.reason or error}"
    if isinstance(error, ConnectionRefusedError):
        return f"nothing listens on {address}; start the broker with: qb-server"
    if isinstance(error, socket.gaierror):
        return f"the host name {address.host!r} cannot be resolved; check the argument host"
    if isinstance(error, TimeoutError):
        return f"no answer from {address} within {seconds:g} s; check the address and firewalls in between"
    if isinstance(error, EOFError):
        return f"{address} closed the connection without a word: the broker has gone, or what listens there is not QB"
    if isinstance(error, ConnectionError):
        return f"{address} closed the connection ({str(error) or type(error).__name__}); see the broker's log"
    return f"no connection to {address}: {error}"


def _first_cause(error: BaseException) -> BaseException:
    """Return what is behind an error that only sums up attempts at several addresses."""
    cause = error.__cause__
    if isinstance(cause, BaseExceptionGroup):
        return cause.exceptions[0]
    return cause if isinstance(cause, OSError) else error
