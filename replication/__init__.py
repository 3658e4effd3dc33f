"""The journal that brokers share, the NATS client beneath it, and the lease of its owner."""

if __name__ != "qb.replication":  # a second copy of every module, whose classes are not the first one's
    raise ImportError(f"this package is qb.replication, not {__name__}: import it by that name")
