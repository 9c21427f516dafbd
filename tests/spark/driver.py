"""A Spark driver of its own, to be killed: ``python -m tests.spark.driver JOB MASTER ARCHIVE``."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

from pipelines.spark import java
from tests.spark.crashing import CrashingDataSource
from tests.spark.queries import Job, run


def main() -> None:
    job, master, archive = Job.from_text(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    jvm = java.launch(archive=archive)
    from tests.spark.conftest import session

    spark = session(master)
    spark.dataSource.register(CrashingDataSource)
    victims = [jvm.pid]
    if job.options.get("crash.how") == "kill":
        victims.append(os.getpid())
    print("started", jvm.pid, flush=True)
    run(spark, replace(job, options={**job.options, "crash.pids": ",".join(map(str, victims))}))
    print("done", flush=True)


if __name__ == "__main__":
    main()
