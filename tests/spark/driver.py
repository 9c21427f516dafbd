"""A separate Spark driver: ``python -m tests.spark.driver JOBS MASTER ARCHIVE [JAR…]``.

It starts each job when the previous job has reached its fault, and prints how each job ended.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.errors import StreamingQueryException

from fencepost.pipelines.spark import java
from tests.spark.crashing import CrashingDataSource
from tests.spark.queries import QUERY_S, Job, finish, start
from tests.support.waits import until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery


def begin(spark: SparkSession, job: Job) -> StreamingQuery:
    """Start a query and wait for its fault: all queries at once would need too many processes."""
    query: StreamingQuery = start(spark, job)
    once = Path(job.options["crash.once"])
    until(lambda: once.exists() or not query.isActive, "the fault", deadline_s=QUERY_S)
    return query


def main() -> None:
    jobs = [Job.from_text(text) for text in json.loads(sys.argv[1])]
    master, archive, *jars = sys.argv[2:]
    jvm = java.launch(archive=Path(archive), jars=[Path(jar) for jar in jars])
    from tests.spark.conftest import session

    spark = session(master)
    spark.dataSource.register(CrashingDataSource)
    print("started", jvm.pid, flush=True)
    queries = [begin(spark, job) for job in jobs]
    failures = 0
    for number, query in enumerate(queries):
        try:
            finish(query)
        except StreamingQueryException as error:
            failures += 1
            print(f"job {number} failed:", str(error).replace("\n", " "), flush=True)
        else:
            print(f"job {number} done", flush=True)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
