"""Asks the monitoring port of one NATS node how its own copy of the journal is."""

from __future__ import annotations

import ssl
from typing import Any
from urllib.parse import urlsplit

import msgspec
import trio

from qb.cluster.health.node_health import MonitorReport, MonitorSilent

ANSWER_WITHIN = 1.5  # seconds
MOST_ANSWER = 16 << 20  # bytes; a node lists all its streams
PORT = 8222


class MonitorFailed(Exception):
    """What came is not the answer of a NATS monitor."""


class NatsMonitor:
    """One monitoring address. Belongs to the event loop's thread."""

    def __init__(self, address: str, tls: ssl.SSLContext | None = None) -> None:
        """`address`: http://host:8222, or https. Raises ValueError."""
        parts = urlsplit(address if "://" in address else f"http://{address}")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
            raise ValueError(f"{address!r} is not the monitoring address of a NATS server; write http://host:8222")
        self.address = address
        self._host, self._port, self._is_secure = parts.hostname, parts.port or PORT, parts.scheme == "https"
        self._tls = tls
        self._id, self._name = "", address  # of the server that answered last

    async def look(self, stream: str, identity: str) -> MonitorReport | MonitorSilent:
        """Return what the node says of its copy of the stream. `identity` tells it from a namesake."""
        try:
            with trio.fail_after(ANSWER_WITHIN):
                found = await self._get("/jsz?streams=true")
                if found["server_id"] != self._id:
                    self._id, self._name = found["server_id"], (await self._get("/varz"))["server_name"]
            return _report(self._name, found, stream, identity)
        except trio.TooSlowError:
            return MonitorSilent(self._name, f"{self.address} does not answer")
        except (OSError, trio.BrokenResourceError, MonitorFailed, LookupError, TypeError, msgspec.DecodeError) as error:
            return MonitorSilent(self._name, f"{self.address}: {str(error) or type(error).__name__}")

    async def _get(self, path: str) -> Any:
        stream: trio.abc.Stream = await trio.open_tcp_stream(self._host, self._port, happy_eyeballs_delay=0.1)
        async with stream:
            if self._is_secure:
                context = self._tls or ssl.create_default_context()
                stream = trio.SSLStream(stream, context, server_hostname=self._host, https_compatible=True)
            await stream.send_all(f"GET {path} HTTP/1.0\r\nHost: {self._host}\r\n\r\n".encode())
            said = bytearray()
            while data := await stream.receive_some(1 << 16):
                said += data
                if len(said) > MOST_ANSWER:
                    raise MonitorFailed(f"its answer is longer than {MOST_ANSWER} bytes")
        head, _, body = bytes(said).partition(b"\r\n\r\n")
        status = head.partition(b"\r\n")[0].decode(errors="replace")
        if status.split()[1:2] != ["200"]:
            raise MonitorFailed(f"it answers {status or 'nothing'}")
        return msgspec.json.decode(body)


def _report(name: str, found: Any, stream: str, identity: str) -> MonitorReport:
    for account in found.get("account_details") or ():
        for each in account.get("stream_detail") or ():
            if each["name"] == stream and f"{stream} {each['created']}" == identity:
                state = each["state"]
                return MonitorReport(name, True, state["first_seq"], state["last_seq"], state["messages"])
    return MonitorReport(name)
