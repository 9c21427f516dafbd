"""Spark with executors in processes of their own, and the settings that are refused there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.spark.conftest import ROOT, START_S
from tests.spark.queries import assert_exactly_once, new_job
from tests.support.cluster import Cluster

pytestmark = [pytest.mark.judge, pytest.mark.timeout(1200)]

PROGRAM = """
import json, sys
from pipelines.spark import java
from pipelines.spark.errors import OptionError
java.launch()
from tests.spark.conftest import session
from tests.spark.queries import Job, run
spark = session(sys.argv[2], **json.loads(sys.argv[3]))
try:
    run(spark, Job.from_text(sys.argv[1]))
    print("done:", spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size(), "processes")
except OptionError as error:
    print("refused:", error)
spark.stop()
"""
CLUSTER = "local-cluster[2,1,1024]"
ONCE = {"spark.stage.maxConsecutiveAttempts": "1", "spark.task.maxFailures": "1"}


@pytest.mark.parametrize(
    ("master", "settings", "told"),
    [
        ("local[2]", {"spark.speculation": "true"}, "refused: spark.speculation"),
        (CLUSTER, {}, "refused: spark.stage.maxConsecutiveAttempts is 4"),
        (CLUSTER, ONCE, "done: 3 processes"),  # the driver counts itself
    ],
    ids=["speculation", "attempts", "accepted"],
)
def test_a_shared_transaction_on_a_cluster(
    cluster: Cluster,
    bootstrap: str,
    tmp_path: Path,
    master: str,
    settings: dict[str, str],
    told: str,
) -> None:
    job = new_job(cluster, bootstrap, tmp_path)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYSPARK_GATEWAY")
    }
    # Spark asks its build for it, which a PySpark from pip does not have.
    environment["SPARK_SCALA_VERSION"] = "2.13"
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, job.to_text(), master, json.dumps(settings)],
        env=environment,
        cwd=tmp_path,  # the cluster's workers keep their files where they are started
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-9000:]
    assert told in done.stdout
    if told.startswith("done"):
        assert_exactly_once(cluster, job)
