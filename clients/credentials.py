"""How a client proves who it is, and how it knows its broker."""

from __future__ import annotations

import ssl

from qb.clients.protocol.client_errors import QBError
from qb.core.wire.addresses import BrokerAddress


class Credentials:
    """A token or the file that it stands in, and the files of certificates. Its repr shows none of what is secret.

    Args:
        token: The token itself.
        token_file: A file with the token in it, or with lines `USER TOKEN`; it is read for every connection.
        ca_file: The authority that the broker's certificate is of; None: those that the system trusts.
        cert_file: A certificate of the client, PEM.
        key_file: Its private key, PEM; None: it is in `cert_file`.
    """

    def __init__(
        self,
        token: str | None = None,
        token_file: str | None = None,
        ca_file: str | None = None,
        cert_file: str | None = None,
        key_file: str | None = None,
    ) -> None:
        self._token, self._token_file, self._user = token, token_file or None, ""
        self._ca_file, self._cert_file, self._key_file = ca_file or None, cert_file or None, key_file or None
        self._context: ssl.SSLContext | None = None

    def __repr__(self) -> str:
        return f"<Credentials {'with' if self._token or self._token_file else 'without'} a token>"

    def connecting(self, address: BrokerAddress) -> ssl.SSLContext | None:
        """Return what encrypts the connection to an address; None: it is plain. Raises OSError, with words."""
        self._user = address.user
        if not address.is_secure:
            return None
        if self._context is None:
            self._context = self._load()
        return self._context

    def _load(self) -> ssl.SSLContext:
        try:
            context = ssl.create_default_context(cafile=self._ca_file)
        except OSError as error:  # SSLError is one
            raise OSError(f"the authority in {self._ca_file!r} cannot be used: {error.strerror or error}") from None
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self._cert_file is not None:
            files = self._cert_file if self._key_file is None else f"{self._cert_file}, {self._key_file}"
            try:
                context.load_cert_chain(self._cert_file, self._key_file)
            except OSError as error:
                why = error.strerror or error
                raise OSError(f"the client certificate in {files!r} cannot be used: {why}") from None
        return context

    def token(self) -> str | None:
        """Return the token for the address of the last connecting(), if there is one. Raises QBError."""
        if self._token is not None or self._token_file is None:
            return self._token
        try:
            with open(self._token_file, encoding="utf-8") as file:
                lines = [line.split() for line in file if line.strip() and not line.startswith("#")]
        except (OSError, UnicodeDecodeError) as error:
            raise QBError(f"the token file {self._token_file!r} cannot be read: {error}") from None
        for words in lines:
            if len(words) == 1 or (len(words) == 2 and words[0] == self._user):
                return words[-1]
        whose = f" of user {self._user!r}" if self._user else ""
        raise QBError(f"the token file {self._token_file!r} has no token{whose}")
