"""Our Spark source and sink compared with Spark's own Kafka connector, on the same broker."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.brokers import FENCEPOST as FENCEPOST_BROKER
from bench.brokers import KAFKA, SIDES, pid_of
from bench.spark import FENCEPOST, STOCK, jars
from bench.suite import DEFAULTS, Figures, Pair, Suite
from tests.support.daemon import ROOT


def driver(
    workload: str, value_bytes: int = 100, broker: str = FENCEPOST_BROKER
) -> Callable[[Path], Iterator[tuple[str, Figures]]]:
    """Run a workload of ``bench/spark.py`` in a process of its own, with a JVM of its own."""

    def run(home: Path) -> Iterator[tuple[str, Figures]]:
        jars()
        started = SIDES[broker](home / "broker", DEFAULTS)
        (home / "broker").mkdir()
        started.start()
        try:
            command = [sys.executable, "-m", "bench.spark", started.bootstrap, str(home)]
            with subprocess.Popen(
                [*command, workload, str(value_bytes), str(pid_of(started))],
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
            ) as process:
                if process.stdout is None:
                    raise RuntimeError("a process without its output")
                for line in process.stdout:
                    side, figures = json.loads(line)
                    yield side, figures
            if process.returncode:
                raise RuntimeError(f"bench.spark {workload} ended with {process.returncode}")
        finally:
            started.kill()

    return run


SPARK = Suite(
    "spark",
    'Spark, 500,000 rows with keys of 16 bytes, 4 partitions, local[2]: format("fencepost") beside '
    "Spark's own Kafka connector, whose sink is at-least-once, on the same broker. Sources write "
    "to noop; sinks read the same Parquet files, and in micro-batches of 10 rows the stock source. "
    "The streaming throughput counts micro-batches of 100,000 rows from the second on.",
    (
        Pair("source, rows of 100 B", driver("source")),
        Pair("sink, rows of 100 B", driver("sink")),
        Pair("micro-batches of 10 rows", driver("fixed")),
        Pair("source, rows of 1 KB", driver("source", 1000)),
        Pair("sink, rows of 1 KB", driver("sink", 1000)),
        Pair("sink after prepare(), rows of 100 B", driver("direct")),
        Pair("sink after prepare(), rows of 1 KB", driver("direct", 1000)),
        Pair("source, rows of 100 B, on Apache Kafka", driver("source", broker=KAFKA)),
        Pair("sink, rows of 100 B, on Apache Kafka", driver("sink", broker=KAFKA)),
        Pair("micro-batches of 10 rows, on Apache Kafka", driver("fixed", broker=KAFKA)),
    ),
    sides={FENCEPOST: 'format("fencepost")', STOCK: "Spark's connector"},
)
