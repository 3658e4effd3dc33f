"""How peers reach the broker: listening sockets, and the protocols that are spoken on them."""

if __name__ != "qb.doors":  # a second copy of every module, whose classes are not the first one's
    raise ImportError(f"this package is qb.doors, not {__name__}: import it by that name")
