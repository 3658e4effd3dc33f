"""One Spark session for all tests of pyspark_qb; the broker's fixtures are those of tests/conftest.py."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.support.brokers import BrokerProcess

collect_ignore_glob = [] if find_spec("pyspark") else ["test_*.py"]  # nothing to test without the extra

QUICK = {
    "spark.ui.enabled": False,
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",  # fast to start, and few threads
    "spark.sql.codegen.wholeStage": False,
    "spark.sql.shuffle.partitions": 2,
    "spark.default.parallelism": 2,
    "spark.task.maxFailures": 1,
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.streaming.numRecentProgressUpdates": 200,
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}


@pytest.fixture(scope="session", autouse=True)
def spark_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The Spark that is installed, without the archive of its Python: it would be compiled again in each process."""
    import pyspark

    installed, home = Path(pyspark.__file__).parent, tmp_path_factory.mktemp("spark")
    (home / "python/lib").mkdir(parents=True)
    for path in [*installed.iterdir(), *installed.glob("python/lib/py4j*")]:
        if path.name != "python":
            (home / path.relative_to(installed)).symlink_to(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARK_HOME", str(home))
        yield home


@pytest.fixture(scope="session")
def spark(spark_home: Path) -> Iterator[SparkSession]:
    """A real Spark in local[2], shared by all tests."""
    import pyspark_qb

    session = pyspark_qb.session("qb tests", "local[2]", **QUICK)
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()


@pytest.fixture
def servers(broker: BrokerProcess) -> str:
    """What to give to option("servers"): the address of a real broker process."""
    return f"127.0.0.1:{broker.port}"
