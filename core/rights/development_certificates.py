"""An authority and certificates for development, in files that their owner alone can read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


class NoCertificates(Exception):
    """They cannot be made; the text says why."""


def make_certificates(directory: Path, names: Sequence[str], client: str = "") -> list[str]:
    """Write an authority and a certificate for hosts, and one for a client with a common name; returns the files.

    Raises NoCertificates, also if one of the files is there already, and OSError.
    """
    try:
        import trustme
    except ImportError:
        raise NoCertificates("this needs the package trustme: pip install 'qb-broker[tls]'") from None
    authority = trustme.CA(organization_name="QB development")
    issued = authority.issue_cert(*names)
    files = {
        "ca.pem": authority.cert_pem.bytes(),
        "cert.pem": b"".join(blob.bytes() for blob in issued.cert_chain_pems),
        "key.pem": issued.private_key_pem.bytes(),
    }
    if client:
        made = authority.issue_cert(common_name=client)
        files["client-cert.pem"] = b"".join(blob.bytes() for blob in made.cert_chain_pems)
        files["client-key.pem"] = made.private_key_pem.bytes()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if taken := [name for name in files if (directory / name).exists()]:
        raise NoCertificates(f"{directory} has {', '.join(taken)} already: remove them, or choose another directory")
    for name, data in files.items():
        write_secret(directory / name, data)
    return list(files)


def write_secret(path: Path, data: bytes) -> None:
    """Write a new file that its owner alone can read. Raises OSError."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
