"""Spark with executors in separate processes, and settings that are refused there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.spark.conftest import ROOT, START_S
from tests.spark.queries import assert_exactly_once, new_job
from tests.support.cluster import Cluster

pytestmark = [pytest.mark.judge, pytest.mark.timeout(1200)]

CLUSTER = "local-cluster[2,1,1024]"
ONCE = {"spark.stage.maxConsecutiveAttempts": "1", "spark.task.maxFailures": "1"}
TOLD = {
    "speculation": ("local[2]", {"spark.speculation": "true"}, "refused: spark.speculation"),
    "attempts": (CLUSTER, {}, "refused: spark.stage.maxConsecutiveAttempts is 4"),
    "accepted": (CLUSTER, ONCE, "done: 3 processes"),  # the driver counts itself
}
PROGRAM = """
import json, sys
from pathlib import Path
from fencepost.pipelines.spark import java
from fencepost.pipelines.spark.errors import OptionError
java.launch(archive=Path(sys.argv[2]), jars=[Path(jar) for jar in sys.argv[3:]])
from tests.spark.conftest import session
from tests.spark.queries import Job, run
from tests.spark.test_cluster_mode import TOLD
job = Job.from_text(sys.argv[1])
for name, (master, settings, _) in TOLD.items():
    spark = session(master, **settings)
    try:
        run(spark, job)
        processes = spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size()
        print(name, "done:", processes, "processes")
    except OptionError as error:
        print(name, "refused:", error)
    spark.stop()
"""


def test_prepared_query_on_a_cluster_is_exactly_once(
    cluster: Cluster, bootstrap: str, tmp_path: Path, archive: Path, stock_jars: list[Path]
) -> None:
    job = new_job(cluster, bootstrap, tmp_path, mode="prepared")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYSPARK_GATEWAY")
    }
    # Otherwise Spark looks for its Scala version in its build folder, which PySpark does not have.
    environment["SPARK_SCALA_VERSION"] = "2.13"
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    environment["TMPDIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, job.to_text(), str(archive), *map(str, stock_jars)],
        env=environment,
        cwd=tmp_path,  # the cluster's workers write files to their working directory
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-9000:]
    for name, (_, _, told) in TOLD.items():
        assert f"{name} {told}" in done.stdout
    assert_exactly_once(cluster, job)
    assert not list(tmp_path.glob("fencepost-*")), "what was launched leaves nothing behind"
