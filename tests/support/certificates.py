"""Certificates for the tests of TLS."""

from __future__ import annotations

from pathlib import Path

import trustme


def write_certificate(directory: Path, authority: trustme.CA) -> None:
    issued = authority.issue_cert("localhost")
    (directory / "cert.pem").write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(directory / "key.pem")
