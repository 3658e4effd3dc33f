"""client, as type checkers see it: a module of one file cannot carry a py.typed of its own."""

from clients import *  # noqa: F403

def main() -> int: ...
