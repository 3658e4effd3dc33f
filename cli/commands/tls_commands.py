"""Certificates for development."""

from __future__ import annotations

import argparse
import os

from qb.cli.terminal.command import Command, CommandFailed, Outcome


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dir", metavar="DIR", default="tls", help="where the files are written (tls)")
    parser.add_argument(
        "--name", metavar="HOST", nargs="+", default=["localhost", "127.0.0.1", "::1"], help="of the broker"
    )
    parser.add_argument("--client", metavar="CN", help="make a certificate for a client with this common name too")


def _make_dev(args: argparse.Namespace) -> Outcome:
    try:
        import trustme
    except ImportError:
        raise CommandFailed("this needs the package trustme: pip install 'qb-broker[tls]'") from None
    authority = trustme.CA(organization_name="QB development")
    issued = authority.issue_cert(*args.name)
    files = {
        "ca.pem": authority.cert_pem.bytes(),
        "cert.pem": b"".join(blob.bytes() for blob in issued.cert_chain_pems),
        "key.pem": issued.private_key_pem.bytes(),
    }
    if args.client:
        client = authority.issue_cert(common_name=args.client)
        files["client-cert.pem"] = b"".join(blob.bytes() for blob in client.cert_chain_pems)
        files["client-key.pem"] = client.private_key_pem.bytes()
    os.makedirs(args.dir, mode=0o700, exist_ok=True)
    taken = [name for name in files if os.path.exists(os.path.join(args.dir, name))]
    if taken:
        raise CommandFailed(f"{args.dir} has {', '.join(taken)} already: remove them, or choose another --dir")
    for name, data in files.items():
        with open(os.open(os.path.join(args.dir, name), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
    use = f"QB_TLS_CERT={args.dir}/cert.pem QB_TLS_KEY={args.dir}/key.pem; clients: QB_CA_FILE={args.dir}/ca.pem"
    return Outcome({"dir": args.dir, "files": list(files)}, f"made {', '.join(files)} in {args.dir}\nthe broker: {use}")


COMMANDS = (
    Command(
        "tls make-dev",
        "make an authority and a certificate for development",
        "tls make-dev --dir tls --name localhost",
        _arguments,
        _make_dev,
    ),
)
