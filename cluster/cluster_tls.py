"""Mutual TLS between the brokers of a cluster: a certificate of its authority makes a peer a broker."""

from __future__ import annotations

import ssl
from contextlib import suppress

import trio

from qb.core.settings import ClusterSettings

CHUNK = 65_536
HANDSHAKE_SECONDS = 5.0
_ENDED = (trio.BrokenResourceError, trio.ClosedResourceError, OSError)


class ClusterTlsFailed(Exception):
    """The other side has no certificate of the cluster, or speaks no TLS."""


class ClusterTls:
    """The certificate of this broker, and the authority of all of them."""

    def __init__(self, certificate: str, key: str, authority: str) -> None:
        """All are PEM files. Raises OSError with words for the operator."""
        # Every certificate of the authority is a broker's: which host it names says nothing more.
        self._server, self._client = (
            _context(kind, certificate, key, authority) for kind in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT)
        )

    async def accepted(self, stream: trio.abc.Stream) -> trio.abc.Stream:
        """Return what a broker that has connected says, decrypted. Raises ClusterTlsFailed."""
        return await _shaken(trio.SSLStream(stream, self._server, server_side=True, https_compatible=True))

    async def dialled(self, stream: trio.abc.Stream) -> trio.abc.Stream:
        """Return an encrypted connection to a broker. Raises OSError."""
        try:
            return await _shaken(trio.SSLStream(stream, self._client, https_compatible=True))
        except BaseException as error:
            await trio.aclose_forcefully(stream)
            if isinstance(error, ClusterTlsFailed):
                raise OSError(str(error)) from None
            raise


def _context(kind: ssl._SSLMethod, certificate: str, key: str, authority: str) -> ssl.SSLContext:
    context = ssl.SSLContext(kind)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(certificate, key or None)
        context.load_verify_locations(authority)
    except OSError as error:
        files = ", ".join(filter(None, (certificate, key, authority)))
        raise OSError(f"the cluster's certificates cannot be used ({files}): {error.strerror or error}") from None
    return context


async def _shaken(stream: trio.SSLStream[trio.abc.Stream]) -> trio.abc.Stream:
    try:
        with trio.fail_after(HANDSHAKE_SECONDS):
            await stream.do_handshake()
    except trio.TooSlowError:
        raise ClusterTlsFailed(f"its TLS handshake took longer than {HANDSHAKE_SECONDS:g} s") from None
    except (trio.BrokenResourceError, ssl.SSLError) as error:
        cause = error.__cause__ or error
        reason = getattr(cause, "reason", "") or cause
        raise ClusterTlsFailed(f"it has no certificate of the cluster: {reason}") from None
    return stream


def cluster_tls(settings: ClusterSettings) -> ClusterTls | None:
    """Return the certificates that the settings name, if any. Raises OSError with words for the operator."""
    files = settings.tls_cert, settings.tls_key, settings.tls_ca
    if not any(files):
        return None
    if not (settings.tls_cert and settings.tls_ca):
        raise OSError("mutual TLS of a cluster needs QB_CLUSTER_TLS_CERT and QB_CLUSTER_TLS_CA")
    return ClusterTls(*files)


async def pass_on(outer: trio.abc.Stream, inner: trio.abc.Stream, first: bytes) -> None:
    """Carry bytes both ways until one side ends; then both are closed."""

    async def carry(source: trio.abc.Stream, sink: trio.abc.Stream, data: bytes, ended: trio.CancelScope) -> None:
        with suppress(*_ENDED):
            if data:
                await sink.send_all(data)
            while received := await source.receive_some(CHUNK):
                await sink.send_all(received)
        ended.cancel()

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(carry, outer, inner, first, nursery.cancel_scope)
            nursery.start_soon(carry, inner, outer, b"", nursery.cancel_scope)
    finally:
        for each in (inner, outer):
            await trio.aclose_forcefully(each)
