"""The client library and the command line of this checkout: `from client import BrokerClient`, `python client.py`.

Installed, the library is `qb` and the command line is the command `qb`.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "src"))  # this checkout's own code, whatever is installed

import qb

__all__ = ["main", *qb.__all__]


def __getattr__(name: str) -> Any:
    """Return a name of `qb`; those that begin with Async load trio when they are first used."""
    return getattr(qb, name)


def main() -> int:
    """Run the command line and return its exit code."""
    from qb.cli.main import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
