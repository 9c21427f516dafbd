"""The faults of the sink that need no separate process: failing steps, lost progress.

After each fault the query runs again, with other source tasks, and a read_committed reader must see
each record once. ``test_drivers`` has the faults that kill processes.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.spark.queries import (
    KEEP,
    PARTITIONS,
    PER_BATCH,
    RECORDS,
    SMALL,
    Job,
    add_partition,
    again,
    assert_all_from_the_first_batch_on,
    assert_exactly_once,
    assert_nothing_new,
    fail_at,
    faulty,
    fill,
    finish,
    go_on,
    going_on,
    happened,
    new_job,
    run,
    seen,
    start,
    stream,
)
from tests.support.batches import batch
from tests.support.cluster import READ_COMMITTED, TRANSACTION, Cluster, unique
from tests.support.waits import until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.timeout(600)

MORE = range(RECORDS, RECORDS + 20)


@pytest.mark.judge
@pytest.mark.container
@pytest.mark.parametrize("mode", ["direct", "prepared", "staged"])
def test_query_is_exactly_once_after_a_failure_at_each_step(
    spark: SparkSession, cluster: Cluster, bootstrap: str, tmp_path: Path, mode: str
) -> None:
    job = new_job(cluster, bootstrap, tmp_path, mode=mode)
    steps = ("mid write", "task finished", "offsets committed", "transaction ended")
    fail_at(spark, job, tmp_path, *steps)
    # No record of the first batch was visible before its transaction ended.
    assert_nothing_new(cluster, job, PER_BATCH)
    run(spark, again(job))
    assert_exactly_once(cluster, job)


@pytest.mark.judge
@pytest.mark.parametrize(
    ("mode", "steps"),
    [
        ("prepared", ("before init", "task finished", "offsets committed", "commit returned")),
        ("staged", ("after init", "commit begins", "transaction ended")),
    ],
)
def test_query_from_latest_keeps_records_after_failures_in_its_first_batch(
    spark: SparkSession,
    cluster: Cluster,
    bootstrap: str,
    tmp_path: Path,
    mode: str,
    steps: tuple[str, ...],
) -> None:
    # The first batch has no rows. It only records the offsets at which the query begins.
    job = new_job(cluster, bootstrap, tmp_path, mode=mode, starting={}, records=40)
    with going_on(bootstrap, job.source):
        fail_at(spark, job, tmp_path, *steps)
        add_partition(cluster, job.source, *(b"new-%d" % number for number in range(5)))
        run(spark, again(job))
    run(spark, again(job))
    assert_all_from_the_first_batch_on(cluster, job)


@pytest.mark.judge
def test_partition_added_during_the_first_batch_is_read(
    spark: SparkSession, cluster: Cluster, bootstrap: str, tmp_path: Path
) -> None:
    job = new_job(cluster, bootstrap, tmp_path)
    fail_at(spark, job, tmp_path, "commit begins")
    add_partition(cluster, job.source, *(b"v%d" % number for number in MORE))
    run(spark, again(job))
    assert_exactly_once(cluster, job, MORE.stop)


@pytest.mark.judge
@pytest.mark.parametrize("mode", ["direct", "prepared"])
def test_failed_batch_without_tasks_does_not_hold_back_the_lso(
    spark: SparkSession, cluster: Cluster, bootstrap: str, tmp_path: Path, mode: str
) -> None:
    # No task returns a commit message, so only the broker knows the transactions that the prepared
    # tasks have begun.
    job = new_job(cluster, bootstrap, tmp_path, mode=mode)
    job = replace(job, sink=cluster.create_topic(unique("sink"), 1, KEEP))
    fail_at(spark, job, tmp_path, "mid write")
    assert cluster.offset(job.sink) > 0
    cluster.settle(job.sink)
    run(spark, again(job))
    assert seen(cluster, job.sink, READ_COMMITTED) == Counter(f"v{n}" for n in range(RECORDS))


@pytest.mark.judge
@pytest.mark.parametrize("step", ["sealed", "mid write"])
def test_task_killed_before_acknowledgement_writes_no_visible_record(
    spark: SparkSession, cluster: Cluster, bootstrap: str, tmp_path: Path, step: str
) -> None:
    # The process dies before its batches are sent, or before it records that they are sent. Tasks
    # that survive must not continue the sequence of the failed task.
    job = faulty(new_job(cluster, bootstrap, tmp_path, options=SMALL), tmp_path, step, "wait")
    query = start(spark, job)
    os.kill(happened(job), signal.SIGKILL)
    go_on(job)
    with pytest.raises(Exception, match=r"STREAM_FAILED|aborted|crashed"):
        finish(query)
    assert_nothing_new(cluster, job, 0)
    run(spark, again(job))
    assert_exactly_once(cluster, job)


@pytest.mark.judge
def test_tasks_writing_to_one_partition_keep_their_order(
    spark: SparkSession, cluster: Cluster, bootstrap: str, tmp_path: Path
) -> None:
    job = new_job(cluster, bootstrap, tmp_path, options=SMALL)
    job = replace(job, sink=cluster.create_topic(unique("sink"), 1, KEEP), ranges=PARTITIONS)
    run(spark, job)
    numbers = [int((value or b"")[1:]) for value in cluster.values(job.sink)]
    assert sorted(numbers) == list(range(RECORDS))
    # Each task reads one partition of the source; the rows of a task are in order.
    for index in range(PARTITIONS):
        own = [number for number in numbers if number % PARTITIONS == index]
        assert own == sorted(own)


@pytest.mark.judge
def test_transaction_timed_out_before_commit_fails_the_batch(
    spark: SparkSession, cluster: Cluster, bootstrap: str, tmp_path: Path
) -> None:
    name = unique("slow")
    job = new_job(
        cluster,
        bootstrap,
        tmp_path,
        transactional_id=name,
        options={"kafka.transaction.timeout.ms": "1500"},
    )
    job = faulty(job, tmp_path, "commit begins", "wait")
    query = start(spark, job)
    happened(job)

    def is_aborted() -> bool:
        answer = cluster.call("describe_transactions", 0, transactional_ids=[name])
        return bool(answer["transaction_states"][0]["transaction_state"] == "CompleteAbort")

    until(is_aborted, "the broker aborts", deadline_s=300)
    go_on(job)
    with pytest.raises(Exception, match=r"STREAM_FAILED|aborted|TxnOffsetCommit"):
        query.awaitTermination(300)
    assert_nothing_new(cluster, job, 0)
    run(spark, again(replace(job, options={})))
    assert_exactly_once(cluster, job)


def test_second_query_with_the_same_transactional_id_is_refused(
    spark: SparkSession, cluster: Cluster, bootstrap: str, tmp_path: Path
) -> None:
    name = unique("name")
    job = new_job(cluster, bootstrap, tmp_path, transactional_id=name)
    run(spark, job)
    other = replace(job, checkpoint=str(tmp_path / "other"))
    with pytest.raises(Exception, match="belongs to query"):
        run(spark, other)
    with pytest.raises(Exception, match="belongs to query"):
        run(spark, replace(other, mode="staged", checkpoint=str(tmp_path / "third")))
    assert_exactly_once(cluster, job)


def last_batch(job: Job) -> int:
    return max(int(file.name) for file in Path(job.checkpoint, "commits").glob("[0-9]*"))


def roll_back(job: Job, *folders: str) -> None:
    batch = last_batch(job)
    for folder in folders:
        Path(job.checkpoint, folder, str(batch)).unlink()
        Path(job.checkpoint, folder, f".{batch}.crc").unlink(missing_ok=True)


@pytest.mark.judge
@pytest.mark.parametrize("mode", ["direct", "prepared", "staged"])
def test_batch_missing_in_the_commit_log_is_not_written_twice(
    spark: SparkSession, cluster: Cluster, bootstrap: str, tmp_path: Path, mode: str
) -> None:
    job = new_job(cluster, bootstrap, tmp_path, mode=mode)
    run(spark, job)
    roll_back(job, "commits")
    run(spark, job)
    assert_exactly_once(cluster, job)


@pytest.mark.parametrize("mode", ["direct", "staged"])
def test_rolled_back_checkpoint_is_refused(
    spark: SparkSession, cluster: Cluster, bootstrap: str, tmp_path: Path, mode: str
) -> None:
    job = new_job(cluster, bootstrap, tmp_path, mode=mode)
    run(spark, job)
    roll_back(job, "commits", "offsets")
    # All records go to one partition: if all grew, the source would plan the same offsets.
    fill(cluster, job.source, range(RECORDS, RECORDS + 400, PARTITIONS))
    # The last batch is planned again with other records, which may include committed records.
    with pytest.raises(Exception, match="planned again"):
        run(spark, job)
    assert_exactly_once(cluster, job)


@pytest.mark.judge
def test_expired_progress_is_refused(
    spark: SparkSession, cluster: Cluster, bootstrap: str, tmp_path: Path
) -> None:
    name = unique("expired")
    job = new_job(cluster, bootstrap, tmp_path, transactional_id=name)
    run(spark, job)
    gone = cluster.call("delete_groups", 1, groups_names=[f"{name}-progress"])
    assert gone["results"][0]["error_code"] == "none", gone
    fill(cluster, job.source, MORE)
    with pytest.raises(Exception, match="still known"):
        run(spark, job)
    assert_exactly_once(cluster, job)


@pytest.mark.judge
@pytest.mark.parametrize("step", ["mid write", "commit returned"])
def test_partitions_added_to_the_sink_topic_lose_no_record(
    spark: SparkSession, cluster: Cluster, bootstrap: str, tmp_path: Path, step: str
) -> None:
    job = faulty(new_job(cluster, bootstrap, tmp_path), tmp_path, step, "wait")
    query = start(spark, job)
    happened(job)
    add_partition(cluster, job.sink)
    add_partition(cluster, job.sink)
    go_on(job)
    assert query.awaitTermination(300)
    assert_exactly_once(cluster, job)


def test_query_continues_after_its_producer_epochs_are_exhausted(
    spark: SparkSession, cluster: Cluster, bootstrap: str, tmp_path: Path
) -> None:
    name = unique("old")
    job = new_job(cluster, bootstrap, tmp_path, transactional_id=name)
    cluster.coordinator(name, TRANSACTION)
    first, epoch = cluster.init_producer(name)
    # Each InitProducerId takes one of 32,767 epochs. Leave only a few epochs, to exhaust them.
    while epoch < 32_765 - 4:
        answer = cluster.call(
            "init_producer_id",
            4,
            transactional_id=name,
            transaction_timeout=60_000,
            producer_id=-1,
            producer_epoch=-1,
        )
        assert answer["error_code"] == "none", answer
        first, epoch = answer["producer_id"], answer["producer_epoch"]
    run(spark, job)
    assert_exactly_once(cluster, job)
    assert cluster.init_producer(name)[0] != first


@pytest.mark.judge
def test_batch_without_records_writes_nothing(
    spark: SparkSession, cluster: Cluster, bootstrap: str, tmp_path: Path
) -> None:
    job = new_job(cluster, bootstrap, tmp_path)
    nothing = stream(spark, job).where("value = 'none of them'")
    query = run(spark, job, nothing)
    assert len(query.recentProgress) == RECORDS // PER_BATCH
    assert_nothing_new(cluster, job, 0)


@pytest.mark.judge
@pytest.mark.parametrize("mode", ["direct", "staged"])
def test_stateful_query_is_exactly_once_after_a_failure(
    spark: SparkSession, cluster: Cluster, bootstrap: str, tmp_path: Path, mode: str
) -> None:
    job = new_job(cluster, bootstrap, tmp_path, mode=mode)
    job = faulty(job, tmp_path, "commit returned", "raise")
    kind = "CAST(crc32(value) % 400 AS STRING)"

    def firsts() -> DataFrame:
        kinds = stream(spark, job).selectExpr(f"{kind} AS key", f"{kind} AS value")
        return kinds.dropDuplicates(["key"])

    with pytest.raises(Exception, match=r"InjectedError"):
        run(spark, job, firsts())
    run(spark, again(job), firsts())
    values = spark.sql(f"SELECT CAST(CONCAT('v', id) AS BINARY) AS value FROM range({RECORDS})")
    truth = {row.kind for row in values.selectExpr(f"{kind} AS kind").collect()}
    assert seen(cluster, job.sink, READ_COMMITTED) == Counter(truth)


@pytest.mark.parametrize("step", ["commit begins", "commit returned"])
def test_watermark_batch_without_input_is_exactly_once_after_a_failure(
    spark: SparkSession, cluster: Cluster, bootstrap: str, tmp_path: Path, step: str
) -> None:
    job = new_job(cluster, bootstrap, tmp_path, mode="staged", records=0)
    for minute in range(3):
        stamp = 1_700_000_000_000 + minute * 60_000
        cluster.produce(job.source, batch([b"m%d" % minute] * 5, timestamp_ms=stamp))

    def windows() -> DataFrame:
        from pyspark.sql import functions as fn

        read = (
            spark.readStream.format("fencepost")
            .option("kafka.bootstrap.servers", bootstrap)
            .option("subscribe", job.source)
            .option("startingOffsets", "earliest")
            .load()
        )
        windowed = read.withWatermark("timestamp", "0 seconds").groupBy(
            fn.window("timestamp", "1 minute")
        )
        return windowed.count().selectExpr(
            "CONCAT(UNIX_SECONDS(window.start), ':', count) AS value"
        )

    # Batch 0 reads all records and closes no window. Batch 1 has no records and closes two windows.
    job = faulty(job, tmp_path, step, "raise", batch="1")
    with pytest.raises(Exception, match="InjectedError"):
        run(spark, job, windows())
    query = run(spark, again(job), windows())
    assert all(progress.numInputRows == 0 for progress in query.recentProgress)
    first = 1_700_000_000 // 60 * 60
    assert seen(cluster, job.sink, READ_COMMITTED) == Counter(
        [f"{first + 60 * at}:5" for at in range(2)]
    )
