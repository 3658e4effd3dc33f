"""How long to wait before the next attempt to connect, and what to log meanwhile."""

from __future__ import annotations

import random
import socket

from qb.clients.protocol.client_errors import BrokerUnavailable, ConnectionLost, RequestRefused, RequestTimedOut

FIRST_PAUSE = 0.05
LONGEST_PAUSE = 2.0
CONNECT_TIMEOUT = 5.0  # for one attempt, the broker's answer to HELLO included

_random = random.Random()  # of our own: a program's seeded random numbers are not ours to use up


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
    """What went wrong with one address last, as the errors that callers get."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._text = f"no connection to {host}:{port} yet"
        self._refusal: RequestRefused | None = None
        self.failures = 0  # attempts that failed and connections that were lost, so far

    def note(self, error: BaseException) -> None:
        """Take note of why there is no connection (any more)."""
        self._text = explain(self._host, self._port, error)
        self._refusal = error if isinstance(error, RequestRefused) else None
        self.failures += 1

    def unavailable(self) -> BrokerUnavailable:
        """For a call that was never sent."""
        error = BrokerUnavailable(self._text)
        if self._refusal is not None:
            error.code, error.__cause__ = self._refusal.code, self._refusal.with_traceback(None)
        return error

    def stalled(self) -> RequestTimedOut:
        """For a call that was never sent because earlier ones get no answer."""
        return RequestTimedOut(f"{self._host}:{self._port} answers nothing; nothing more was sent")

    def unanswered(self) -> RequestTimedOut:
        """For a request that was sent."""
        return RequestTimedOut(f"{self._host}:{self._port} did not answer in time; it may still carry out the request")

    def lost(self) -> ConnectionLost:
        """For a request that was sent, on a connection that is gone."""
        return ConnectionLost(f"the connection was lost before the answer came: {self._text}")


def explain(host: str, port: int, error: BaseException) -> str:
    """Return one sentence that says why there is no connection and what to check."""
    address = f"{host}:{port}"
    error = _first_cause(error)
    if not 1 <= port <= 65535:
        return f"there is no port {port}; a port is from 1 to 65535"
    if isinstance(error, ConnectionRefusedError):
        return f"nothing listens on {address}; start the broker with: qb-server"
    if isinstance(error, socket.gaierror):
        return f"the host name {host!r} cannot be resolved; check --host"
    if isinstance(error, TimeoutError):
        return f"no answer from {address} within {CONNECT_TIMEOUT:g} s; check the address and firewalls in between"
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
