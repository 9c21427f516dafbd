"""Source and sink with TLS, logins and ACLs: kills, minimal rights, planted secrets."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fencepost.pipelines.spark.supervise import is_fatal
from tests.spark.conftest import ROOT, START_S, Drivers
from tests.spark.queries import (
    QUERY_S,
    Job,
    again,
    assert_exactly_once,
    assert_nothing_new,
    blow,
    fail_at,
    faulty,
    happened,
    new_job,
    run,
)
from tests.support.cluster import unique
from tests.support.processes import Child
from tests.support.realm import Realm, Right, realm

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def owner(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Realm]:
    with realm(request, tmp_path_factory.mktemp("realm")) as found:
        yield found


def options_of(owner: Realm, user: str) -> dict[str, str]:
    return {f"kafka.{key}": value for key, value in owner.properties(user).items()}


def secured(owner: Realm, folder: Path, **fields: Any) -> Job:
    job = new_job(owner.operator, owner.bootstrap, folder, **fields)
    return replace(job, transactional_id=unique("id"))


def rights(job: Job) -> list[Right]:
    """Return the rights that a query's source and sink need, as in pipelines/README.md."""
    assert job.transactional_id is not None
    return [
        Right("READ", "TOPIC", job.source),
        Right("WRITE", "TOPIC", job.sink),
        Right("READ", "TOPIC", job.sink),
        Right("WRITE", "TRANSACTIONAL_ID", job.transactional_id),
        Right("READ", "GROUP", job.transactional_id, is_prefix=True),
    ]


def with_rights(owner: Realm, job: Job, wanted: list[Right]) -> Job:
    return replace(job, security=options_of(owner, owner.new_user(*wanted)))


@pytest.mark.judge
def test_secured_query_is_exactly_once_after_kills_and_failures(
    spark: SparkSession, drivers: Drivers, owner: Realm, tmp_path: Path
) -> None:
    jobs = []
    for mode, step in (("direct", "mid write"), ("staged", "offsets committed")):
        (folder := tmp_path / mode).mkdir()
        job = secured(owner, folder, mode=mode)
        jobs.append(faulty(with_rights(owner, job, rights(job)), folder, step, "wait"))
    child = drivers.start(*jobs, master="local[8]")
    blow(child, [happened(job, child, START_S) for job in jobs])
    for job in jobs:
        fail_at(spark, again(job), Path(job.checkpoint).parent, "transaction ended")
        run(spark, again(job))
        assert_exactly_once(owner.operator, job)


@pytest.mark.judge
@pytest.mark.parametrize("mode", ["direct", "staged"])
def test_query_needs_exactly_the_documented_rights(
    spark: SparkSession, owner: Realm, tmp_path: Path, mode: str
) -> None:
    job = secured(owner, tmp_path, mode=mode, records=40)
    wanted = rights(job)
    told = {
        wanted[0]: f"the right DESCRIBE on the topic '{job.source}'",
        wanted[1]: f"the right WRITE on the topic '{job.sink}'",
        wanted[2]: f"the right READ on the topic '{job.sink}'",
        wanted[3]: f"the right WRITE on the transactional id '{job.transactional_id}'",
        wanted[4]: f"the right READ on the group '{job.transactional_id}-progress'",
    }
    for right in wanted:
        poor = with_rights(owner, job, [granted for granted in wanted if granted != right])
        with pytest.raises(Exception, match=f"AccessError: .*({told[right]})") as refused:
            run(spark, replace(poor, checkpoint=f"{job.checkpoint}-{right}"))
        assert is_fatal(refused.value), right
        assert_nothing_new(owner.operator, job, 0)
    run(spark, with_rights(owner, job, wanted))
    assert_exactly_once(owner.operator, job, 40)


def test_revoked_right_fails_the_query_without_visible_records(
    spark: SparkSession, owner: Realm, tmp_path: Path
) -> None:
    job = secured(owner, tmp_path, mode="direct")
    user = owner.new_user(*rights(job))
    job = replace(job, security=options_of(owner, user))
    for number, lost in enumerate(rights(job)[1::3]):
        (folder := tmp_path / str(number)).mkdir()
        fail_at(spark, replace(job, ranges=3 + number), folder, "task finished")
        owner.revoke(user, [lost])
        with pytest.raises(Exception, match="AccessError"):
            run(spark, job)
        assert_nothing_new(owner.operator, job, 0)
        owner.allow(user, [lost])
    run(spark, again(job))
    assert_exactly_once(owner.operator, job)


def test_refused_login_is_fatal(spark: SparkSession, owner: Realm, tmp_path: Path) -> None:
    job = secured(owner, tmp_path, mode="staged", records=40)
    job = with_rights(owner, job, rights(job))
    wrong = replace(job, security={**job.security, "kafka.sasl.password": "hunter2"})
    with pytest.raises(Exception, match=r"AccessError: .*cannot log in") as refused:
        run(spark, wrong)
    assert is_fatal(refused.value)
    assert "hunter2" not in str(refused.value)
    run(spark, job)
    assert_exactly_once(owner.operator, job, 40)


def test_secrets_appear_in_no_log_checkpoint_or_event_file(
    owner: Realm, archive: Path, tmp_path: Path
) -> None:
    source = owner.operator.create_topic(unique("in"))
    sink = owner.operator.create_topic(unique("out"))
    owner.operator.produce(source, [b"%d" % number for number in range(10)])
    user = owner.new_user(
        Right("READ", "TOPIC", source),
        Right("WRITE", "TOPIC", sink),
        Right("READ", "TOPIC", sink),
        Right("WRITE", "TRANSACTIONAL_ID", "fencepost-", is_prefix=True),
        Right("READ", "GROUP", "fencepost-", is_prefix=True),
    )
    told = {**options_of(owner, user), "kafka.bootstrap.servers": owner.bootstrap}
    secret = told["kafka.sasl.password"]
    given, home = tmp_path / "options.json", tmp_path / "home"
    given.write_text(json.dumps(told))
    home.mkdir()
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith("PYSPARK_GATEWAY")
    }
    arguments = [str(given), source, sink, str(home), str(archive)]
    child = Child(
        [sys.executable, "-m", "tests.spark.planted", *arguments],
        env={**environment, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
    )
    assert child.wait(QUERY_S) == 0, child.tail()
    said = "\n".join(child.lines)
    assert "rows 10" in said
    assert "AccessError" in said
    assert "did you mean ssl.key.password" in said
    assert secret not in said
    read = 0
    for file in home.rglob("*"):
        if file.is_file():
            read += 1
            assert secret.encode() not in file.read_bytes(), file
    names = {file.name for file in home.rglob("*")}
    assert {"spark.log", "checkpoint", "events"} <= names
    assert read > 10
