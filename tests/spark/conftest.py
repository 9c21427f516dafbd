"""One JVM for the whole session; only what has to be killed gets another."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pipelines.spark import java
from tests.support.kafka import CACHE, unavailable
from tests.support.processes import Child

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.spark.queries import Job

ROOT = Path(__file__).resolve().parents[2]
START_S = 300.0
"""Patience for a driver of its own, on a machine that is busy with other things."""


def session(master: str = "local[2]") -> SparkSession:
    """A session on the JVM that was launched before."""
    from pyspark.sql import SparkSession

    return (
        SparkSession.builder.master(master)
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.session.timeZone", "UTC")
        .getOrCreate()
    )


@pytest.fixture(scope="session", autouse=True)
def pyspark_is_there() -> None:
    for name in ("pyspark", "pyarrow", "numpy"):
        if importlib.util.find_spec(name) is None:
            unavailable(f"{name} is not installed", "Spark")


@pytest.fixture(scope="session")
def archive(pyspark_is_there: None) -> Path:
    """The loaded classes of earlier sessions. They belong to one Java and one PySpark."""
    import pyspark

    found = java.find_java() or java.bundled_java()
    version = subprocess.run(
        [str(found), "-version"], capture_output=True, text=True, check=True, timeout=30
    ).stderr
    name = "".join(c if c.isalnum() else "-" for c in version.split("\n")[1])
    return CACHE.parent / "spark" / f"{name}-{pyspark.__version__}"


@pytest.fixture(scope="session")
def spark(archive: Path) -> Iterator[SparkSession]:
    """The session's Spark, two cores of this machine."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    jvm = java.launch(archive=archive)
    started = session()
    from tests.spark.crashing import CrashingDataSource

    started.dataSource.register(CrashingDataSource)
    yield started
    started.stop()
    assert jvm.stdin is not None
    jvm.stdin.close()
    jvm.wait(60)
    for name in ("PYSPARK_GATEWAY_PORT", "PYSPARK_GATEWAY_SECRET"):
        os.environ.pop(name, None)


class Drivers:
    """Drivers in processes of their own."""

    def __init__(self, archive: Path) -> None:
        self._archive = archive
        self.children: list[Child] = []

    def start(self, job: Job, master: str = "local[2]") -> Child:
        environment = {
            key: value for key, value in os.environ.items() if not key.startswith("PYSPARK_GATEWAY")
        }
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "tests.spark.driver"]
        child = Child(
            [*command, job.to_text(), master, str(self._archive)], env=environment, cwd=ROOT
        )
        self.children.append(child)
        return child


@pytest.fixture
def drivers(archive: Path, spark: Any) -> Iterator[Drivers]:
    """Starts drivers; the session's own comes first, so that there is an archive to start from."""
    started = Drivers(archive)
    yield started
    for child in started.children:
        child.kill()
