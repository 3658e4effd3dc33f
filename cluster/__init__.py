"""One broker of several: its role in a cell, redirects and relays, the other brokers."""

if __name__ != "qb.cluster":  # a second copy of every module, whose classes are not the first one's
    raise ImportError(f"this package is qb.cluster, not {__name__}: import it by that name")
