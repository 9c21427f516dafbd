"""The program in which a Spark query with exactly-once source and sink copies: see the package.

``MORE`` is a folder for the query's checkpoint. librdkafka is the writer and the reader.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fencepost.pipelines.spark import java
from tests.oracle.failover import program
from tests.oracle.failover.librdkafka import read, write
from tests.oracle.failover.program import NAME, SOURCE, TARGET, at, tell
from tests.spark.conftest import session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

LOOK_S = 0.1


def start(spark: SparkSession, folder: Path) -> StreamingQuery:
    rows = (
        spark.readStream.format("fencepost")
        .option("kafka.bootstrap.servers", program.BOOTSTRAP)
        .option("subscribe", SOURCE)
        .option("startingOffsets", "earliest")
        .load()
        .select("value", "partition")
    )
    return (
        rows.writeStream.format("fencepost")
        .option("kafka.bootstrap.servers", program.BOOTSTRAP)
        .option("kafka.transactional.id", f"copier-{NAME}")
        .option("topic", TARGET)
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(processingTime="1 second")  # the other programs share the machine
        .start()
    )


def copy() -> None:
    """Run the query. When it fails, report the error and restart it, as an operator would."""
    folder = Path(program.MORE[0])
    java.launch(scratch=folder)
    spark = session(**{"spark.ui.showConsoleProgress": "false"})
    rows: dict[int, int] = {}
    while True:
        query = start(spark, folder)
        try:
            while not query.awaitTermination(LOOK_S):  # type: ignore[arg-type] # any number will do
                for progress in query.recentProgress:
                    rows[progress["batchId"]] = max(
                        progress["numInputRows"], rows.get(progress["batchId"], 0)
                    )
                at["copied"] = sum(rows.values())
        except Exception as error:  # noqa: BLE001 - every error is reported
            tell("copier", f"query: {type(error).__name__}: {str(error)[:300]}")


if __name__ == "__main__":
    program.work(write, read, copy)
