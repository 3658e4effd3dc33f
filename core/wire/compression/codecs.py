"""The codecs of COMPRESSED frames. Their packages are imported when they are first used."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

PACKAGES = {"zstd": "zstandard", "lz4": "lz4"}  # of each codec; the one that makes the least of JSON comes first


@cache
def installed_codecs() -> tuple[str, ...]:
    """Return the codecs whose packages are installed; none is imported."""
    return tuple(name for name, package in PACKAGES.items() if find_spec(package) is not None)


def check_codec(name: str | None) -> str | None:
    """Return the name of a codec, or None for none.

    Raises ValueError for a name that is none, ImportError if its package is not installed.
    """
    if name is None or name in installed_codecs():
        return name
    if name not in PACKAGES:
        raise ValueError(f"compression must be one of {', '.join(map(repr, PACKAGES))} or None, not {name!r}")
    raise ImportError(
        f"compression={name!r} needs the package {PACKAGES[name]}: install it with pip install 'qb-broker[compression]'"
    )
