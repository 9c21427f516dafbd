"""The sink when drivers, JVMs and tasks in separate processes are killed.

Each query of a driver waits at another step, and all queries are killed together, because starting
a JVM for each step would take most of the time. Then the session's Spark runs each query again,
with other source tasks, and a read_committed reader must see each record once.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.spark.conftest import START_S, Drivers
from tests.spark.crashing import STEPS
from tests.spark.queries import (
    RECORDS,
    SMALL,
    Job,
    again,
    assert_all_from_the_first_batch_on,
    assert_exactly_once,
    blow,
    faulty,
    go_on,
    going_on,
    happened,
    new_job,
    run,
    seen,
    uncommitted,
)
from tests.support.cluster import READ_COMMITTED, Cluster, unique
from tests.support.processes import Child

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.judge, pytest.mark.timeout(1200)]

STAGED_STEPS = ("task finished", "after init", "mid write", "offsets committed", *STEPS[-2:])
PREPARED_STEPS = ("after init", "mid write", "task finished", "transaction ended")
KILLS = [
    (mode, step)
    for mode, steps in (("direct", STEPS), ("prepared", PREPARED_STEPS), ("staged", STAGED_STEPS))
    for step in steps
]
AT_THE_END = [("direct", "commit begins"), ("staged", "offsets committed")]
"""Kills in the first batch of queries that begin at the end of a topic with an active producer."""


@pytest.fixture(scope="module")
def killed(
    drivers: Drivers, bootstrap: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str, bool], Job]:
    """Return the jobs of killed queries, by mode, step, and whether the first batch has records."""
    jobs: dict[tuple[str, str, bool], Job] = {}
    with Cluster(bootstrap) as cluster:
        for mode, step in KILLS:
            folder = tmp_path_factory.mktemp("killed")
            # Kill the driver when one task has finished, and others have written some batches.
            hold = {"hold": "mid write"} if (mode, step) == ("prepared", "task finished") else {}
            job = new_job(cluster, bootstrap, folder, mode=mode)
            jobs[mode, step, True] = faulty(job, folder, step, "wait", **hold)
        for mode, step in AT_THE_END:
            folder = tmp_path_factory.mktemp("killed")
            job = new_job(cluster, bootstrap, folder, mode=mode, starting={}, records=40)
            jobs[mode, step, False] = faulty(job, folder, step, "wait")
    child = drivers.start(*jobs.values(), master="local[32]")
    with contextlib.ExitStack() as writing:
        for job in jobs.values():
            if not job.starting:
                writing.enter_context(going_on(bootstrap, job.source))
        pids = [happened(job, child, START_S) for job in jobs.values()]
        blow(child, pids)
    return jobs


@pytest.mark.parametrize(("mode", "step"), AT_THE_END)
def test_query_from_latest_keeps_records_after_a_kill_in_its_first_batch(
    spark: SparkSession,
    killed: dict[tuple[str, str, bool], Job],
    cluster: Cluster,
    mode: str,
    step: str,
) -> None:
    job = killed[mode, step, False]
    run(spark, again(job))
    assert_all_from_the_first_batch_on(cluster, job)


@pytest.mark.parametrize(("mode", "step"), KILLS)
def test_query_is_exactly_once_after_a_driver_kill_at_any_step(
    spark: SparkSession,
    killed: dict[tuple[str, str, bool], Job],
    cluster: Cluster,
    mode: str,
    step: str,
) -> None:
    job = killed[mode, step, True]
    run(spark, again(job))
    assert_exactly_once(cluster, job)
    if step == "mid write":
        # A read_uncommitted reader also sees the records of the first attempt.
        assert uncommitted(cluster, job) > RECORDS


def test_query_is_exactly_once_after_a_jvm_kill(
    spark: SparkSession, drivers: Drivers, cluster: Cluster, bootstrap: str, tmp_path: Path
) -> None:
    job = faulty(new_job(cluster, bootstrap, tmp_path), tmp_path, "mid write", "wait")
    child = drivers.start(job)
    happened(job, child, START_S)
    jvm = int(child.wait_for_line(r"^started (\d+)$", deadline_s=START_S).group(1))
    os.kill(jvm, signal.SIGKILL)
    assert child.wait(START_S) != 0
    go_on(job)
    run(spark, again(job))
    assert_exactly_once(cluster, job)


@dataclass(frozen=True)
class Ended:
    """A query of a driver, which has ended without a kill."""

    job: Job
    told: str


TRIED = {
    "direct": ("direct", {}),
    "marks": ("direct", {"unsafe": "claims"}),
    "sums": ("direct", {"unsafe": "claims"}),
    "prepared": ("prepared", {}),
    "sizes": ("prepared", {"unsafe": "attempts,offsets"}),
    "offsets": ("prepared", {"unsafe": "attempts,sizes"}),
    "control": ("prepared", {"unsafe": "attempts,sizes,offsets"}),
    "staged": ("staged", {}),
    "auto": ("auto", {}),
}


@pytest.fixture(scope="module")
def tried_twice(
    drivers: Drivers, bootstrap: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Ended]:
    """Return ended queries, in which a task failed after writing records, and was retried."""
    jobs: dict[str, Job] = {}
    with Cluster(bootstrap) as cluster:
        for name, (mode, crash) in TRIED.items():
            folder = tmp_path_factory.mktemp(name)
            step = "task finished" if name in {"sums", "staged", "auto"} else "mid write"
            job = new_job(cluster, bootstrap, folder, mode=mode, options=SMALL)
            jobs[name] = faulty(job, folder, step, "raise", **crash)
    child = drivers.start(*jobs.values(), master="local[2,4]")
    child.wait(len(jobs) * START_S)
    lines = [line for line in child.lines if line.startswith("job ")]
    assert len(lines) == len(jobs), child.tail()
    return {
        name: Ended(job, line)
        for (name, job), line in zip(jobs.items(), sorted(lines), strict=True)
    }


@pytest.mark.parametrize("name", ["direct", "prepared"])
def test_second_task_attempt_in_a_shared_transaction_is_refused(
    spark: SparkSession, tried_twice: dict[str, Ended], cluster: Cluster, name: str
) -> None:
    ended = tried_twice[name]
    assert "would write a second time" in ended.told
    run(spark, again(ended.job))
    assert_exactly_once(cluster, ended.job)


@pytest.mark.parametrize("name", ["staged", "auto"])
def test_second_attempt_of_a_staged_task_succeeds(
    tried_twice: dict[str, Ended], cluster: Cluster, name: str
) -> None:
    # If Spark retries tasks, the mode is staged unless an option sets another one.
    assert tried_twice[name].told.endswith("done")
    assert_exactly_once(cluster, tried_twice[name].job)


@pytest.mark.parametrize(
    ("name", "told"), [("marks", "can't be told"), ("sums", "the transaction holds")]
)
def test_concurrent_second_attempt_of_a_task_is_detected(
    spark: SparkSession, tried_twice: dict[str, Ended], cluster: Cluster, name: str, told: str
) -> None:
    ended = tried_twice[name]
    assert told in ended.told
    run(spark, again(ended.job))
    assert_exactly_once(cluster, ended.job)


def test_unguarded_second_attempt_gets_out_of_order_sequence_number(
    spark: SparkSession, tried_twice: dict[str, Ended], cluster: Cluster
) -> None:
    ended = tried_twice["sizes"]
    assert "OUT_OF_ORDER_SEQUENCE_NUMBER" in ended.told
    run(spark, again(ended.job))
    assert_exactly_once(cluster, ended.job)


def test_second_attempt_with_equal_batches_is_detected_by_their_offsets(
    spark: SparkSession, tried_twice: dict[str, Ended], cluster: Cluster
) -> None:
    ended = tried_twice["offsets"]
    assert "took a batch for a repetition" in ended.told
    run(spark, again(ended.job))
    assert_exactly_once(cluster, ended.job)


def test_unguarded_attempts_silently_lose_and_duplicate_records(
    tried_twice: dict[str, Ended], cluster: Cluster
) -> None:
    # If the unguarded control wrote each record exactly once, the tests above would prove nothing.
    ended = tried_twice["control"]
    assert ended.told.endswith("done")
    found = seen(cluster, ended.job.sink, READ_COMMITTED)
    assert sum(found.values()) == RECORDS
    assert len(found) < RECORDS


ZOMBIES = (("prepared", "mid write"), ("direct", "mid write"), ("direct", "commit begins"))


@pytest.fixture(scope="module")
def zombies(
    drivers: Drivers, bootstrap: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Child, dict[tuple[str, str], Job]]:
    """Return a driver that seemed dead, with a query at each step."""
    jobs: dict[tuple[str, str], Job] = {}
    with Cluster(bootstrap) as cluster:
        for mode, step in ZOMBIES:
            folder, name = tmp_path_factory.mktemp("zombie"), unique("zombie")
            job = new_job(cluster, bootstrap, folder, mode=mode, transactional_id=name)
            jobs[mode, step] = faulty(replace(job, options=SMALL), folder, step, "wait")
    child = drivers.start(*jobs.values(), master="local[8]")
    for job in jobs.values():
        happened(job, child, START_S)
    return child, jobs


def test_zombie_tasks_are_fenced_and_change_nothing(
    spark: SparkSession, zombies: tuple[Child, dict[tuple[str, str], Job]], cluster: Cluster
) -> None:
    child, jobs = zombies
    for job in jobs.values():
        run(spark, again(job))
    for job in jobs.values():
        go_on(job)
    assert child.wait(START_S) == 1
    told = sorted(line for line in child.lines if line.startswith("job "))
    assert ["failed" in line for line in told] == [True, True, True], child.tail()
    # In the order of ZOMBIES: the first query is fenced when it produces. The second query is
    # fenced too, unless it finds that another process on the machine has restarted the query. The
    # third query fails to commit its offsets.
    assert "Produce to" in told[0]
    assert "EPOCH" in told[0]
    assert re.search("was given up|EPOCH", told[1])
    assert "TxnOffsetCommit" in told[2]
    for job in jobs.values():
        assert_exactly_once(cluster, job)
