"""The source on a real Spark: its rows, what it refuses, and lost data."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fencepost.pipelines.spark import broker
from fencepost.pipelines.spark.errors import BrokerError, DataLossError
from fencepost.pipelines.spark.offsets import OffsetRange
from fencepost.pipelines.spark.options import source_options
from tests.spark.queries import (
    KEEP,
    PARTITIONS,
    Job,
    add_partition,
    again,
    assert_exactly_once,
    fail_at,
    fill,
    new_job,
    run,
    start,
)
from tests.support.batches import batch
from tests.support.cluster import GROUP, Cluster, unique
from tests.support.waits import until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FIRST_MS = 1_700_000_000_000


def read(spark: SparkSession, bootstrap: str, **options: Any) -> DataFrame:
    reader = spark.read.format("fencepost").option("kafka.bootstrap.servers", bootstrap)
    return reader.options(**options).load()


def values(df: DataFrame) -> list[str]:
    return sorted(bytes(row.value).decode() for row in df.select("value").collect())


@pytest.fixture
def topic(cluster: Cluster) -> str:
    """Create a topic: v0 … v99 on four partitions, then five aborted and five committed records."""
    name = cluster.create_topic(unique("read"), PARTITIONS, KEEP)
    fill(cluster, name, range(100))
    tid = unique("txn")
    pid, epoch = cluster.init_producer(tid)
    for sequence, (commit, text) in enumerate(((False, b"gone"), (True, b"kept"))):
        del sequence
        added = cluster.call(
            "add_partitions_to_txn",
            3,
            v3_and_below_transactional_id=tid,
            v3_and_below_producer_id=pid,
            v3_and_below_producer_epoch=epoch,
            v3_and_below_topics=[{"name": name, "partitions": [0]}],
        )
        assert added
        records = batch(
            [text] * 5, producer_id=pid, producer_epoch=epoch, sequence=0, transactional=True
        )
        answer = cluster.produce(name, records, transactional_id=tid)
        assert answer["error_code"] == "none", answer
        ended = cluster.call(
            "end_txn",
            3,
            transactional_id=tid,
            producer_id=pid,
            producer_epoch=epoch,
            committed=commit,
        )
        assert ended["error_code"] == "none"
        pid, epoch = cluster.init_producer(tid)
    return name


@pytest.mark.judge
def test_all_columns_have_the_stock_connectors_names_and_types(
    spark: SparkSession, bootstrap: str, topic: str
) -> None:
    df = read(spark, bootstrap, subscribe=topic, includeHeaders="true")
    assert [(field.name, field.dataType.simpleString()) for field in df.schema] == [
        ("key", "binary"),
        ("value", "binary"),
        ("topic", "string"),
        ("partition", "int"),
        ("offset", "bigint"),
        ("timestamp", "timestamp"),
        ("timestampType", "int"),
        ("headers", "array<struct<key:string,value:binary>>"),
    ]
    row = df.where("partition = 1 AND offset = 2").collect()[0]
    assert (row.key, bytes(row.value), row.topic, row.timestampType) == (None, b"v9", topic, 0)


@pytest.mark.judge
@pytest.mark.container
def test_aborted_records_are_hidden_and_offsets_are_correct(
    spark: SparkSession, bootstrap: str, topic: str
) -> None:
    committed = read(spark, bootstrap, subscribe=topic)
    assert values(committed) == sorted([f"v{n}" for n in range(100)] + ["kept"] * 5)
    first = committed.where("partition = 0").orderBy("offset").collect()
    # The partition has 25 records, 5 aborted records, a marker, then the committed records.
    assert [row.offset for row in first] == [*range(25), *range(31, 36)]
    everything = read(
        spark, bootstrap, subscribe=topic, **{"kafka.isolation.level": "read_uncommitted"}
    )
    assert values(everything).count("gone") == 5


@pytest.mark.judge
def test_open_transaction_holds_back_the_reader(
    spark: SparkSession, bootstrap: str, cluster: Cluster
) -> None:
    name = cluster.create_topic(unique("open"), 1, KEEP)
    cluster.produce(name, [b"before"])
    tid = unique("txn")
    pid, epoch = cluster.init_producer(tid)
    cluster.call(
        "add_partitions_to_txn",
        3,
        v3_and_below_transactional_id=tid,
        v3_and_below_producer_id=pid,
        v3_and_below_producer_epoch=epoch,
        v3_and_below_topics=[{"name": name, "partitions": [0]}],
    )
    records = batch(
        [b"open"], producer_id=pid, producer_epoch=epoch, sequence=0, transactional=True
    )
    assert cluster.produce(name, records, transactional_id=tid)["error_code"] == "none"
    cluster.produce(name, [b"behind"])
    assert values(read(spark, bootstrap, subscribe=name)) == ["before"]
    cluster.init_producer(tid)
    until(lambda: cluster.lso(name) == cluster.offset(name), "the transaction is aborted")
    assert values(read(spark, bootstrap, subscribe=name)) == ["before", "behind"]


@pytest.mark.judge
def test_topics_are_selected_by_list_pattern_and_partition(
    spark: SparkSession, bootstrap: str, cluster: Cluster
) -> None:
    stem = unique("choice")
    for suffix in ("a", "b"):
        name = cluster.create_topic(f"{stem}.{suffix}", 2, KEEP)
        cluster.produce(name, [suffix.encode() + b"0"])
        cluster.produce(name, [suffix.encode() + b"1"], partition=1)
    assert values(read(spark, bootstrap, subscribe=f"{stem}.a,{stem}.b")) == [
        "a0",
        "a1",
        "b0",
        "b1",
    ]
    assert values(read(spark, bootstrap, subscribePattern=f"{stem}\\..")) == [
        "a0",
        "a1",
        "b0",
        "b1",
    ]
    assert values(read(spark, bootstrap, assign=json.dumps({f"{stem}.b": [1]}))) == ["b1"]


@pytest.mark.judge
def test_pattern_never_matches_internal_topics(
    spark: SparkSession, bootstrap: str, cluster: Cluster
) -> None:
    cluster.coordinator(unique("group"), GROUP)
    assert values(read(spark, bootstrap, subscribePattern="__consumer_off")) == []


@pytest.mark.judge
def test_offsets_and_timestamps_bound_the_records_read(
    spark: SparkSession, bootstrap: str, cluster: Cluster
) -> None:
    name = cluster.create_topic(unique("bounds"), 1, KEEP)
    for at in range(10):
        cluster.produce(name, batch([b"r%d" % at], timestamp_ms=FIRST_MS + at * 1000))
    by_offset = read(
        spark,
        bootstrap,
        subscribe=name,
        startingOffsets=json.dumps({name: {"0": 3}}),
        endingOffsets=json.dumps({name: {"0": 6}}),
    )
    assert values(by_offset) == ["r3", "r4", "r5"]
    earliest = json.dumps({name: {"0": -2}})
    assert len(values(read(spark, bootstrap, subscribe=name, startingOffsets=earliest))) == 10
    by_time = read(
        spark,
        bootstrap,
        subscribe=name,
        startingTimestamp=str(FIRST_MS + 7500),
        endingOffsetsByTimestamp=json.dumps({name: {"0": FIRST_MS + 9000}}),
    )
    assert values(by_time) == ["r8"]
    late = str(FIRST_MS + 60_000)
    with pytest.raises(Exception, match="at or after the starting timestamp"):
        read(spark, bootstrap, subscribe=name, startingTimestamp=late).collect()
    latest = read(
        spark,
        bootstrap,
        subscribe=name,
        startingTimestamp=late,
        startingOffsetsByTimestampStrategy="latest",
    )
    assert values(latest) == []


@pytest.mark.judge
def test_backlog_is_split_by_offset_range(spark: SparkSession, bootstrap: str, topic: str) -> None:
    split = read(spark, bootstrap, subscribe=topic, minPartitions="9")
    assert split.rdd.getNumPartitions() >= 9
    assert len(values(split)) == 105
    fine = read(spark, bootstrap, subscribe=topic, maxRecordsPerPartition="10")
    assert fine.rdd.getNumPartitions() == sum(-(-size // 10) for size in (37, 25, 25, 25))
    assert len(values(fine)) == 105


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"subscribe": "no-such-topic"}, "do not exist"),
        ({"subscribe": "t", "faiIOnDataLoss": "true"}, "no option"),
        ({}, "set exactly one of"),
    ],
)
def test_invalid_source_options_are_refused(
    spark: SparkSession, bootstrap: str, options: dict[str, str], message: str
) -> None:
    with pytest.raises(Exception, match=message):
        read(spark, bootstrap, **options).collect()


def memory(spark: SparkSession, job: Job, **options: str) -> Any:
    """Return a writer from the source to Spark's ``noop`` sink, to test the source alone."""
    loaded = (
        spark.readStream.format("fencepost")
        .option("kafka.bootstrap.servers", job.bootstrap)
        .option("subscribe", job.source)
        .options(**{"startingOffsets": "earliest", **options})
        .load()
    )
    return loaded.writeStream.option("checkpointLocation", job.checkpoint).format("noop")


@pytest.mark.judge
@pytest.mark.container
def test_available_now_reads_to_the_end_in_batches_of_the_limit(
    spark: SparkSession, bootstrap: str, cluster: Cluster, tmp_path: Path
) -> None:
    job = new_job(cluster, bootstrap, tmp_path)
    query = memory(spark, job, maxOffsetsPerTrigger="250").trigger(availableNow=True).start()
    query.awaitTermination(300)
    told = query.recentProgress
    assert sum(progress.numInputRows for progress in told) == 900
    assert all(progress.numInputRows <= 254 for progress in told)
    source = json.loads(told[0].json)["sources"][0]
    assert source["latestOffset"] == {job.source: {str(at): 225 for at in range(PARTITIONS)}}
    assert sum(source["endOffset"][job.source].values()) < 260


@pytest.mark.judge
def test_added_partitions_are_read(
    spark: SparkSession, bootstrap: str, cluster: Cluster, tmp_path: Path
) -> None:
    job = new_job(cluster, bootstrap, tmp_path, records=100)
    query = memory(spark, job).start()
    try:

        def rows() -> int:
            assert query.isActive, query.exception()
            return sum(progress.numInputRows for progress in query.recentProgress)

        until(lambda: rows() == 100, "the first records", deadline_s=60)
        add_partition(cluster, job.source, *[b"new"] * 7)
        until(lambda: rows() == 107, "those of the new partition", deadline_s=60)
    finally:
        query.stop()


def delete_records(cluster: Cluster, topic: str, below: int) -> None:
    answer = cluster.call(
        "delete_records",
        1,
        topics=[
            {"name": topic, "partitions": [{"partition_index": 0, "offset": below}]},
        ],
        timeout=10_000,
    )
    assert answer["topics"][0]["partitions"][0]["error_code"] == "none", answer


@pytest.mark.judge
def test_new_topics_that_match_the_pattern_are_read(
    spark: SparkSession, bootstrap: str, cluster: Cluster, tmp_path: Path
) -> None:
    stem = unique("growing")
    cluster.create_topic(f"{stem}.a", 1, KEEP)
    cluster.produce(f"{stem}.a", [b"first"] * 3)
    loaded = (
        spark.readStream.format("fencepost")
        .option("kafka.bootstrap.servers", bootstrap)
        .option("subscribePattern", f"{stem}[.].")
        .option("startingOffsets", "latest")
        .load()
    )
    query = loaded.writeStream.format("noop").start()
    try:

        def rows() -> int:
            assert query.isActive, query.exception()
            return sum(progress.numInputRows for progress in query.recentProgress)

        # Records that are older than the query are not read, except in new topics that match the
        # pattern.
        query.processAllAvailable()
        cluster.create_topic(f"{stem}.b", 1, KEEP)
        cluster.produce(f"{stem}.b", [b"second"] * 4)
        until(lambda: rows() == 4, "those of the new topic", deadline_s=60)
        cluster.produce(f"{stem}.a", [b"third"] * 5)
        until(lambda: rows() == 9, "the old one's", deadline_s=60)
    finally:
        query.stop()


def stream_reader(bootstrap: str, topic: str, **options: str) -> Any:
    from fencepost.pipelines.spark.source import StreamReader

    told = {"kafka.bootstrap.servers": bootstrap, **({"subscribe": topic} if topic else {})}
    return StreamReader(source_options(told | options, streaming=True))


BEGINNINGS = {
    "latest": {},
    "earliest": {"startingOffsets": "earliest"},
    "offsets": {"startingOffsets": '{"TOPIC": {"0": 3, "1": -1, "2": -2, "3": 10}}'},
    "timestamp": {"startingTimestamp": str(FIRST_MS + 5)},
    "no record that late": {
        "startingTimestamp": str(FIRST_MS + 60_000),
        "startingOffsetsByTimestampStrategy": "latest",
    },
}


@pytest.mark.judge
@pytest.mark.parametrize("name", BEGINNINGS)
def test_planned_first_batch_is_repeated_unchanged(
    bootstrap: str, cluster: Cluster, name: str
) -> None:
    from pyspark.sql.streaming.datasource import ReadMaxRows

    topic = cluster.create_topic(unique("first"), PARTITIONS, KEEP)
    for partition in range(PARTITIONS):
        for at in range(10):
            records = batch([b"old"], timestamp_ms=FIRST_MS + at)
            cluster.produce(topic, records, partition=partition)
    options = {key: value.replace("TOPIC", topic) for key, value in BEGINNINGS[name].items()}
    planner = stream_reader(bootstrap, topic, **options)
    end = planner.latestOffset(planner.initialOffset(), ReadMaxRows(30))

    def tasks(reader: Any) -> list[Any]:
        return [task.wanted for task in reader.partitions(reader.initialOffset(), end)]

    planned = tasks(planner)
    # The driver is killed, and the topic grows before the batch is planned again.
    for partition in range(PARTITIONS):
        records = batch([b"new"], timestamp_ms=FIRST_MS + 90_000)
        cluster.produce(topic, records, partition=partition)
    add_partition(cluster, topic, b"more")
    assert tasks(stream_reader(bootstrap, topic, **options)) == planned
    assert bool(planned) == (name not in {"latest", "no record that late"})


@pytest.mark.judge
def test_deleted_records_fail_the_query_or_are_skipped(
    spark: SparkSession, bootstrap: str, cluster: Cluster, tmp_path: Path
) -> None:
    job = new_job(cluster, bootstrap, tmp_path, records=400)
    starting = json.dumps({job.source: {str(at): 10 for at in range(PARTITIONS)}})
    delete_records(cluster, job.source, 60)
    failing = memory(spark, job, startingOffsets=starting).trigger(availableNow=True).start()
    with pytest.raises(Exception, match="deleted before they were read"):
        failing.awaitTermination(300)
    going_on = (
        memory(spark, job, startingOffsets=starting, failOnDataLoss="false")
        .trigger(availableNow=True)
        .start()
    )
    going_on.awaitTermination(300)
    # Partition 0 still has 40 of its 100 records, the other partitions have 90.
    assert sum(progress.numInputRows for progress in going_on.recentProgress) == 40 + 3 * 90


def drop(cluster: Cluster, topic: str) -> None:
    """Delete a topic, and wait until it is gone."""
    cluster.call("delete_topics", 3, topic_names=[topic], timeout=10_000)

    def is_gone() -> bool:
        answer = cluster.call("metadata", 8, topics=[{"name": topic}])
        return bool(answer["topics"][0]["error_code"] != "none")

    until(is_gone, "the topic is gone")


def make_anew(cluster: Cluster, topic: str, records: int) -> None:
    """Delete a topic, and create it again with ``records`` records."""
    drop(cluster, topic)
    cluster.create_topic(topic, PARTITIONS, KEEP)
    fill(cluster, topic, range(records))


PATIENCE = {"kafka.default.api.timeout.ms": "1500"}
SKIP = {"failOnDataLoss": "false"}


@pytest.mark.judge
def test_recreated_topic_of_a_planned_batch_is_read_to_its_end(
    spark: SparkSession, cluster: Cluster, bootstrap: str, tmp_path: Path
) -> None:
    told = {"startingOffsets": "earliest", **SKIP, **PATIENCE}
    job = new_job(cluster, bootstrap, tmp_path, mode="staged", starting=told)
    fail_at(spark, job, tmp_path, "commit begins")
    make_anew(cluster, job.source, 40)
    run(spark, again(job))
    assert_exactly_once(cluster, job, 40)


def read_rows(bootstrap: str, topic: str, start: int, until: int, **options: str) -> list[Any]:
    """Return the Arrow batches of a task that reads a range of partition 0."""
    from fencepost.pipelines.spark.read import read_range

    told = {"kafka.bootstrap.servers": bootstrap, "subscribe": topic, **PATIENCE, **options}
    return list(
        read_range(source_options(told, streaming=True), OffsetRange(topic, 0, start, until))
    )


def read_values(bootstrap: str, topic: str, start: int, until: int, **options: str) -> list[bytes]:
    found = read_rows(bootstrap, topic, start, until, **options)
    return [value for rows in found for value in rows["value"].to_pylist()]


@pytest.mark.judge
def test_timestamp_beyond_sparks_range_is_null(bootstrap: str, cluster: Cluster) -> None:
    most = (2**63 - 1) // 1000
    settings = {**KEEP, "message.timestamp.after.max.ms": str(2**63 - 1)}
    topic = cluster.create_topic(unique("nanoseconds"), 1, settings)
    stamps = [FIRST_MS, most, most + 1, FIRST_MS * 1_000_000]
    for stamp in stamps:
        answer = cluster.produce(topic, batch([b"v"], timestamp_ms=stamp))
        assert answer["error_code"] == "none", answer
    found = read_rows(bootstrap, topic, 0, len(stamps))
    micros = [at for rows in found for at in rows["timestamp"].cast("int64").to_pylist()]
    assert micros == [FIRST_MS * 1000, most * 1000, None, None]


@pytest.mark.judge
@pytest.mark.parametrize("start", [5, 10, 11])
def test_range_beyond_the_log_end_is_cut_or_raises_data_loss(
    bootstrap: str, cluster: Cluster, start: int
) -> None:
    topic = cluster.create_topic(unique("short"), 1, KEEP)
    values = [b"v%d" % at for at in range(10)]
    cluster.produce(topic, values)
    assert read_values(bootstrap, topic, start, 100, **SKIP) == values[start:]
    with pytest.raises(DataLossError, match="ends at 10, but the query was promised"):
        read_values(bootstrap, topic, start, 100)


@pytest.mark.judge
@pytest.mark.parametrize("options", [{}, SKIP], ids=["fail", "skip"])
def test_temporarily_missing_topic_is_awaited_by_the_reader(
    bootstrap: str, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, options: dict[str, str]
) -> None:
    topic = cluster.create_topic(unique("away"), PARTITIONS, KEEP)
    drop(cluster, topic)
    original, answered = broker.ClusterConnection.fetch, threading.Event()

    def fetch(
        link: broker.ClusterConnection, *arguments: Any, **named: Any
    ) -> broker.FetchedRecords:
        found = original(link, *arguments, **named)
        answered.set()
        return found

    monkeypatch.setattr(broker.ClusterConnection, "fetch", fetch)
    patient = {**options, "kafka.default.api.timeout.ms": "60000"}
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read_values, bootstrap, topic, 0, 3, **patient)
        # By now Fencepost's client has retried for a second, and has not found the topic.
        assert answered.wait(60)
        cluster.create_topic(topic, PARTITIONS, KEEP)
        cluster.produce(topic, [b"a", b"b", b"c"])
        assert reading.result(60) == [b"a", b"b", b"c"]


@pytest.mark.judge
@pytest.mark.parametrize("options", [{}, SKIP], ids=["fail", "skip"])
def test_deleted_topic_is_an_error_and_not_an_empty_topic(
    bootstrap: str, cluster: Cluster, options: dict[str, str]
) -> None:
    topic = cluster.create_topic(unique("gone"), PARTITIONS, KEEP)
    drop(cluster, topic)
    with pytest.raises(BrokerError, match="Was it deleted"):
        read_values(bootstrap, topic, 0, 3, **options)


@pytest.mark.judge
@pytest.mark.parametrize("options", [{}, SKIP], ids=["fail", "skip"])
def test_temporarily_missing_topic_is_awaited_by_the_planner(
    bootstrap: str, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, options: dict[str, str]
) -> None:
    from pyspark.sql.streaming.datasource import ReadAllAvailable

    from fencepost.pipelines.spark.source import Planner

    topic = cluster.create_topic(unique("away"), PARTITIONS, KEEP)
    drop(cluster, topic)
    original, looked = Planner._find_partitions, threading.Event()

    def look(planner: Planner) -> Any:
        found = original(planner)
        looked.set()
        return found

    monkeypatch.setattr(Planner, "_find_partitions", look)
    told = {"subscribePattern": f"{topic}$", **options}
    begin = {topic: {str(at): 0 for at in range(PARTITIONS)}}
    with ThreadPoolExecutor(1) as pool:
        reader = stream_reader(bootstrap, "", **told)
        planning = pool.submit(reader.latestOffset, begin, ReadAllAvailable())
        assert looked.wait(60)
        cluster.create_topic(topic, PARTITIONS, KEEP)
        assert planning.result(60) == begin
    # If the topic stays deleted, data is lost, which fails the query unless an option allows it.
    drop(cluster, topic)
    reader = stream_reader(bootstrap, "", **told, **PATIENCE)
    if options:
        assert reader.latestOffset(begin, ReadAllAvailable()) == {}
    else:
        with pytest.raises(DataLossError, match="went back"):
            reader.latestOffset(begin, ReadAllAvailable())


@pytest.mark.judge
def test_recreated_topic_fails_the_query(
    spark: SparkSession, bootstrap: str, cluster: Cluster, tmp_path: Path
) -> None:
    job = new_job(cluster, bootstrap, tmp_path, mode="staged", records=100)
    run(spark, job)
    make_anew(cluster, job.source, 0)
    query = start(spark, job)
    with pytest.raises(Exception, match="went back"):
        query.awaitTermination(300)
