"""A real broker for tests: the pytest plugin `qb`, and what its fixtures are made of."""

if __name__ != "qb.testing":  # a second copy of every module, whose classes are not the first one's
    raise ImportError(f"this package is qb.testing, not {__name__}: import it by that name")
