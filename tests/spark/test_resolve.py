"""``fencepost txns resolve`` and ``fencepost doctor`` for real queries, also for killed ones."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.spark.conftest import START_S, Drivers
from tests.spark.queries import (
    Job,
    again,
    assert_exactly_once,
    assert_nothing_new,
    blow,
    faulty,
    happened,
    new_job,
    run,
)
from tests.support.cluster import Cluster
from tests.wire.command_line import cli
from tests.wire.test_cli import rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.timeout(1200)

PRE_COMMITTED = "offsets committed"
KILLED = {"pre-committed": ("direct", PRE_COMMITTED), "committed": ("staged", "transaction ended")}
"""The mode of a sink, and the step at which its driver is killed."""


@pytest.fixture(scope="module")
def killed(
    drivers: Drivers, bootstrap: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Job]:
    """Return the jobs of queries whose drivers were killed at a step of batch 0."""
    jobs: dict[str, Job] = {}
    with Cluster(bootstrap) as cluster:
        for name, (mode, step) in KILLED.items():
            folder = tmp_path_factory.mktemp("resolve")
            jobs[name] = faulty(
                new_job(cluster, bootstrap, folder, mode=mode), folder, step, "wait"
            )
    child = drivers.start(*jobs.values(), master="local[8]")
    blow(child, [happened(job, child, START_S) for job in jobs.values()])
    return jobs


def resolved(job: Job, *more: str, status: int = 0) -> dict[str, Any]:
    named = ("txns", "resolve", "--from-checkpoint", job.checkpoint, *more, "--json")
    (row,) = rows(cli(job.bootstrap, *named, status=status))
    return row


@pytest.mark.parametrize("name", KILLED)
def test_transaction_of_a_killed_driver_is_resolved_from_its_checkpoint(
    spark: SparkSession, killed: dict[str, Job], cluster: Cluster, name: str
) -> None:
    job, (_, step) = killed[name], KILLED[name]
    row = resolved(job)
    assert str(row["transactional_id"]).startswith("fencepost-")
    if step != PRE_COMMITTED:
        assert (row["verdict"], row["proof"]) == ("committed", True)
        assert "has the progress of batch 0" in row["because"][0]
        assert resolved(job, "--abort", status=1)["action"].startswith("refused: it is not open")
    else:
        assert (row["verdict"], row["proof"]) == ("open", True)
        assert "an attempt at batch 0 has it open" in row["because"][0]
        assert "restart the query" in resolved(job, "--commit", "--execute", status=1)["action"]
        assert resolved(job, "--abort", "--execute")["action"] == "aborted"
        cluster.settle(job.sink)
        assert_nothing_new(cluster, job, 0)
    run(spark, again(job))
    assert_exactly_once(cluster, job)
    last = resolved(job)
    assert (last["verdict"], last["proof"]) == ("committed", True)


@pytest.mark.parametrize("mode", ["direct", "prepared", "staged"])
def test_doctor_finds_nothing_about_source_and_sink(
    spark: SparkSession, cluster: Cluster, bootstrap: str, tmp_path: Path, mode: str
) -> None:
    job = new_job(cluster, bootstrap, tmp_path, mode=mode)
    run(spark, job)
    assert_exactly_once(cluster, job)
    name = str(resolved(job)["transactional_id"])
    for subject in (("--topic", job.source), ("--topic", job.sink), ("--transactional-id", name)):
        done = cli(bootstrap, "doctor", *subject, "--strict", status=None)
        assert (done.exit_code, done.stdout) == (0, ""), subject
