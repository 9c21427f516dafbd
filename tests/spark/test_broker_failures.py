"""Source and sink when the broker is killed, or when one of its responses is lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fencepost.pipelines.spark.supervise import run_supervised
from tests.spark.queries import again, assert_exactly_once, faulty, go_on, happened, new_job, run
from tests.spark.queries import start as start_query
from tests.support.cluster import Cluster
from tests.support.own_broker import OwnBroker, behind_proxy, own_broker
from tests.support.proxy import LosingProxy

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.timeout(600)

PRODUCE, FETCH, LIST_OFFSETS, METADATA, OFFSET_FETCH = 0, 1, 2, 3, 9
INIT_PRODUCER_ID, END_TXN, TXN_OFFSET_COMMIT = 22, 26, 28


@pytest.fixture(scope="module")
def mortal(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OwnBroker]:
    """Yield a broker that the tests may kill."""
    with own_broker(request, tmp_path_factory.mktemp("mortal")) as broker:
        yield broker


@pytest.mark.judge
@pytest.mark.parametrize("mode", ["direct", "staged"])
@pytest.mark.parametrize("step", ["mid write", "offsets committed"])
def test_query_is_exactly_once_after_a_broker_kill_at_any_step(
    spark: SparkSession, mortal: OwnBroker, tmp_path: Path, mode: str, step: str
) -> None:
    with Cluster(mortal.bootstrap) as cluster:
        job = new_job(cluster, mortal.bootstrap, tmp_path, mode=mode)
    job = faulty(job, tmp_path, step, "wait")
    query = start_query(spark, job)
    happened(job)
    mortal.kill()
    go_on(job)
    mortal.start()
    # The query may survive the kill or fail; if a supervisor restarts it, it continues.
    attempts = iter([query])
    run_supervised(lambda: next(attempts, None) or start_query(spark, again(job)))
    with Cluster(mortal.bootstrap) as cluster:
        assert_exactly_once(cluster, job)


@pytest.fixture(scope="module")
def proxied(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LosingProxy, str]]:
    """Yield a proxy, and the broker's own address; the broker advertises the proxy's address."""
    with behind_proxy(request, tmp_path_factory.mktemp("proxied")) as (started, proxy):
        yield proxy, started.bootstrap


OF_SOURCE = (METADATA, LIST_OFFSETS, FETCH)
OF_SINK = (INIT_PRODUCER_ID, OFFSET_FETCH, PRODUCE, TXN_OFFSET_COMMIT, END_TXN)


@pytest.mark.judge
@pytest.mark.parametrize(
    ("mode", "api_keys"),
    [("direct", OF_SINK), ("prepared", OF_SINK), ("staged", OF_SINK), ("staged", OF_SOURCE)],
    ids=["direct", "prepared", "staged", "source"],
)
def test_query_is_exactly_once_after_lost_responses(
    spark: SparkSession,
    proxied: tuple[LosingProxy, str],
    tmp_path: Path,
    mode: str,
    api_keys: tuple[int, ...],
) -> None:
    proxy, bootstrap = proxied
    with Cluster(bootstrap) as cluster:
        job = new_job(cluster, bootstrap, tmp_path, mode=mode)
        proxy.lose(*api_keys)
        query = run(spark, replace(job, bootstrap=f"127.0.0.1:{proxy.port}"))
        assert proxy.lost == set(api_keys)
        assert query.exception() is None
        assert_exactly_once(cluster, job)
