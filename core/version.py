"""core.version: the version, in the one place where it stands.

May import: the standard library.
Never: anything else.
"""

__version__ = "0.1.0"
