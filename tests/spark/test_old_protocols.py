"""The sink on a broker whose ``transaction.version`` is 1 or 0, that is, without KIP-890.

Without KIP-890, EndTxn does not bump the epoch, and separate requests add partitions and groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fencepost.logcore.compression import Codec
from fencepost.pipelines.spark import transaction as txn
from fencepost.pipelines.spark.broker import ClusterConnection
from fencepost.pipelines.spark.columns import Piece
from fencepost.pipelines.spark.errors import BrokerError
from tests.spark.conftest import START_S, Drivers
from tests.spark.queries import (
    KEEP,
    PER_BATCH,
    RECORDS,
    Job,
    again,
    assert_exactly_once,
    assert_nothing_new,
    blow,
    fail_at,
    faulty,
    finish,
    go_on,
    happened,
    new_job,
    run,
    start,
    uncommitted,
)
from tests.support.cluster import Cluster, unique
from tests.support.own_broker import OwnBroker, behind_proxy, own_broker
from tests.support.proxy import LosingProxy
from tests.support.waits import until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

pytestmark = pytest.mark.timeout(600)

FEATURE = "transaction.version"
LEVELS = [0, 1]
UPGRADE, SAFE_DOWNGRADE = 1, 2
ADD_PARTITIONS, ADD_OFFSETS, END_TXN = 24, 25, 26


def set_level(cluster: Cluster, level: int) -> None:
    """Change the feature level, and wait until the broker has applied it."""

    def finalized() -> int:
        told = cluster.call(
            "api_versions", 3, client_software_name="t", client_software_version="1"
        )
        levels = {
            feature["name"]: feature["max_version_level"] for feature in told["finalized_features"]
        }
        return int(levels.get(FEATURE, 0))

    before = finalized()
    if before == level:
        return
    direction = UPGRADE if level > before else SAFE_DOWNGRADE
    update = {"feature": FEATURE, "max_version_level": level, "upgrade_type": direction}
    answer = cluster.call("update_features", 1, feature_updates=[update])
    assert answer["error_code"] == "none", answer
    assert all(result["error_code"] == "none" for result in answer["results"]), answer
    until(lambda: finalized() == level, f"{FEATURE} is {level}")


@dataclass(frozen=True)
class Old:
    """A broker at one level."""

    bootstrap: str
    level: int
    proxy: LosingProxy


@pytest.fixture(scope="module")
def broker(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[OwnBroker, LosingProxy]]:
    """Yield a broker that advertises the address of a proxy, and the proxy."""
    with behind_proxy(request, tmp_path_factory.mktemp("old")) as both:
        yield both


@pytest.fixture(params=LEVELS, ids=lambda level: f"tv{level}")
def old(request: pytest.FixtureRequest, broker: tuple[OwnBroker, LosingProxy]) -> Old:
    started, proxy = broker
    with Cluster(started.bootstrap) as cluster:
        set_level(cluster, request.param)
    return Old(f"127.0.0.1:{proxy.port}", request.param, proxy)


@pytest.fixture
def cluster(broker: tuple[OwnBroker, LosingProxy]) -> Iterator[Cluster]:
    with Cluster(broker[0].bootstrap) as connected:
        yield connected


@pytest.mark.judge
@pytest.mark.parametrize(("old", "mode"), [(0, "direct"), (1, "staged")], indirect=["old"])
def test_batches_are_written_once_below_tv2(
    spark: SparkSession, old: Old, cluster: Cluster, tmp_path: Path, mode: str
) -> None:
    name = unique("old")
    job = new_job(cluster, old.bootstrap, tmp_path, mode=mode, transactional_id=name)
    query = run(spark, job)
    assert_exactly_once(cluster, job)
    # InitProducerId takes one epoch for each batch; with TV2, EndTxn takes another epoch.
    assert cluster.init_producer(name)[1] == len(query.recentProgress)


@pytest.mark.judge
@pytest.mark.parametrize("mode", ["direct", "staged"])
def test_query_below_tv2_is_exactly_once_after_failing_steps(
    spark: SparkSession, old: Old, cluster: Cluster, tmp_path: Path, mode: str
) -> None:
    job = new_job(cluster, old.bootstrap, tmp_path, mode=mode)
    fail_at(spark, job, tmp_path, "mid write", "offsets committed", "transaction ended")
    run(spark, again(job))
    assert_exactly_once(cluster, job)


@pytest.mark.judge
def test_query_below_tv2_is_exactly_once_after_driver_kills(
    spark: SparkSession,
    drivers: Drivers,
    broker: tuple[OwnBroker, LosingProxy],
    cluster: Cluster,
    tmp_path: Path,
) -> None:
    set_level(cluster, 1)
    jobs: list[Job] = []
    for step in ("mid write", "offsets committed", "transaction ended"):
        folder = tmp_path / step
        folder.mkdir()
        jobs.append(faulty(new_job(cluster, broker[0].bootstrap, folder), folder, step, "wait"))
    child = drivers.start(*jobs, master="local[8]")
    blow(child, [happened(job, child, START_S) for job in jobs])
    for job in jobs:
        run(spark, again(job))
        assert_exactly_once(cluster, job)
    assert uncommitted(cluster, jobs[0]) > RECORDS


@pytest.mark.judge
def test_query_below_tv2_is_exactly_once_after_lost_responses(
    spark: SparkSession, old: Old, cluster: Cluster, tmp_path: Path
) -> None:
    job = new_job(cluster, old.bootstrap, tmp_path, mode="staged")
    old.proxy.lose(ADD_PARTITIONS, ADD_OFFSETS, END_TXN)
    run(spark, job)
    assert old.proxy.lost == {ADD_PARTITIONS, ADD_OFFSETS, END_TXN}
    assert_exactly_once(cluster, job)


@pytest.mark.judge
def test_zombie_of_a_finished_batch_is_fenced_by_the_next_batch(old: Old, cluster: Cluster) -> None:
    # EndTxn does not bump the epoch. Without an InitProducerId for each batch, late writes of a
    # task of the last batch would join the next transaction.
    topic = cluster.create_topic(unique("zombie"), 1, KEEP)
    link = ClusterConnection(old.bootstrap, client_id="zombie", timeout_ms=20_000)
    tid = unique("zombie")
    piece = Piece(topic, 0, 1, 5, 5, bytes([0x12, 0, 0, 0, 1, 6, *b"old", 0]))

    def send(ticket: txn.TransactionHandle) -> None:
        sender = txn.Sender(link, ticket, Codec.NONE, None)
        sender.add(piece)
        sender.flush()

    first = txn.begin(link, tid, 60_000)
    assert not first.implicit
    send(first)
    txn.end(link, first, commit=True)
    second = txn.begin(link, tid, 60_000)
    assert second.epoch == first.epoch + 1
    with pytest.raises(BrokerError, match=r"EPOCH|FENCED"):
        send(first)
    send(second)
    with pytest.raises(txn.TransactionOverError):
        txn.end(link, first, commit=True)
    txn.end(link, second, commit=True)
    assert cluster.values(topic) == [b"old", b"old"]
    link.close()


def begun_at(
    level: int, spark: SparkSession, bootstrap: str, cluster: Cluster, folder: Path
) -> tuple[Job, StreamingQuery]:
    """Start a query that waits after its first batch; return the job and the query."""
    set_level(cluster, level)
    # Spark's workers keep a connection and its API versions; a new client id opens another
    # connection.
    options = {"kafka.client.id": unique("client")}
    job = new_job(cluster, bootstrap, folder, options=options, transactional_id=unique("level"))
    job = faulty(job, folder, "commit returned", "wait")
    query = start(spark, job)
    happened(job)
    return job, query


@pytest.mark.judge
@pytest.mark.parametrize(("before", "behind"), [(2, 1), (0, 2)])
def test_query_survives_a_change_of_transaction_version(
    spark: SparkSession,
    broker: tuple[OwnBroker, LosingProxy],
    cluster: Cluster,
    tmp_path: Path,
    before: int,
    behind: int,
) -> None:
    job, query = begun_at(before, spark, broker[0].bootstrap, cluster, tmp_path)
    set_level(cluster, behind)
    go_on(job)
    finish(query)
    assert_exactly_once(cluster, job)


@pytest.mark.judge
def test_query_survives_a_transaction_version_change_from_2_to_0(
    request: pytest.FixtureRequest, spark: SparkSession, tmp_path: Path
) -> None:
    """Fencepost continues to serve the transactional id, Apache Kafka only after a reload.

    See the trace ``level_0_under_ids_of_level_2``.
    """
    with own_broker(request, tmp_path / "broker") as broker:
        with Cluster(broker.bootstrap) as cluster:
            job, query = begun_at(2, spark, broker.bootstrap, cluster, tmp_path)
            set_level(cluster, 0)
            go_on(job)
            if request.config.getoption("--target") == "fencepost":
                finish(query)
                assert_exactly_once(cluster, job)
                return
            with pytest.raises(Exception, match=r"Raise transaction\.version again"):
                finish(query)
            assert_nothing_new(cluster, job, PER_BATCH)
            set_level(cluster, 2)
        # As the message says, the pending write is dropped only when a coordinator reloads the log.
        broker.kill()
        broker.start()
        run(spark, again(job))
        with Cluster(broker.bootstrap) as cluster:
            assert_exactly_once(cluster, job)
