"""One JVM for the whole session. Only drivers that are killed have their own JVM."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fencepost.pipelines.spark import java
from tests.support.kafka import CACHE, required, unavailable
from tests.support.processes import Child

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.spark.queries import Job

ROOT = Path(__file__).resolve().parents[2]
START_S = 300.0
"""Deadline until a separate driver has started on a busy machine."""


def session(master: str = "local[2]", **settings: str) -> SparkSession:
    """Return a session on the JVM that is already running."""
    from pyspark.sql import SparkSession

    told = {
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
        **settings,
    }
    return SparkSession.builder.master(master).config(map=dict(told)).getOrCreate()


def require_spark() -> None:
    """Skip the test without Spark's Python packages, or fail it where CI requires them."""
    for name in ("pyspark", "pyarrow", "numpy"):
        if importlib.util.find_spec(name) is None:
            unavailable(f"{name} is not installed", "Spark")


@pytest.fixture(scope="session", autouse=True)
def pyspark_is_there() -> None:
    require_spark()


@pytest.fixture(scope="session")
def stock_jars(request: pytest.FixtureRequest, pyspark_is_there: None) -> list[Path]:
    """Return the jars of Spark's own Kafka connector, [] without ``--stock``."""
    if not request.config.getoption("--stock"):
        return []
    from bench.spark import jars

    with required("Spark's own Kafka connector"):
        return jars()


@pytest.fixture(scope="session")
def archive(stock_jars: list[Path]) -> Path:
    """Return the file of the class data archive for one version of Java, PySpark and jars.

    Concurrent workers of pytest-xdist get different files, because each worker writes one.
    """
    import pyspark

    found = java.find_java() or java.bundled_java()
    version = subprocess.run(
        [str(found), "-version"], capture_output=True, text=True, check=True, timeout=30
    ).stderr
    name = "".join(c if c.isalnum() else "-" for c in version.split("\n")[1])
    stock = "-stock" if stock_jars else ""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    return CACHE.parent / "spark" / f"{name}-{pyspark.__version__}{stock}{worker}"


@pytest.fixture(scope="session")
def spark(archive: Path, stock_jars: list[Path]) -> Iterator[SparkSession]:
    """Yield the session's Spark, which uses two cores of this machine."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    jvm = java.launch(archive=archive, jars=stock_jars)
    started = session()
    from tests.spark.crashing import CrashingDataSource

    started.dataSource.register(CrashingDataSource)
    yield started
    started.stop()
    assert jvm.stdin is not None
    jvm.stdin.close()
    jvm.wait(START_S)  # the JVM may be writing its class data archive
    for name in ("PYSPARK_GATEWAY_PORT", "PYSPARK_GATEWAY_SECRET"):
        os.environ.pop(name, None)


class Drivers:
    """Starts drivers in separate processes, which a class data archive makes faster."""

    def __init__(self, archive: Path, jars: list[Path]) -> None:
        self._arguments = [str(archive), *map(str, jars)]
        self.children: list[Child] = []

    def start(self, *jobs: Job, master: str = "local[2]") -> Child:
        environment = {
            key: value for key, value in os.environ.items() if not key.startswith("PYSPARK_GATEWAY")
        }
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
        told = json.dumps([job.to_text() for job in jobs])
        command = [sys.executable, "-m", "tests.spark.driver", told, master, *self._arguments]
        child = Child(command, env=environment, cwd=ROOT)
        self.children.append(child)
        return child


@pytest.fixture(scope="module")
def drivers(archive: Path, stock_jars: list[Path]) -> Iterator[Drivers]:
    """Yield a :class:`Drivers`, and kill its drivers at the end."""
    started = Drivers(archive, stock_jars)
    yield started
    for child in started.children:
        child.kill()
