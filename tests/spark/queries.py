"""The query that most scenarios run, and the checks of its output."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pytest

from fencepost.pipelines.spark.offsets import from_json
from fencepost.pipelines.spark.prepare import prepare
from tests.support.cluster import READ_COMMITTED, READ_UNCOMMITTED, Cluster, unique
from tests.support.processes import Child
from tests.support.waits import until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

RECORDS, PER_BATCH, PARTITIONS = 900, 300, 4
QUERY_S = 300.0
LIVE_PAUSE_S = 0.02
"""The pause of a background producer between two records."""
SMALL = {"kafka.max.request.size": "500"}
"""A sink option with which a partition has several batches, so that the order of rows matters."""
KEEP = {"retention.ms": "-1"}
"""Topic settings; without them brokers would delete the records, whose timestamps are old."""


HEADER_SHAPES = {
    "array(named_struct('key', 'a', 'value', CAST('b' AS BINARY)))": True,
    "array(named_struct('key', 'a', 'value', CAST(NULL AS BINARY)))": True,
    "array(named_struct('KEY', 'a', 'Value', CAST('b' AS BINARY)))": True,
    "CAST(array() AS ARRAY<STRUCT<key: STRING, value: BINARY>>)": True,
    "CAST(NULL AS ARRAY<STRUCT<key: STRING, value: BINARY>>)": True,
    "array(named_struct('key', CAST(NULL AS STRING), 'value', CAST('b' AS BINARY)))": False,
    "array(CAST(NULL AS STRUCT<key: STRING, value: BINARY>))": False,
    "array(named_struct('key', 'a', 'value', 'b'))": False,
    "array(named_struct('key', CAST('a' AS BINARY), 'value', CAST('b' AS BINARY)))": False,
    "array(named_struct('k', 'a', 'v', CAST('b' AS BINARY)))": False,
    "array(named_struct('value', CAST('b' AS BINARY), 'key', 'a'))": False,
    "array(named_struct('key', 'a', 'value', CAST('b' AS BINARY), 'more', 1))": False,
    "array(named_struct('key', 'a'))": False,
    "array('a')": False,
    "array(array(named_struct('key', 'a', 'value', CAST('b' AS BINARY))))": False,
    "map('a', CAST('b' AS BINARY))": False,
    "named_struct('key', 'a', 'value', CAST('b' AS BINARY))": False,
    "'a'": False,
}
"""Expression for a column ``headers`` → whether the sinks, ours and Spark's own, accept it."""


@dataclass(frozen=True)
class Job:
    """A copy of one topic into another, in micro-batches."""

    bootstrap: str
    source: str
    sink: str
    checkpoint: str
    mode: str = "direct"
    """The sink's mode, or ``prepared``: the mode ``direct``, with rows from ``prepare``."""
    transactional_id: str | None = None
    format: str = "fencepost"
    starting: dict[str, str] = field(default_factory=lambda: {"startingOffsets": "earliest"})
    ranges: int = 4
    """The minimum number of source tasks. Restarts change it, so that a repeated batch has other
    tasks.
    """
    options: dict[str, str] = field(default_factory=dict)
    """Further options of the sink."""
    security: dict[str, str] = field(default_factory=dict)
    """Security options of source and sink."""

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Self:
        return cls(**json.loads(text))


def new_job(
    cluster: Cluster, bootstrap: str, folder: Path, *, records: int = RECORDS, **fields: Any
) -> Job:
    """Create two topics of four partitions, write v0, v1, … to the first; return their job."""
    source = cluster.create_topic(unique("source"), PARTITIONS, KEEP)
    sink = cluster.create_topic(unique("sink"), PARTITIONS, KEEP)
    fill(cluster, source, range(records))
    return Job(bootstrap, source, sink, str(folder / "checkpoint"), **fields)


def faulty(job: Job, folder: Path, at: str, how: str, **options: str) -> Job:
    """Return the job with a fault: at one step it raises, or waits until :func:`go_on`."""
    crash = {"at": at, "how": how, "once": str(folder / "happened"), **options}
    told = {f"crash.{key}": value for key, value in crash.items()}
    return replace(job, format="crashing", options={**job.options, **told})


def again(job: Job) -> Job:
    """Return the job for a restart: without its fault, and with other source tasks."""
    keep = {key: value for key, value in job.options.items() if not key.startswith("crash.")}
    return replace(job, format="fencepost", ranges=7, options=keep)


def happened(job: Job, child: Child | None = None, deadline_s: float = QUERY_S) -> int:
    """Wait until the fault has occurred; return the id of the process in which it occurred."""
    once = Path(job.options["crash.once"])

    def probe() -> bool:
        assert child is None or child.returncode is None or once.exists(), child.tail()
        return once.exists()

    until(probe, f"{job.options['crash.at']} ({job.mode})", deadline_s=deadline_s)
    return int(once.read_text())


def go_on(job: Job) -> None:
    """Open the gate at which the job waits."""
    Path(job.options["crash.once"]).with_suffix(".open").touch()


def blow(child: Child, pids: list[int]) -> None:
    """Kill a driver, its JVM, and the processes in which its queries wait, by SIGKILL."""
    jvm = int(child.wait_for_line(r"^started (\d+)$", deadline_s=QUERY_S).group(1))
    for pid in (child.pid, jvm, *pids):
        os.kill(pid, signal.SIGKILL)
    assert child.wait(QUERY_S) == -signal.SIGKILL, child.tail()


def fail_at(spark: SparkSession, job: Job, folder: Path, *steps: str) -> None:
    """Run the query again and again: it fails at the first step, then at the second, and so on."""
    for number, step in enumerate(steps):
        once = str(folder / f"happened-{number}")
        attempt = faulty(replace(job, ranges=3 + number), folder, step, "raise", once=once)
        with pytest.raises(Exception, match=r"InjectedError|STREAM_FAILED|aborted"):
            run(spark, attempt)
        assert Path(once).exists(), step


def fill(cluster: Cluster, topic: str, numbers: range) -> None:
    for index in range(PARTITIONS):
        part = [b"v%d" % number for number in numbers if number % PARTITIONS == index]
        if part:
            answer = cluster.produce(topic, part, partition=index)
            assert answer["error_code"] == "none", answer


@contextlib.contextmanager
def going_on(bootstrap: str, topic: str) -> Iterator[None]:
    """Run a producer that writes to ``topic`` during the block."""
    over, wrote = threading.Event(), threading.Event()

    def work() -> None:
        with Cluster(bootstrap) as cluster:
            for number in itertools.count():
                answer = cluster.produce(topic, [b"live-%d" % number], partition=number % 4)
                assert answer["error_code"] == "none", answer
                wrote.set()
                if over.wait(LIVE_PAUSE_S):
                    return

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(work)
        try:
            assert wrote.wait(QUERY_S)
            yield
        finally:
            over.set()
        writing.result()


def add_partition(cluster: Cluster, topic: str, *values: bytes) -> None:
    """Add a partition to the topic, with records of these values."""
    count = cluster.leaders(topic)
    grown = cluster.call(
        "create_partitions",
        1,
        topics=[{"name": topic, "count": count + 1, "assignments": None}],
        timeout=10_000,
        validate_only=False,
    )
    assert grown["results"][0]["error_code"] == "none", grown
    until(lambda: cluster.leaders(topic) == count + 1, "the new partition's leader")
    if values:
        assert cluster.produce(topic, values, partition=count)["error_code"] == "none"


def stream(spark: SparkSession, job: Job) -> DataFrame:
    """Return the source as a stream of key and value."""
    loaded = (
        spark.readStream.format("fencepost")
        .option("kafka.bootstrap.servers", job.bootstrap)
        .option("subscribe", job.source)
        .option("maxOffsetsPerTrigger", PER_BATCH)
        .options(**job.security)
        .options(**job.starting)
        .option("minPartitions", job.ranges)
        .load()
    )
    return loaded.selectExpr("value AS key", "value")


def start(spark: SparkSession, job: Job, rows: DataFrame | None = None) -> Any:
    """Start the query, which ends when it has read all records that exist now."""
    rows = stream(spark, job) if rows is None else rows
    if job.mode == "prepared":
        rows = prepare(
            rows, bootstrap=job.bootstrap, topic=job.sink, writers=2, options=job.security
        )
    writer = (
        rows.writeStream.format(job.format)
        .option("kafka.bootstrap.servers", job.bootstrap)
        .option("topic", job.sink)
        .option("checkpointLocation", job.checkpoint)
        .option("mode", "direct" if job.mode == "prepared" else job.mode)
        .options(**job.security)
        .options(**job.options)
        .trigger(availableNow=True)
    )
    if job.transactional_id:
        writer = writer.option("kafka.transactional.id", job.transactional_id)
    return writer.start()


def run(spark: SparkSession, job: Job, rows: DataFrame | None = None) -> Any:
    """Run the query until it ends; raise its error."""
    return finish(start(spark, job, rows))


def finish(query: Any) -> Any:
    """Wait until the query has ended; raise its error."""
    try:
        assert query.awaitTermination(int(QUERY_S)), "the query does not end"
    finally:
        query.stop()
    return query


def seen(cluster: Cluster, topic: str, isolation: int) -> Counter[str]:
    """Return the count of each value in ``topic``, read without Spark and Fencepost's decoder."""
    return Counter(
        (value or b"").decode()
        for index in range(cluster.leaders(topic))
        for value in cluster.values(topic, partition=index, isolation=isolation)
    )


def assert_all_from_the_first_batch_on(cluster: Cluster, job: Job) -> None:
    """Assert that the sink has each source record exactly once, beginning with batch 0."""
    lines = Path(job.checkpoint, "offsets", "0").read_text(encoding="utf-8").splitlines()
    begin = from_json(json.loads(lines[-1]))
    cluster.settle(job.sink)
    wanted = Counter(
        (value or b"").decode()
        for index in range(cluster.leaders(job.source))
        for at, value in enumerate(cluster.values(job.source, partition=index))
        if at >= begin.get((job.source, index), 0)
    )
    assert seen(cluster, job.sink, READ_COMMITTED) == wanted
    assert wanted


SETTLE_S = 10.0
"""Deadline until the markers of the last transaction are written."""


def assert_exactly_once(cluster: Cluster, job: Job, records: int = RECORDS) -> None:
    """Assert that a read_committed reader sees each record once."""
    # A zombie's transaction may stay open. Then readers only see the records before that
    # transaction.
    with contextlib.suppress(TimeoutError):
        cluster.settle(job.sink, deadline_s=SETTLE_S)
    found = seen(cluster, job.sink, READ_COMMITTED)
    missing = sorted({f"v{number}" for number in range(records)} - found.keys())
    doubled = sorted(value for value, times in found.items() if times > 1)
    assert (len(missing), len(doubled)) == (0, 0), (missing[:5], doubled[:5])
    assert len(found) == records


def assert_nothing_new(cluster: Cluster, job: Job, expected: int) -> None:
    """Assert that ``expected`` records are visible, each once."""
    found = seen(cluster, job.sink, READ_COMMITTED)
    assert sum(found.values()) == len(found) == expected


def uncommitted(cluster: Cluster, job: Job) -> int:
    """Return the number of records that a read_uncommitted reader sees, including aborted ones."""
    return sum(seen(cluster, job.sink, READ_UNCOMMITTED).values())
