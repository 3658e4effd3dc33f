"""Certificates for development."""

from __future__ import annotations

import argparse
from pathlib import Path

from qb.cli.terminal.command import Command, CommandFailed, Outcome
from qb.core.rights.development_certificates import NoCertificates, make_certificates


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dir", metavar="DIR", default="tls", help="where the files are written (tls)")
    parser.add_argument(
        "--name", metavar="HOST", nargs="+", default=["localhost", "127.0.0.1", "::1"], help="of the broker"
    )
    parser.add_argument("--client", metavar="CN", help="make a certificate for a client with this common name too")


def _make_dev(args: argparse.Namespace) -> Outcome:
    try:
        files = make_certificates(Path(args.dir), args.name, args.client or "")
    except NoCertificates as error:
        raise CommandFailed(str(error)) from None
    use = f"QB_TLS_CERT={args.dir}/cert.pem QB_TLS_KEY={args.dir}/key.pem; clients: QB_CA_FILE={args.dir}/ca.pem"
    return Outcome({"dir": args.dir, "files": files}, f"made {', '.join(files)} in {args.dir}\nthe broker: {use}")


COMMANDS = (
    Command(
        "tls make-dev",
        "make an authority and a certificate for development",
        "tls make-dev --dir tls --name localhost",
        _arguments,
        _make_dev,
    ),
)
