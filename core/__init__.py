"""The broker: the wire format, what it decides, and the settings."""

if __name__ != "qb.core":  # a second copy of every module, whose classes are not the first one's
    raise ImportError(f"this package is qb.core, not {__name__}: import it by that name")
