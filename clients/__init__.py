"""The libraries that programs use to talk to a broker."""

if __name__ != "qb.clients":  # a second copy of every module, whose classes are not the first one's
    raise ImportError(f"this package is qb.clients, not {__name__}: import it by that name")
