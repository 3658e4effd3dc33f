"""The command line `qb`."""

if __name__ != "qb.cli":  # a second copy of every module, whose classes are not the first one's
    raise ImportError(f"this package is qb.cli, not {__name__}: import it by that name")
