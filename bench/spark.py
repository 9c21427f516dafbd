"""Spark source and sink beside Spark's own Kafka connector, against the same broker in one run.

``python -m bench.spark`` starts a daemon and prints a table; ``--target kafka`` measures against
Apache Kafka. Every figure is a median of micro-batches behind the first one, which warms up. The
stock sink is at-least-once: Spark has no other.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.cluster import Cluster, unique
from tests.support.daemon import Daemon
from tests.support.kafka import CACHE, Kafka

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

JARS = CACHE.parent / "spark-kafka"
ARTIFACTS = (
    "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0",
    "org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.1.0-preview1",
    "org.apache.kafka:kafka-clients:3.9.2",
    "org.apache.commons:commons-pool2:2.13.1",
)
"""The stock connector. Its token provider of 4.2.0 is not on Maven Central, an older one fits."""

ROWS, BATCHES, PARTITIONS, SMALL_ROWS, SMALL_BATCHES = 1_000_000, 5, 4, 10, 8
QUERY_S = 600
Figures = dict[str, float]


def jars() -> list[Path]:
    """The connector's jars, fetched once and one by one: its whole tree shadows Spark's own."""
    JARS.mkdir(parents=True, exist_ok=True)
    for artifact in ARTIFACTS:
        _, name, version = artifact.split(":")
        if not (JARS / f"{name}-{version}.jar").exists():
            command = ["mvn", "-q", "-B", "dependency:copy", f"-Dartifact={artifact}"]
            subprocess.run([*command, f"-DoutputDirectory={JARS}"], check=True, timeout=600)
    return sorted(JARS.glob("*.jar"))


class Bench:
    """One broker, one Spark."""

    def __init__(self, spark: SparkSession, bootstrap: str, home: Path, rows: int) -> None:
        self._spark = spark
        self._bootstrap = bootstrap
        self._home = home
        self._rows = rows

    def topic(self) -> str:
        with Cluster(self._bootstrap) as cluster:
            return cluster.create_topic(unique("bench"), PARTITIONS)

    def fill(self) -> str:
        """A topic of rows with keys of 16 bytes and values of 100."""
        topic = self.topic()
        rows = self._spark.range(0, self._rows, 1, PARTITIONS).selectExpr(
            "LPAD(CAST(id AS STRING), 16, 'k') AS key",
            "RPAD(CAST(id AS STRING), 100, 'flight, delay, carrier; ') AS value",
        )
        options = {"kafka.bootstrap.servers": self._bootstrap, "topic": topic}
        rows.write.format("fencepost").options(**options).mode("append").save()
        return topic

    def source(self, kind: str, topic: str, per_batch: int) -> DataFrame:
        options = {
            "kafka.bootstrap.servers": self._bootstrap,
            "subscribe": topic,
            "startingOffsets": "earliest",
            "maxOffsetsPerTrigger": str(per_batch),
            "kafka.isolation.level": "read_committed",
        }
        return self._spark.readStream.format(kind).options(**options).load()

    def batches(self, writer: Any) -> list[dict[str, Any]]:
        """Run a query to its end; returns the progress of each batch with rows."""
        folder = self._home / unique("checkpoint")
        query = writer.option("checkpointLocation", str(folder)).trigger(availableNow=True).start()
        if not query.awaitTermination(QUERY_S):
            raise TimeoutError(f"a query of the benchmark takes longer than {QUERY_S} s")
        told = [json.loads(progress.json) for progress in query.recentProgress]
        return [progress for progress in told if progress["numInputRows"]]

    def rate(self, writer: Any) -> float:
        """Rows per second of the batches behind the first."""
        return statistics.median(
            progress["numInputRows"] / progress["durationMs"]["addBatch"] * 1000
            for progress in self.batches(writer)[1:]
        )

    def fixed(self, writer: Any) -> float:
        """Milliseconds of a small batch."""
        return statistics.median(
            progress["durationMs"]["triggerExecution"] for progress in self.batches(writer)[2:]
        )

    def sink(self, kind: str, rows: DataFrame) -> Any:
        from pipelines.spark.prepare import prepare

        topic = self.topic()
        rows = rows.selectExpr("key", "value")
        if kind == "direct":
            rows = prepare(rows, bootstrap=self._bootstrap, topic=topic)
        writer = rows.writeStream.format("kafka" if kind == "kafka" else "fencepost")
        return writer.option("kafka.bootstrap.servers", self._bootstrap).option("topic", topic)

    def run(self) -> Figures:
        """All figures."""
        full, small = self.fill(), self.topic()
        rows = self._spark.range(SMALL_ROWS * SMALL_BATCHES).selectExpr(
            "CAST(id AS STRING) AS key", "CAST(id AS STRING) AS value"
        )
        options = {"kafka.bootstrap.servers": self._bootstrap, "topic": small}
        rows.write.format("fencepost").options(**options).mode("append").save()
        figures: Figures = {}
        for kind in ("kafka", "fencepost"):
            told = self.source(kind, full, self._rows // BATCHES)
            figures[f"source {kind} rows/s"] = self.rate(told.writeStream.format("noop"))
        for kind in ("kafka", "staged", "direct"):
            told = self.source("fencepost", full, self._rows // BATCHES)
            figures[f"sink {kind} rows/s"] = self.rate(self.sink(kind, told))
            told = self.source("fencepost", small, SMALL_ROWS)
            figures[f"sink {kind} small batch ms"] = self.fixed(self.sink(kind, told))
        return figures


@contextmanager
def _broker(target: str, home: Path) -> Iterator[str]:
    broker: Any = Daemon(home / "data", {}) if target == "fencepost" else Kafka(home, {})
    broker.start()
    try:
        yield broker.bootstrap
    finally:
        broker.stop()


def run(target: str = "fencepost", rows: int = ROWS) -> Figures:
    """Measure against a fresh broker: rows per second and milliseconds by name."""
    from pyspark.sql import SparkSession

    from pipelines.spark import java

    found = jars()
    home = Path(tempfile.mkdtemp(prefix="fencepost-bench-spark-"))
    jvm = java.launch(memory="2g", options=["-XX:+UseParallelGC"], jars=found)
    try:
        with _broker(target, home) as bootstrap:
            spark = (
                SparkSession.builder.master("local[2]")
                .config("spark.ui.enabled", "false")
                .getOrCreate()
            )
            figures = Bench(spark, bootstrap, home, rows).run()
            spark.stop()
    finally:
        if jvm.stdin is not None:
            jvm.stdin.close()
        jvm.wait(60)
        shutil.rmtree(home, ignore_errors=True)
    for mode in ("staged", "direct"):
        ratio = figures["sink kafka rows/s"] / figures[f"sink {mode} rows/s"]
        figures[f"sink {mode}: cost beside the stock sink"] = ratio
    ours, stock = figures["source fencepost rows/s"], figures["source kafka rows/s"]
    figures["source: speed beside the stock source"] = ours / stock
    return figures


def main() -> None:
    """Parse the command line and print the figures."""
    parser = argparse.ArgumentParser(prog="bench.spark", description=__doc__)
    parser.add_argument("--target", choices=("fencepost", "kafka"), default="fencepost")
    parser.add_argument("--rows", type=int, default=ROWS)
    arguments = parser.parse_args()
    begin = time.perf_counter()
    figures = run(arguments.target, arguments.rows)
    print(f"| figure, against {arguments.target} | |\n|---|---|")
    for name, value in figures.items():
        print(f"| {name} | {value:,.2f} |")
    print(f"{time.perf_counter() - begin:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
