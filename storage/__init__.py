"""Logs, stages and metadata on disk."""

if __name__ != "qb.storage":  # a second copy of every module, whose classes are not the first one's
    raise ImportError(f"this package is qb.storage, not {__name__}: import it by that name")
