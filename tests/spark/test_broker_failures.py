"""The sink when the broker dies, or when its answer does not arrive."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pipelines.spark.supervise import run_supervised
from tests.spark.queries import assert_exactly_once, new_job, run, start
from tests.spark.test_crashes import again, faulty
from tests.support.cluster import Cluster
from tests.support.daemon import Daemon
from tests.support.proxy import LosingProxy
from tests.support.targets import SETTINGS
from tests.support.waits import until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.timeout(600)

INIT_PRODUCER_ID, PRODUCE, END_TXN, TXN_OFFSET_COMMIT = 22, 0, 26, 28


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon of the test's own."""
    daemon = Daemon(tmp_path / "data").start()
    yield daemon
    daemon.kill()


@pytest.mark.parametrize("mode", ["direct", "staged"])
@pytest.mark.parametrize("step", ["mid write", "offsets committed"])
def test_broker_killed(
    spark: SparkSession, mortal: Daemon, tmp_path: Path, mode: str, step: str
) -> None:
    with Cluster(mortal.bootstrap) as cluster:
        job = new_job(cluster, mortal.bootstrap, tmp_path, mode=mode)
    job = faulty(job, tmp_path, step, "wait")
    query = start(spark, job)
    happened = Path(job.options["crash.once"])
    until(happened.exists, step, deadline_s=300)
    mortal.kill()
    happened.with_suffix(".open").touch()
    mortal.start()
    # The query may live through it or fail; a supervised one goes on in either case.
    attempts = iter([query])
    run_supervised(lambda: next(attempts, None) or start(spark, again(job)))
    with Cluster(mortal.bootstrap) as cluster:
        assert_exactly_once(cluster, job)


@pytest.fixture
def proxied(tmp_path: Path) -> Iterator[tuple[LosingProxy, Daemon]]:
    """A daemon that tells its clients the address of a proxy."""
    proxy = LosingProxy()
    address = f"127.0.0.1:{proxy.port}"
    settings = {**SETTINGS, "advertised.listeners": f"PLAINTEXT://{address}"}
    daemon = Daemon(tmp_path / "data", settings).start()
    host, port = daemon.bootstrap.split(":")
    proxy.target = host, int(port)
    yield proxy, daemon
    proxy.close()
    daemon.stop()


@pytest.mark.parametrize(
    ("mode", "api_key"),
    [
        ("direct", END_TXN),
        ("direct", PRODUCE),
        ("staged", END_TXN),
        ("staged", TXN_OFFSET_COMMIT),
        ("staged", INIT_PRODUCER_ID),
    ],
)
def test_an_answer_is_lost(
    spark: SparkSession,
    proxied: tuple[LosingProxy, Daemon],
    tmp_path: Path,
    mode: str,
    api_key: int,
) -> None:
    proxy, daemon = proxied
    with Cluster(daemon.bootstrap) as cluster:
        job = new_job(cluster, daemon.bootstrap, tmp_path, mode=mode)
        proxy.lose(api_key)
        query = run(spark, replace(job, bootstrap=f"127.0.0.1:{proxy.port}"))
        assert proxy.lost == 1
        assert query.exception() is None
        assert_exactly_once(cluster, job)
