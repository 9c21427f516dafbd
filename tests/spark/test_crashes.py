"""The sink's crash matrix: whatever dies, the read_committed view holds each record once.

A driver in a process of its own is killed at a step; the session's Spark then runs the query again,
with another layout of the source's tasks. What only fails needs no process of its own.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.spark.conftest import START_S, Drivers
from tests.spark.crashing import STEPS
from tests.spark.queries import (
    PARTITIONS,
    PER_BATCH,
    RECORDS,
    Job,
    assert_exactly_once,
    assert_nothing_new,
    fill,
    new_job,
    run,
    seen,
    start,
    stream,
    uncommitted,
)
from tests.support.cluster import READ_COMMITTED, TRANSACTION, Cluster, unique
from tests.support.waits import until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.timeout(600)

STAGED_STEPS = ("task finished", "mid write", "transaction ended")
ON_KAFKA = ("mid write", "transaction ended")
"""Kills that Apache Kafka is tried with as well: each takes a JVM of its own."""


def faulty(job: Job, folder: Path, at: str, how: str, **fields: Any) -> Job:
    options = {
        **job.options,
        "crash.at": at,
        "crash.how": how,
        "crash.once": str(folder / "happened"),
    }
    return replace(job, format="crashing", options=options, **fields)


def again(job: Job) -> Job:
    """The restart: the same query, its source read by other tasks."""
    keep = {key: value for key, value in job.options.items() if not key.startswith("crash.")}
    return replace(job, format="fencepost", ranges=7, options=keep)


def die(drivers: Drivers, job: Job, master: str = "local[2]") -> None:
    """Run the job in a driver that is killed."""
    child = drivers.start(job, master)
    status = child.wait(START_S)
    assert status == -signal.SIGKILL, child.tail()
    assert Path(job.options["crash.once"]).exists()


@pytest.mark.parametrize(
    ("mode", "step"),
    [
        pytest.param(mode, step, marks=pytest.mark.judge if step in ON_KAFKA else ())
        for mode, steps in (("direct", STEPS), ("staged", STAGED_STEPS))
        for step in steps
    ],
)
def test_driver_killed(
    spark: SparkSession,
    drivers: Drivers,
    cluster: Cluster,
    bootstrap: str,
    tmp_path: Path,
    mode: str,
    step: str,
) -> None:
    job = faulty(new_job(cluster, bootstrap, tmp_path, mode=mode), tmp_path, step, "kill")
    die(drivers, job)
    run(spark, again(job))
    assert_exactly_once(cluster, job)
    if step == "mid write":
        # Somebody who does not ask for committed records alone has seen the first attempt's.
        assert uncommitted(cluster, job) > RECORDS


def test_jvm_killed(
    spark: SparkSession, drivers: Drivers, cluster: Cluster, bootstrap: str, tmp_path: Path
) -> None:
    job = faulty(new_job(cluster, bootstrap, tmp_path), tmp_path, "mid write", "wait")
    child = drivers.start(job)
    jvm = int(child.wait_for_line(r"^started (\d+)$", deadline_s=START_S).group(1))
    happened = Path(job.options["crash.once"])
    until(happened.exists, "a task writes", deadline_s=START_S)
    os.kill(jvm, signal.SIGKILL)
    assert child.wait(300) != 0
    happened.with_suffix(".open").touch()
    run(spark, again(job))
    assert_exactly_once(cluster, job)


@pytest.mark.judge
@pytest.mark.parametrize("mode", ["direct", "staged"])
@pytest.mark.parametrize(
    "step", ["mid write", "task finished", "offsets committed", "transaction ended"]
)
def test_a_step_fails(
    spark: SparkSession, cluster: Cluster, bootstrap: str, tmp_path: Path, mode: str, step: str
) -> None:
    job = faulty(new_job(cluster, bootstrap, tmp_path, mode=mode), tmp_path, step, "raise")
    with pytest.raises(Exception, match=r"InjectedError|STREAM_FAILED|aborted"):
        run(spark, job)
    run(spark, again(job))
    assert_exactly_once(cluster, job)


def test_a_task_is_not_tried_twice_in_a_shared_transaction(
    drivers: Drivers, spark: SparkSession, cluster: Cluster, bootstrap: str, tmp_path: Path
) -> None:
    job = faulty(new_job(cluster, bootstrap, tmp_path), tmp_path, "mid write", "raise")
    child = drivers.start(job, "local[2,4]")
    assert child.wait(START_S) == 1
    assert "would write a second time" in child.tail(400)
    run(spark, again(job))
    assert_exactly_once(cluster, job)


def test_staged_tasks_may_be_tried_again(
    drivers: Drivers, cluster: Cluster, bootstrap: str, tmp_path: Path
) -> None:
    job = faulty(
        new_job(cluster, bootstrap, tmp_path, mode="staged"), tmp_path, "task finished", "raise"
    )
    child = drivers.start(job, "local[2,4]")
    assert child.wait(START_S) == 0, child.tail()
    assert_exactly_once(cluster, job)


def test_the_transaction_times_out_between_write_and_commit(
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
    happened = Path(job.options["crash.once"])
    until(happened.exists, "the commit begins", deadline_s=300)

    def is_aborted() -> bool:
        answer = cluster.call("describe_transactions", 0, transactional_ids=[name])
        return bool(answer["transaction_states"][0]["transaction_state"] == "CompleteAbort")

    until(is_aborted, "the broker aborts", deadline_s=300)
    happened.with_suffix(".open").touch()
    with pytest.raises(Exception, match=r"STREAM_FAILED|aborted|TxnOffsetCommit"):
        query.awaitTermination(300)
    assert_nothing_new(cluster, job, 0)
    run(spark, again(replace(job, options={})))
    assert_exactly_once(cluster, job)


@pytest.mark.judge
def test_a_zombie_goes_on_under_the_old_epoch(
    spark: SparkSession, drivers: Drivers, cluster: Cluster, bootstrap: str, tmp_path: Path
) -> None:
    name = unique("zombie")
    job = new_job(cluster, bootstrap, tmp_path, transactional_id=name)
    job = faulty(job, tmp_path, "commit begins", "wait")
    child = drivers.start(job)
    happened = Path(job.options["crash.once"])
    until(happened.exists, "the zombie is about to commit", deadline_s=START_S)
    run(spark, again(job))
    happened.with_suffix(".open").touch()
    assert child.wait(300) == 1
    assert_exactly_once(cluster, job)


def test_two_drivers_of_one_name(
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


@pytest.mark.parametrize("mode", ["direct", "staged"])
def test_the_commit_log_is_behind_by_one_batch(
    spark: SparkSession, cluster: Cluster, bootstrap: str, tmp_path: Path, mode: str
) -> None:
    job = new_job(cluster, bootstrap, tmp_path, mode=mode)
    run(spark, job)
    roll_back(job, "commits")
    run(spark, job)
    assert_exactly_once(cluster, job)


@pytest.mark.parametrize("mode", ["direct", "staged"])
def test_a_checkpoint_that_was_rolled_back_is_refused(
    spark: SparkSession, cluster: Cluster, bootstrap: str, tmp_path: Path, mode: str
) -> None:
    job = new_job(cluster, bootstrap, tmp_path, mode=mode)
    run(spark, job)
    roll_back(job, "commits", "offsets")
    # All into one partition: an even growth would leave the batch's share of each as it was.
    fill(cluster, job.source, range(RECORDS, RECORDS + 400, PARTITIONS))
    # The last batch is planned anew over other data: it can't be told from what was committed.
    with pytest.raises(Exception, match="planned anew"):
        run(spark, job)
    assert_exactly_once(cluster, job)


def test_progress_that_has_expired_is_refused(
    spark: SparkSession, cluster: Cluster, bootstrap: str, tmp_path: Path
) -> None:
    name = unique("expired")
    job = new_job(cluster, bootstrap, tmp_path, transactional_id=name)
    run(spark, job)
    gone = cluster.call("delete_groups", 1, groups_names=[f"{name}-progress"])
    assert gone["results"][0]["error_code"] == "none", gone
    fill(cluster, job.source, range(RECORDS, RECORDS + 20))
    with pytest.raises(Exception, match="still known"):
        run(spark, job)
    assert_exactly_once(cluster, job)


@pytest.mark.judge
def test_the_topic_gets_more_partitions(
    spark: SparkSession, cluster: Cluster, bootstrap: str, tmp_path: Path
) -> None:
    job = faulty(new_job(cluster, bootstrap, tmp_path), tmp_path, "commit returned", "wait")
    query = start(spark, job)
    happened = Path(job.options["crash.once"])
    until(happened.exists, "the first batch is committed", deadline_s=300)
    grown = cluster.call(
        "create_partitions",
        1,
        topics=[{"name": job.sink, "count": PARTITIONS + 2, "assignments": None}],
        timeout=10_000,
        validate_only=False,
    )
    assert grown["results"][0]["error_code"] == "none", grown
    happened.with_suffix(".open").touch()
    assert query.awaitTermination(300)
    assert_exactly_once(cluster, job)


def test_epochs_run_out(
    spark: SparkSession, cluster: Cluster, bootstrap: str, tmp_path: Path
) -> None:
    name = unique("old")
    job = new_job(cluster, bootstrap, tmp_path, transactional_id=name)
    cluster.coordinator(name, TRANSACTION)
    first, epoch = cluster.init_producer(name)
    # The last epochs of a producer id, 32767 in all; each init takes one.
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


def test_a_batch_without_records(
    spark: SparkSession, cluster: Cluster, bootstrap: str, tmp_path: Path
) -> None:
    job = new_job(cluster, bootstrap, tmp_path)
    nothing = stream(spark, job).where("value = 'none of them'")
    query = run(spark, job, nothing)
    assert len(query.recentProgress) == RECORDS // PER_BATCH
    assert_nothing_new(cluster, job, 0)


@pytest.mark.parametrize("mode", ["direct", "staged"])
def test_a_stateful_query(
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
