"""Spark with executors in processes of their own, and the settings that are refused there."""

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

PROGRAM = """
import sys
from pipelines.spark import java
from pipelines.spark.errors import OptionError
java.launch()
from tests.spark.conftest import session
from tests.spark.queries import Job, run
once = {"spark.stage.maxConsecutiveAttempts": "1", "spark.task.maxFailures": "1"}
job, cluster = Job.from_text(sys.argv[1]), "local-cluster[2,1,768]"
for master, conf in [("local[2]", {"spark.speculation": "true"}), (cluster, {}), (cluster, once)]:
    spark = session(master, **conf)
    try:
        run(spark, job)
        print("done:", spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size(), "processes")
    except OptionError as error:
        print("refused:", error)
    spark.stop()
"""


def test_a_shared_transaction_on_a_cluster(
    cluster: Cluster, bootstrap: str, tmp_path: Path
) -> None:
    job = new_job(cluster, bootstrap, tmp_path)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYSPARK_GATEWAY")
    }
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, job.to_text()],
        env=environment,
        cwd=tmp_path,  # the cluster's workers keep their files where they are started
        capture_output=True,
        text=True,
        timeout=3 * START_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = [line for line in done.stdout.splitlines() if line.startswith(("refused", "done"))]
    speculation, attempts, ended = told
    assert "spark.speculation" in speculation
    assert "spark.stage.maxConsecutiveAttempts is 4" in attempts
    # The driver counts itself.
    assert ended == "done: 3 processes"
    assert_exactly_once(cluster, job)
