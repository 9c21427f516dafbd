"""One query with Spark's own Kafka connector and with Fencepost's has equal rows and offsets.

``--stock`` adds the connector's jars to Spark. The tests compare both connectors' schemas, options,
offsets in the checkpoint, and the partitions that the sinks choose.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fencepost.client.security import PREFIXES
from fencepost.logcore.batch import LogRecord, encode_batch
from fencepost.pipelines.spark.client_options import is_known
from fencepost.pipelines.spark.lag import behind_latest
from tests.spark.queries import (
    HEADER_SHAPES,
    KEEP,
    PARTITIONS,
    RECORDS,
    Job,
    assert_exactly_once,
    faulty,
    fill,
    new_job,
    run,
)
from tests.support.batches import batch
from tests.support.cluster import Cluster, unique
from tests.support.waits import until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.judge, pytest.mark.timeout(600)]

BOTH = ("kafka", "fencepost")
FIRST_MS, STEP_MS = 1_700_000_000_000, 1000
COMMITTED = {"kafka.isolation.level": "read_committed"}


@pytest.fixture(autouse=True)
def stock(stock_jars: list[Path]) -> None:
    if not stock_jars:
        pytest.skip("Spark's own Kafka connector is compared with --stock")


@pytest.fixture(scope="module")
def scene(bootstrap: str) -> tuple[str, str]:
    """Create two topics with every kind of record; return their stem and the first topic's name."""
    stem = unique("stock")
    first, second = f"{stem}.a", f"{stem}.b"
    with Cluster(bootstrap) as cluster:
        cluster.create_topic(first, PARTITIONS, KEEP)
        cluster.create_topic(second, 2, KEEP)
        for at in range(60):
            record = LogRecord(
                0,
                FIRST_MS + at * STEP_MS,
                b"k%d" % at if at % 5 else None,
                b"v%d" % at if at % 7 else None,
                (("h", b"x%d" % at), ("none", None)) if at % 3 else (),
            )
            answer = cluster.produce(first, encode_batch([record]), partition=at % PARTITIONS)
            assert answer["error_code"] == "none"
        cluster.produce(second, batch([b"other"] * 9, timestamp_ms=FIRST_MS), partition=1)
        _transaction(cluster, first, commit=False)
        _transaction(cluster, first, commit=True)
    return stem, first


def _transaction(cluster: Cluster, topic: str, *, commit: bool) -> None:
    tid = unique("txn")
    pid, epoch = cluster.init_producer(tid)
    cluster.call(
        "add_partitions_to_txn",
        3,
        v3_and_below_transactional_id=tid,
        v3_and_below_producer_id=pid,
        v3_and_below_producer_epoch=epoch,
        v3_and_below_topics=[{"name": topic, "partitions": [0]}],
    )
    records = batch(
        [b"in a transaction"] * 5,
        producer_id=pid,
        producer_epoch=epoch,
        sequence=0,
        transactional=True,
        timestamp_ms=FIRST_MS + 70 * STEP_MS,
    )
    assert cluster.produce(topic, records, transactional_id=tid)["error_code"] == "none"
    ended = cluster.call(
        "end_txn", 3, transactional_id=tid, producer_id=pid, producer_epoch=epoch, committed=commit
    )
    assert ended["error_code"] == "none"


def read(spark: SparkSession, kind: str, bootstrap: str, **options: str) -> DataFrame:
    reader = spark.read.format(kind).option("kafka.bootstrap.servers", bootstrap)
    return reader.options(**options).load()


def rows(df: DataFrame) -> list[Any]:
    return sorted(df.collect(), key=lambda row: (row.topic, row.partition, row.offset))


def by_partition(numbers: dict[int, int]) -> dict[str, int]:
    return {str(index): numbers.get(index, numbers[-1]) for index in range(PARTITIONS)}


STARTS: dict[str, dict[str, Any]] = {
    "all": {},
    "headers": {"includeHeaders": "true"},
    "uncommitted": {"kafka.isolation.level": "read_uncommitted"},
    "earliest": {"startingOffsets": "earliest", "endingOffsets": "latest"},
    "offsets": {
        "startingOffsets": by_partition({0: 3, 1: -2, -1: 5}),
        "endingOffsets": by_partition({0: 9, 1: -1, -1: 7}),
    },
    "startingTimestamp": {"startingTimestamp": str(FIRST_MS + 30 * STEP_MS)},
    "endingTimestamp": {"endingTimestamp": str(FIRST_MS + 30 * STEP_MS + 1)},
    "ending behind the last": {"endingTimestamp": str(FIRST_MS + 3600 * STEP_MS)},
    "byTimestamp": {
        "startingOffsetsByTimestamp": by_partition({-1: FIRST_MS + 20 * STEP_MS}),
        "endingOffsetsByTimestamp": by_partition(
            {0: FIRST_MS + 25 * STEP_MS, -1: FIRST_MS + 40 * STEP_MS}
        ),
    },
    "strategy": {
        "startingTimestamp": str(FIRST_MS + 65 * STEP_MS),
        "startingOffsetsByTimestampStrategy": "latest",
    },
    "precedence": {
        "startingTimestamp": str(FIRST_MS + 50 * STEP_MS),
        "startingOffsetsByTimestamp": by_partition({-1: FIRST_MS + 20 * STEP_MS}),
        "startingOffsets": "earliest",
    },
    "minPartitions": {"minPartitions": "11"},
    "maxRecordsPerPartition": {"maxRecordsPerPartition": "4"},
    "both of them": {"minPartitions": "7", "maxRecordsPerPartition": "9"},
    "no meaning here": {
        "groupIdPrefix": "p",
        "kafka.group.id": "g",
        "failOnDataLoss": "false",
        "kafkaConsumer.pollTimeoutMs": "5000",
        "fetchOffset.numRetries": "2",
        "fetchOffset.retryIntervalMs": "5",
        "kafka.max.poll.records": "10",
        "kafka.max.partition.fetch.bytes": "2048",
    },
}


@pytest.mark.parametrize("name", STARTS)
def test_batch_query_returns_the_stock_connectors_rows(
    spark: SparkSession, bootstrap: str, scene: tuple[str, str], name: str
) -> None:
    topic = scene[1]
    options = {
        key: json.dumps({topic: value}) if isinstance(value, dict) else value
        for key, value in STARTS[name].items()
    }
    options = COMMITTED | {"subscribe": topic} | options
    theirs, ours = (read(spark, kind, bootstrap, **options) for kind in BOTH)
    assert ours.schema == theirs.schema
    found = rows(ours)
    assert found == rows(theirs)
    assert len(found) > 0


def test_topic_selections_return_the_stock_connectors_rows(
    spark: SparkSession, bootstrap: str, scene: tuple[str, str]
) -> None:
    stem, first = scene
    for subject in (
        {"subscribe": f"{first},{stem}.b"},
        {"subscribePattern": f"{stem}[.].*"},
        {"subscribePattern": f"{stem}"},
        {"assign": json.dumps({first: [1, 3], f"{stem}.b": [1]})},
    ):
        theirs, ours = (rows(read(spark, kind, bootstrap, **COMMITTED, **subject)) for kind in BOTH)
        assert ours == theirs
        assert len(ours) > 0


@pytest.mark.parametrize(
    "options",
    [
        {"startingOffsets": "latest"},
        {"endingOffsets": "earliest"},
        {"startingOffsets": "{not JSON"},
        {"startingTimestamp": str(FIRST_MS + 3600 * STEP_MS)},
        {"startingTimestamp": str(FIRST_MS + STEP_MS), "endingTimestamp": str(FIRST_MS)},
        {"assign": "{}"},
        {"kafka.auto.offset.reset": "earliest"},
        {"kafka.enable.auto.commit": "true"},
        {"kafka.key.deserializer": "org.apache.kafka.common.serialization.StringDeserializer"},
        {"kafka.interceptor.classes": "some.Interceptor"},
        {"minPartitions": "0"},
    ],
    ids=str,
)
def test_both_connectors_refuse_invalid_options(
    spark: SparkSession, bootstrap: str, scene: tuple[str, str], options: dict[str, str]
) -> None:
    for kind in BOTH:
        with pytest.raises(Exception, match=r".+"):
            rows(read(spark, kind, bootstrap, subscribe=scene[1], **options))


def source(spark: SparkSession, kind: str, job: Job, **options: str) -> DataFrame:
    told = {"subscribe": job.source, "startingOffsets": "earliest", **COMMITTED, **options}
    reader = spark.readStream.format(kind).option("kafka.bootstrap.servers", job.bootstrap)
    return reader.options(**told).load()


def test_stream_has_the_stock_connectors_batches_offsets_and_lag(
    spark: SparkSession, bootstrap: str, cluster: Cluster, tmp_path: Path
) -> None:
    job = new_job(cluster, bootstrap, tmp_path)
    told: dict[str, list[Any]] = {}
    for kind in BOTH:
        query = (
            source(spark, kind, job, maxOffsetsPerTrigger="250")
            .writeStream.format("noop")
            .option("checkpointLocation", str(tmp_path / kind))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(300)
        told[kind] = [progress.sources[0] for progress in query.recentProgress]
    assert sum(reported.numInputRows for reported in told["kafka"]) == RECORDS

    def offsets(kind: str) -> list[tuple[Any, ...]]:
        return [
            (
                json.loads(reported.startOffset) if reported.startOffset != "None" else None,
                json.loads(reported.endOffset),
                json.loads(reported.latestOffset),
                reported.numInputRows,
            )
            for reported in told[kind]
        ]

    assert offsets("fencepost") == offsets("kafka")
    lags = [behind_latest(reported) for reported in told["fencepost"]]
    assert lags == [{key: reported.metrics[key] for key in lags[0]} for reported in told["kafka"]]


def test_query_continues_after_a_change_of_connector(
    spark: SparkSession, bootstrap: str, cluster: Cluster, tmp_path: Path
) -> None:
    # Both connectors write offsets in the same format, so each can continue the other's checkpoint.
    job = new_job(cluster, bootstrap, tmp_path, mode="staged")

    def go_on(kind: str, job: Job) -> None:
        told = source(spark, kind, job, maxOffsetsPerTrigger="250")
        run(spark, job, told.selectExpr("value AS key", "value"))

    records = RECORDS
    go_on("kafka", job)
    for kind, other in (BOTH, BOTH[::-1]):
        fill(cluster, job.source, range(records, records + 300))
        records += 300
        (tmp_path / kind).mkdir()
        with pytest.raises(Exception, match="InjectedError"):
            go_on(kind, faulty(job, tmp_path / kind, "commit begins", "raise"))
        go_on(other, job)
        assert_exactly_once(cluster, job, records)


@pytest.mark.parametrize("kind", BOTH)
def test_min_offsets_per_trigger_delays_batches(
    spark: SparkSession, bootstrap: str, cluster: Cluster, tmp_path: Path, kind: str
) -> None:
    job = new_job(cluster, bootstrap, tmp_path, records=12)
    with watched(source(spark, kind, job, minOffsetsPerTrigger="40")) as (query, seen):
        # The first batch of a run does not wait until the minimum number of offsets is available.
        query.processAllAvailable()
        assert seen() == 12
        fill(cluster, job.source, range(12, 48))
        query.processAllAvailable()
        assert seen() == 12
        fill(cluster, job.source, range(48, 52))
        until(lambda: seen() == 52, "enough for a batch", deadline_s=60)
    impatient = {"minOffsetsPerTrigger": "1000", "maxTriggerDelay": "1s"}
    with watched(source(spark, kind, job, **impatient)) as (query, seen):
        query.processAllAvailable()
        fill(cluster, job.source, range(52, 60))
        until(lambda: seen() == 60, "enough of waiting", deadline_s=60)


@contextmanager
def watched(df: DataFrame) -> Iterator[tuple[Any, Callable[[], int]]]:
    """Yield the running query, and a function that returns the number of read rows."""
    query = df.writeStream.format("noop").start()

    def seen() -> int:
        assert query.isActive, query.exception()
        return sum(progress.numInputRows for progress in query.recentProgress)

    try:
        yield query, seen
    finally:
        query.stop()


def test_both_sinks_ignore_other_columns(
    spark: SparkSession, bootstrap: str, cluster: Cluster
) -> None:
    # Rows of a source, including their offsets and timestamps, can be written unchanged.
    began = int(time.time() * 1000)
    for kind in BOTH:
        topic = cluster.create_topic(unique("aside"), 2)
        df = spark.sql(
            "SELECT 'v' AS value, TIMESTAMP_MILLIS(1700000000000) AS timestamp, 5L AS offset,"
            " 7 AS timestampType, 'other' AS topic"
        )
        options = {"kafka.bootstrap.servers": bootstrap, "topic": topic}
        df.write.format(kind).options(**options).mode("append").save()
        (row,) = read(spark, "kafka", bootstrap, subscribe=topic, **COMMITTED).collect()
        assert (bytes(row.value), row.topic) == (b"v", topic)
        assert row.timestamp.replace(tzinfo=UTC).timestamp() * 1000 >= began


def test_every_option_of_the_java_clients_is_known(spark: SparkSession) -> None:
    clients = spark._jvm.org.apache.kafka.clients  # type: ignore[union-attr]
    for config in (
        clients.producer.ProducerConfig,
        clients.consumer.ConsumerConfig,
        clients.admin.AdminClientConfig,
    ):
        names = [str(name) for name in config.configNames()]
        assert len(names) > 30
        others = [name for name in names if not name.startswith(PREFIXES)]
        assert [name for name in others if not is_known(f"kafka.{name}")] == []
    assert not is_known("kafka.no.such.option")


def test_both_sinks_accept_the_same_columns(
    spark: SparkSession, bootstrap: str, cluster: Cluster
) -> None:
    topic = cluster.create_topic(unique("shapes"), 1, KEEP)
    columns = {
        **{f"'v' AS value, {shape} AS headers": taken for shape, taken in HEADER_SHAPES.items()},
        "'v' AS value, CAST(NULL AS STRING) AS key": True,
        "'v' AS value, 1 AS key": False,
        "1 AS value": False,
        "'v' AS value, 0L AS partition": False,
        "'v' AS value, CAST(0 AS SMALLINT) AS partition": False,
        "'v' AS value, CAST(NULL AS INT) AS partition": True,
    }
    for kind in BOTH:
        taken = {}
        for selected in columns:
            writer = spark.sql(f"SELECT {selected}").write.format(kind)
            writer = writer.option("kafka.bootstrap.servers", bootstrap).option("topic", topic)
            try:
                writer.mode("append").save()
                taken[selected] = True
            except Exception:  # noqa: BLE001 - Spark's errors have no common base class
                taken[selected] = False
        assert taken == columns, kind


@pytest.mark.parametrize("topic_column", [False, True])
def test_both_sinks_write_the_same_records_to_the_same_partitions(
    spark: SparkSession, bootstrap: str, cluster: Cluster, topic_column: bool
) -> None:
    written: dict[str, list[Any]] = {}
    for kind in BOTH:
        topic = cluster.create_topic(unique("sink"), 5, KEEP)
        df = spark.sql(
            "SELECT CONCAT('key-', id) AS key, IF(id % 9 = 0, NULL, CONCAT('v', id)) AS value,"
            " IF(id % 2 = 0, CAST(id % 5 AS INT), NULL) AS partition,"
            " IF(id % 3 = 0, NULL, array(named_struct('key', 'h',"
            " 'value', CAST(CONCAT('x', id) AS BINARY)))) AS headers"
            f"{f', {topic!r} AS topic' if topic_column else ''} FROM range(200)"
        )
        writer = df.write.format(kind).option("kafka.bootstrap.servers", bootstrap)
        if not topic_column:
            writer = writer.option("topic", topic)
        if kind == "kafka":
            writer = writer.option("includeHeaders", "true")
        writer.mode("append").save()
        found = read(spark, "kafka", bootstrap, subscribe=topic, includeHeaders="true", **COMMITTED)
        written[kind] = sorted(
            (bytes(row.key), row.value, row.partition, row.headers) for row in found.collect()
        )
    assert written["fencepost"] == written["kafka"]
    assert len(written["kafka"]) == 200
