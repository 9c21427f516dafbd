"""The process in which Spark runs for the suite ``spark``: one JVM, one broker, one workload.

``python -m bench.spark BOOTSTRAP HOME WORKLOAD VALUE_BYTES BROKER_PID`` prints a line of JSON per
run, [side, figures], with the sides in turn and in changing order, after warm-up runs of each. The
rows read or written in a run are counted; a run that lost or duplicated rows ends the process.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.clients import create_topic
from bench.suite import Figures
from fencepost.pipelines.spark import java
from tests.support.cluster import unique
from tests.support.kafka import CACHE, ROOT, lock_cache, maven

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

JARS = CACHE.parent / "spark-kafka"
ARTIFACTS = (
    "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0",
    "org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.1.0-preview1",
    "org.apache.kafka:kafka-clients:3.9.2",
    "org.apache.commons:commons-pool2:2.13.1",
)
"""Jars of the stock connector. Its token provider 4.2.0 is not on Maven Central; an older one fits.
"""

FENCEPOST, STOCK = "fencepost", "stock"
FORMATS = {FENCEPOST: "fencepost", STOCK: "kafka"}

ROWS, BATCHES, PARTITIONS = 500_000, 5, 4
SMALL_ROWS, SMALL_BATCHES, SMALL_WARMING = 10, 20, 5
WARMING, RUNS = 1, 3
"""Runs of each side: first the warm-up runs, then the measured ones."""
QUERY_S = 600
ISOLATION = "read_committed"


def jars() -> list[Path]:
    """Return the connector's jars; fetch missing ones. Raises OracleMissingError.

    Each jar is fetched without its dependencies, which would shadow Spark's own jars.
    """
    JARS.mkdir(parents=True, exist_ok=True)
    with lock_cache():
        for artifact in ARTIFACTS:
            _, name, version = artifact.split(":")
            if not (JARS / f"{name}-{version}.jar").exists():
                maven("dependency:copy", f"-Dartifact={artifact}", f"-DoutputDirectory={JARS}")
    return sorted(JARS.glob("*.jar"))


def cpu_of_tree(*roots: int) -> dict[int, float]:
    """Return the processor time in seconds of these processes and their descendants, by process.

    A process includes the children that it has waited for. PySpark's daemon does not wait for its
    workers, so the time of workers that have ended is missing.
    """
    children: dict[int, list[int]] = {}
    used: dict[int, float] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # the process has ended meanwhile
        pid = int(stat.parent.name)
        children.setdefault(int(fields[1]), []).append(pid)
        used[pid] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    found: dict[int, float] = {}
    waiting = list(roots)
    while waiting:
        pid = waiting.pop()
        found[pid] = used.get(pid, 0.0)
        waiting += children.get(pid, [])
    return found


class Clock:
    """Wall time, and processor time of Spark, its Python workers and the broker together."""

    def __init__(self, broker_pid: int) -> None:
        self._roots = os.getpid(), broker_pid
        self._wall, self._cpu = time.perf_counter(), cpu_of_tree(*self._roots)

    def figures(self, what: str, rows: int, per_second: float | None = None) -> Figures:
        """Return rows per second, over the whole time unless given, and processor time."""
        wall = time.perf_counter() - self._wall
        return {
            f"throughput of the {what} query (rows/s)": per_second or rows / wall,
            f"CPU time of the {what} query per million rows (s)": self.cpu() / rows * 1e6,
        }

    def cpu(self) -> float:
        """Return seconds of processor time so far, of running processes and awaited children."""
        now = cpu_of_tree(*self._roots)
        return sum(used - self._cpu.get(pid, 0.0) for pid, used in now.items())


@dataclass(frozen=True)
class Bench:
    """One broker, one Spark, rows of one size."""

    spark: SparkSession
    bootstrap: str
    home: Path
    value_bytes: int
    broker_pid: int

    def options(self, **more: str) -> dict[str, str]:
        return {"kafka.bootstrap.servers": self.bootstrap, **more}

    # --- input and output ---

    def rows(self) -> DataFrame:
        """Return rows with keys of 16 bytes and distinct values."""
        return self.spark.range(0, ROWS, 1, PARTITIONS * BATCHES).selectExpr(
            "LPAD(CAST(id AS STRING), 16, 'k') AS key",
            f"RPAD(CAST(id AS STRING), {self.value_bytes}, 'flight, delay, carrier; ') AS value",
        )

    def topic(self) -> str:
        return create_topic(self.bootstrap, PARTITIONS)

    def filled(self) -> str:
        """Create a topic with all rows, written by Spark's own connector."""
        topic = self.topic()
        self.rows().write.format("kafka").options(**self.options(topic=topic)).save()
        return topic

    def stored(self) -> str:
        """Create a folder of Parquet with all rows, one file per task and micro-batch."""
        folder = str(self.home / unique("rows"))
        self.rows().write.option("compression", "none").parquet(folder)
        return folder

    def check(self, topic: str, expected: int) -> None:
        """Raise unless a read_committed consumer finds every row in ``topic``, once."""
        options = self.options(subscribe=topic) | {"kafka.isolation.level": ISOLATION}
        read = self.spark.read.format("kafka").options(**options).load()
        found = read.selectExpr("COUNT(*) AS all", "COUNT(DISTINCT value) AS apart").first()
        if found is None or (found["all"], found["apart"]) != (expected, expected):
            raise RuntimeError(f"{topic}: {found} where {expected} rows were written")

    # --- running ---

    def batches(self, writer: Any, expected: int) -> list[dict[str, Any]]:
        """Run a query to its end; return the progress of each batch with rows."""
        folder = self.home / unique("checkpoint")
        query = writer.option("checkpointLocation", str(folder)).trigger(availableNow=True).start()
        if not query.awaitTermination(QUERY_S):
            raise TimeoutError(f"a query of the benchmark takes longer than {QUERY_S} s")
        told = [json.loads(progress.json) for progress in query.recentProgress]
        rows = sum(progress["numInputRows"] for progress in told)
        if rows != expected:
            raise RuntimeError(f"{rows} rows went through a query where {expected} were to")
        return [progress for progress in told if progress["numInputRows"]]

    def streamed(self, writer: Any) -> float:
        """Return rows per second, over whole micro-batches from the second on."""
        told = self.batches(writer, ROWS)[1:]
        rows = sum(progress["numInputRows"] for progress in told)
        return rows / sum(progress["durationMs"]["triggerExecution"] for progress in told) * 1e3

    def small(self, writer: Any) -> float:
        """Return the median milliseconds of a micro-batch of ten rows."""
        told = self.batches(writer, SMALL_ROWS * SMALL_BATCHES)[SMALL_WARMING:]
        return statistics.median(progress["durationMs"]["triggerExecution"] for progress in told)

    # --- workloads: each returns a function that measures one run of a side ---

    def source(self) -> Callable[[str], Figures]:
        """Measure a source that reads a topic and writes to ``noop``."""
        from pyspark.sql import Observation
        from pyspark.sql import functions as fn

        topic = self.filled()
        options = self.options(subscribe=topic, startingOffsets="earliest")
        options |= {"kafka.isolation.level": ISOLATION}
        portion = {"maxOffsetsPerTrigger": str(ROWS // BATCHES)}

        def run(side: str) -> Figures:
            clock = Clock(self.broker_pid)
            stream = self.spark.readStream.format(FORMATS[side]).options(**options | portion).load()
            streamed = self.streamed(stream.writeStream.format("noop"))
            figures = clock.figures("streaming", ROWS, streamed)
            clock = Clock(self.broker_pid)
            rows = self.spark.read.format(FORMATS[side]).options(**options).load()
            seen = Observation()
            counted = rows.observe(seen, fn.count(fn.lit(1)).alias("rows"))
            counted.write.format("noop").mode("overwrite").save()
            figures |= clock.figures("batch", ROWS)
            if seen.get["rows"] != ROWS:
                raise RuntimeError(f"a batch has read {seen.get['rows']} rows of {ROWS}")
            return figures

        return run

    def sink(self, *, direct: bool) -> Callable[[str], Figures]:
        """Measure a sink whose rows come from Parquet files."""
        from fencepost.pipelines.spark.prepare import prepare

        folder = self.stored()
        schema = self.spark.read.parquet(folder).schema

        def ready(side: str, rows: DataFrame, topic: str) -> DataFrame:
            if side == STOCK or not direct:
                return rows
            return prepare(rows, bootstrap=self.bootstrap, topic=topic)

        def run(side: str) -> Figures:
            topic = self.topic()
            clock = Clock(self.broker_pid)
            files = self.spark.readStream.schema(schema).option("maxFilesPerTrigger", PARTITIONS)
            rows = ready(side, files.parquet(folder), topic)
            writer = rows.writeStream.format(FORMATS[side]).options(**self.options(topic=topic))
            streamed = self.streamed(writer)
            figures = clock.figures("streaming", ROWS, streamed)
            self.check(topic, ROWS)
            topic = self.topic()
            clock = Clock(self.broker_pid)
            rows = ready(side, self.spark.read.parquet(folder), topic)
            writing = rows.write.format(FORMATS[side]).options(**self.options(topic=topic))
            writing.mode("append").save()
            figures |= clock.figures("batch", ROWS)
            self.check(topic, ROWS)
            return figures

        return run

    def fixed(self) -> Callable[[str], Figures]:
        """Measure micro-batches of ten rows: the side's source, then the side's sink.

        The source writes to ``noop``; the sink's rows come from the stock source on both sides.
        """
        topic = self.topic()
        expected = SMALL_ROWS * SMALL_BATCHES
        rows = self.spark.range(expected).selectExpr("CAST(id AS STRING) AS value")
        rows.write.format("kafka").options(**self.options(topic=topic)).save()
        options = self.options(subscribe=topic, startingOffsets="earliest")
        options |= {"kafka.isolation.level": ISOLATION, "maxOffsetsPerTrigger": str(SMALL_ROWS)}

        def read(side: str) -> DataFrame:
            return self.spark.readStream.format(FORMATS[side]).options(**options).load()

        def run(side: str) -> Figures:
            clock = Clock(self.broker_pid)
            source = self.small(read(side).writeStream.format("noop"))
            read_s = clock.cpu()
            target = self.topic()
            writer = read(STOCK).select("value").writeStream.format(FORMATS[side])
            clock = Clock(self.broker_pid)
            sink = self.small(writer.options(**self.options(topic=target)))
            written_s = clock.cpu()
            self.check(target, expected)
            return {
                "time per micro-batch of the source (ms)": source,
                "CPU time per micro-batch of the source (ms)": read_s / SMALL_BATCHES * 1e3,
                "time per micro-batch of the sink (ms)": sink,
                "CPU time per micro-batch of the sink (ms)": written_s / SMALL_BATCHES * 1e3,
            }

        return run


def in_turn(run: Callable[[str], Figures]) -> Iterator[tuple[str, Figures]]:
    """Warm both sides up, then yield their figures, with the order of the sides alternating."""
    for number in range(-WARMING, RUNS):
        sides = [FENCEPOST, STOCK] if number % 2 == 0 else [STOCK, FENCEPOST]
        for side in sides:
            figures = run(side)
            if number >= 0:
                yield side, figures
            else:
                print(f"  warming up: {side}: {figures}", file=sys.stderr, flush=True)


def main() -> None:
    """Run one workload."""
    bootstrap, home, workload, value_bytes, broker_pid = sys.argv[1:]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    jvm = java.launch(memory="3g", options=["-XX:+UseParallelGC"], jars=jars(), scratch=Path(home))
    from pyspark.sql import SparkSession

    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    bench = Bench(spark, bootstrap, Path(home), int(value_bytes), int(broker_pid))
    prepared = {
        "source": bench.source,
        "sink": lambda: bench.sink(direct=False),
        "direct": lambda: bench.sink(direct=True),
        "fixed": bench.fixed,
    }
    for side, figures in in_turn(prepared[workload]()):
        print(json.dumps([side, figures]), flush=True)
    spark.stop()
    if jvm.stdin is not None:
        jvm.stdin.close()
    jvm.wait(60)


if __name__ == "__main__":
    main()
