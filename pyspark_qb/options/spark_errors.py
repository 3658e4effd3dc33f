"""What can be wrong before a broker is asked."""

from __future__ import annotations


class SparkUseError(Exception):
    """Something that the user of `format("qb")` can put right; the text says how."""


class BadOption(SparkUseError, ValueError):
    """An option that there is not, or a value that it cannot have."""


class BadColumns(SparkUseError, ValueError):
    """Columns, or a value in one of them, that cannot be published."""


class NoBatch(SparkUseError, RuntimeError):
    """Spark did not say which query and batch a task belongs to, so that a replay could not be recognised."""


class DataLost(SparkUseError, RuntimeError):
    """Messages were dropped before they were read, and failOnDataLoss is on."""


class DirectoryInUse(SparkUseError, RuntimeError):
    """A data directory whose files cannot be read safely as they are."""


class NoJava(SparkUseError, RuntimeError):
    """There is no Java to run Spark with."""

    def __init__(self) -> None:
        super().__init__(
            "Spark needs Java 17 or newer: install one and set JAVA_HOME or PATH, "
            "or let pip bring one with: pip install 'qb-broker[spark-jvm]'"
        )
