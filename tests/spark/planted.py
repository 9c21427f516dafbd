"""Runs a Spark job with secrets in its options, and with all logs and files that Spark can write.

``python -m tests.spark.planted OPTIONS SOURCE SINK HOME ARCHIVE`` writes to standard output.
Spark's log (SQL at DEBUG), event log, scratch files and checkpoint are in the folder HOME.
``OPTIONS`` is a JSON file, ``ARCHIVE`` the class data archive.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

from fencepost.pipelines.spark import java

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

LOG = """\
rootLogger.level=info
logger.sql.name=org.apache.spark.sql
logger.sql.level=debug
rootLogger.appenderRef.file.ref=file
appender.file.type=File
appender.file.name=file
appender.file.fileName={home}/spark.log
appender.file.layout.type=PatternLayout
appender.file.layout.pattern=%p %c{{1}} %m%n
"""


def explained(df: DataFrame) -> None:
    for mode in ("simple", "extended", "formatted", "codegen", "cost"):
        df.explain(mode=mode)
    print(df._jdf.queryExecution().toString())


def job(spark: SparkSession, options: dict[str, str], source: str, sink: str, home: Path) -> None:
    rows = spark.read.format("fencepost").options(**options).option("subscribe", source).load()
    print("rows", rows.count())
    explained(rows)
    rows.createOrReplaceTempView("rows")
    print(spark.sql("EXPLAIN EXTENDED SELECT value FROM rows").collect())
    rows.write.format("fencepost").options(**options).option("topic", sink).mode("append").save()
    stream = spark.readStream.format("fencepost").options(**options).option("subscribe", source)
    loaded = stream.option("startingOffsets", "earliest").load()
    explained(loaded)
    query = (
        loaded.writeStream.format("fencepost")
        .options(**options)
        .option("topic", sink)
        .option("checkpointLocation", str(home / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    query.explain(extended=True)
    print(query.status, *(progress.json for progress in query.recentProgress))
    wrong = {
        "kafka.sasl.password": "wrong",
        "kafka.ssl.key.pasword": options["kafka.sasl.password"],
    }
    for key, value in wrong.items():
        bad = spark.read.format("fencepost").options(**{**options, key: value})
        try:
            bad.option("subscribe", source).load().count()
        except Exception as error:  # noqa: BLE001 - any error is reported
            print("told", error)


def pages(spark: SparkSession) -> None:
    web, name = spark.sparkContext.uiWebUrl, spark.sparkContext.applicationId
    told = f"/api/v1/applications/{name}"
    executions = [f"/SQL/execution/?id={number}" for number in range(6)]
    for path in (
        *("/SQL/", "/environment/", "/StreamingQuery/", "/jobs/", "/stages/"),
        *(f"{told}/environment", f"{told}/sql?details=true&planDescription=true&length=100"),
        *executions,
    ):
        with urllib.request.urlopen(f"{web}{path}", timeout=60) as page:
            print(path, page.read().decode())


def main() -> None:
    options, source, sink, home, archive = sys.argv[1:]
    folder = Path(home)
    (folder / "events").mkdir()
    log = folder / "log4j2.properties"
    log.write_text(LOG.format(home=home))
    java.launch(
        options=[f"-Dlog4j2.configurationFile=file:{log}"], scratch=folder, archive=Path(archive)
    )
    from tests.spark.conftest import session

    spark = session(
        **{
            "spark.ui.enabled": "true",
            "spark.ui.port": "0",
            "spark.eventLog.enabled": "true",
            "spark.eventLog.dir": f"file://{home}/events",
            "spark.local.dir": str(folder / "local"),
        }
    )
    job(spark, json.loads(Path(options).read_text()), source, sink, folder)
    pages(spark)
    spark.stop()
    print("done")


if __name__ == "__main__":
    main()
