"""Restored and lost checkpoints, and checkpoints on a file system that Python cannot access."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fencepost.pipelines.spark.foreach import exactly_once_batch
from tests.spark.queries import (
    PARTITIONS,
    PER_BATCH,
    RECORDS,
    Job,
    again,
    assert_exactly_once,
    assert_nothing_new,
    fail_at,
    faulty,
    fill,
    new_job,
    run,
    stream,
)
from tests.support.cluster import Cluster, unique

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.timeout(600)

MORE = range(RECORDS, RECORDS + 400, PARTITIONS)
"""Records of one partition only: if all partitions grew, the source would plan the same offsets."""


def last_batch(folder: Path) -> int:
    return max(int(file.name) for file in (folder / "offsets").glob("[0-9]*"))


def forget(folder: Path, *logs: str) -> None:
    """Reset the checkpoint to the state before its last batch was planned or was committed."""
    batch = last_batch(folder)
    for log in logs:
        (folder / log / str(batch)).unlink()
        (folder / log / f".{batch}.crc").unlink(missing_ok=True)


def offsets_of(job: Job, batch: int) -> str:
    """Return the source's offsets of a batch: a line of the batch's file in the checkpoint."""
    return Path(job.checkpoint, "offsets", str(batch)).read_text().splitlines()[-1]


@pytest.fixture
def elsewhere(spark: SparkSession, tmp_path: Path) -> Iterator[Path]:
    """Yield the folder behind Hadoop's default file system, which is no local file system."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    name = unique("mounts")
    settings = {
        "fs.defaultFS": f"viewfs://{name}",
        f"fs.viewfs.mounttable.{name}.link./checkpoints": folder.as_uri(),
    }
    for key, value in settings.items():
        spark.conf.set(key, value)
    yield folder
    for key in settings:
        spark.conf.unset(key)


def far(spark: SparkSession, *, scheme: bool) -> str:
    """Return a checkpoint location on the file system of :func:`elsewhere`."""
    name = spark.conf.get("fs.defaultFS") if scheme else ""
    return f"{name}/checkpoints/query"


@pytest.mark.judge
@pytest.mark.parametrize(
    ("mode", "scheme"), [("prepared", True), ("staged", False)], ids=["prepared", "staged-default"]
)
def test_checkpoint_on_another_file_system_is_read_through_spark(
    spark: SparkSession,
    cluster: Cluster,
    bootstrap: str,
    tmp_path: Path,
    elsewhere: Path,
    mode: str,
    scheme: bool,
) -> None:
    job = new_job(cluster, bootstrap, tmp_path, mode=mode, transactional_id=unique("far"))
    job = replace(job, checkpoint=far(spark, scheme=scheme))
    with pytest.raises(Exception, match="InjectedError"):
        run(spark, faulty(job, tmp_path, "commit returned", "raise"))
    assert_nothing_new(cluster, job, PER_BATCH)
    # The batch runs again with other tasks, so the order of its rows differs.
    run(spark, again(job))
    assert_exactly_once(cluster, job)
    kept = elsewhere / "query"
    assert last_batch(kept) == RECORDS // PER_BATCH - 1
    forget(kept, "commits")
    run(spark, job)
    assert_exactly_once(cluster, job)
    # Without the entries of the last batch, Spark plans the batch again, with other records.
    forget(kept, "commits", "offsets")
    fill(cluster, job.source, MORE)
    with pytest.raises(Exception, match="was committed with"):
        run(spark, job)
    assert_exactly_once(cluster, job)


@pytest.mark.parametrize("mode", ["direct", "staged"])
def test_local_folder_with_the_checkpoints_path_is_not_mistaken_for_it(
    spark: SparkSession, cluster: Cluster, bootstrap: str, tmp_path: Path, mode: str
) -> None:
    """The same path is used on the local file system, and then on another default file system."""
    job = new_job(cluster, bootstrap, tmp_path, mode=mode, transactional_id=unique("here"))
    run(spark, job)
    there = tmp_path / "there"
    there.mkdir()
    name = unique("mounts")
    settings = {
        "fs.defaultFS": f"viewfs://{name}",
        f"fs.viewfs.mounttable.{name}.link.{tmp_path}": there.as_uri(),
    }
    moved = new_job(cluster, bootstrap, tmp_path, mode=mode, transactional_id=unique("there"))
    assert moved.checkpoint == job.checkpoint
    for key, value in settings.items():
        spark.conf.set(key, value)
    try:
        run(spark, moved)
    finally:
        for key in settings:
            spark.conf.unset(key)
    assert_exactly_once(cluster, moved)
    assert last_batch(there / "checkpoint") == last_batch(Path(job.checkpoint)) == 2


def test_offset_log_of_format_version_2_is_read(
    spark: SparkSession, cluster: Cluster, bootstrap: str, tmp_path: Path
) -> None:
    setting = "spark.sql.streaming.offsetLog.formatVersion"
    spark.conf.set(setting, "2")
    try:
        job = new_job(cluster, bootstrap, tmp_path)
        run(spark, job)
        log = Path(job.checkpoint, "offsets")
        assert (log / "0").read_text().startswith("v2\n")
        forget(log.parent, "commits")
        run(spark, job)
        assert_exactly_once(cluster, job)
        forget(log.parent, "commits", "offsets")
        fill(cluster, job.source, MORE)
        with pytest.raises(Exception, match="from other source offsets"):
            run(spark, job)
    finally:
        spark.conf.unset(setting)
    assert_exactly_once(cluster, job)


def test_too_large_batch_is_planned_again_after_its_entry_is_deleted(
    spark: SparkSession, cluster: Cluster, bootstrap: str, tmp_path: Path
) -> None:
    """The README's advice for a first batch that does not fit into a transaction."""
    everything = {"startingOffsets": "earliest", "maxOffsetsPerTrigger": str(RECORDS)}
    job = new_job(cluster, bootstrap, tmp_path, mode="staged")
    fail_at(spark, replace(job, starting=everything), tmp_path, "commit begins")
    # The batch is already planned, so a limit has no effect on this batch.
    (tmp_path / "limited").mkdir()
    fail_at(spark, job, tmp_path / "limited", "task finished")
    assert json.loads(offsets_of(job, 0)) == {job.source: dict.fromkeys("0123", RECORDS // 4)}
    forget(Path(job.checkpoint), "offsets")
    query = run(spark, again(job))
    assert len(query.recentProgress) == RECORDS // PER_BATCH
    assert_exactly_once(cluster, job)


def into(
    spark: SparkSession, job: Job, *, batches: int | None = None, **options: str
) -> Callable[[], Any]:
    """Return a function that runs a query whose ``foreachBatch`` uses exactly_once_batch.

    ``batches`` limits the number of batches.
    """
    sink = exactly_once_batch(
        **{
            "kafka.bootstrap.servers": job.bootstrap,
            "topic": job.sink,
            "kafka.transactional.id": job.transactional_id or "",
            **options,
        }
    )

    def write(df: Any, batch_id: int) -> None:
        if batch_id == batches:
            raise InterruptedError("enough batches")
        sink(df, batch_id)

    def start() -> Any:
        query = (
            stream(spark, job)
            .writeStream.foreachBatch(write)
            .option("checkpointLocation", job.checkpoint)
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination(300)
        return query

    return start


@pytest.mark.parametrize(
    ("is_told", "message"),
    [(False, "was committed with"), (True, "from other source offsets")],
    ids=["rows", "offsets"],
)
def test_foreach_batch_refuses_a_rolled_back_checkpoint(
    spark: SparkSession,
    cluster: Cluster,
    bootstrap: str,
    tmp_path: Path,
    is_told: bool,
    message: str,
) -> None:
    job = new_job(cluster, bootstrap, tmp_path, transactional_id=unique("foreach"))
    go = into(spark, job, **({"checkpointLocation": job.checkpoint} if is_told else {}))
    go()
    forget(Path(job.checkpoint), "commits")
    go()
    assert_exactly_once(cluster, job)
    forget(Path(job.checkpoint), "commits", "offsets")
    fill(cluster, job.source, MORE)
    with pytest.raises(Exception, match=message):
        go()
    assert_exactly_once(cluster, job)


def test_foreach_batch_with_a_new_checkpoint_under_the_same_id(
    spark: SparkSession, cluster: Cluster, bootstrap: str, tmp_path: Path
) -> None:
    job = new_job(cluster, bootstrap, tmp_path, transactional_id=unique("foreach"))
    with pytest.raises(Exception, match="enough batches"):
        into(spark, job, batches=1)()
    assert_nothing_new(cluster, job, PER_BATCH)
    shutil.rmtree(job.checkpoint)
    with pytest.raises(Exception, match="belongs to query"):
        into(spark, job)()
    assert_nothing_new(cluster, job, PER_BATCH)
