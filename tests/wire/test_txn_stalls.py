"""No transaction blocks the event loop for long, however many partitions and ids there are.

This covers requests within the limits, and the broker's own background work.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fencepost import Broker
from tests.support.cluster import TRANSACTION, Cluster
from tests.support.raw import errors_in
from tests.support.stalls import LoopWatch, watched_loop
from tests.support.waits import until

pytestmark = pytest.mark.slow

CONFIG = {"transaction.state.log.num.partitions": "1", "offsets.topic.num.partitions": "1"}
PARTITIONS = 2_000
IDS = 2_000
LISTED = 100_000
NAME = "spans-many"


@pytest.fixture
def watch() -> Iterator[LoopWatch]:
    with watched_loop() as watch:
        yield watch


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Cluster]:
    with Broker.in_thread(tmp_path, config=CONFIG) as broker, Cluster(broker.bootstrap) as client:
        client.coordinator(NAME, TRANSACTION)
        yield client


def add(client: Cluster, producer: tuple[int, int], topics: list[dict[str, Any]]) -> None:
    answer = client.call(
        "add_partitions_to_txn",
        3,
        v3_and_below_transactional_id=NAME,
        v3_and_below_producer_id=producer[0],
        v3_and_below_producer_epoch=producer[1],
        v3_and_below_topics=topics,
    )
    assert set(errors_in(answer)) == {"none"}


def end(client: Cluster, producer: tuple[int, int], *, commit: bool) -> None:
    answer = client.call(
        "end_txn",
        5,
        transactional_id=NAME,
        producer_id=producer[0],
        producer_epoch=producer[1],
        committed=commit,
    )
    assert answer["error_code"] == "none"


def make_ids(client: Cluster, names: Iterable[str]) -> None:
    asked = 0
    for asked, name in enumerate(names, 1):  # noqa: B007
        client.send(
            "init_producer_id",
            4,
            transactional_id=name,
            transaction_timeout=60_000,
            producer_id=-1,
            producer_epoch=-1,
        )
    for _ in range(asked):
        assert client.receive()["error_code"] == "none"


def test_hostile_patterns_over_many_ids_do_not_block_the_loop(
    client: Cluster, watch: LoopWatch
) -> None:
    names = [f"{number:06d}-äöü" for number in range(LISTED)]
    make_ids(client, names)
    watch.check()
    patterns = {
        "(.*.*)*b": 0,
        "(.?){1000}": LISTED,
        "(?i)[0-9]+-[Ä-Ü]{3}|" + "[ä-ü]?" * 3_000: LISTED,
        "a?" * 16_000: 0,
        "[" + "a" * 32_000 + "]": 0,
        "(" * 16_000 + "a" + ")" * 16_000: 0,
        "|".join(str(number) for number in range(5_000)): 0,
        "": LISTED,
    }
    for pattern, matching in patterns.items():
        answer = client.call("list_transactions", 2, transactional_id_pattern=pattern)
        assert answer["error_code"] == "none"
        assert len(answer["transaction_states"]) == matching, pattern[:20]
        watch.check()


def test_expiry_of_many_ids_at_once_does_not_block_the_loop(
    tmp_path: Path, watch: LoopWatch
) -> None:
    expiring = {
        "transactional.id.expiration.ms": "1",
        "transaction.remove.expired.transaction.cleanup.interval.ms": "100",
    }
    with (
        Broker.in_thread(tmp_path, config={**CONFIG, **expiring}) as broker,
        Cluster(broker.bootstrap) as client,
    ):
        client.coordinator(NAME, TRANSACTION)
        make_ids(client, (f"id-{number}" for number in range(IDS)))
        nothing = lambda: not client.call("list_transactions", 0)["transaction_states"]  # noqa: E731
        until(nothing, "all are forgotten")
    watch.check()


def test_transaction_over_many_unused_partitions_does_not_block_the_loop(
    client: Cluster, watch: LoopWatch
) -> None:
    client.call(
        "create_topics",
        5,
        timeout=10_000,
        topics=[{"name": "wide", "num_partitions": PARTITIONS, "replication_factor": 1}],
    )
    producer = client.init_producer(NAME)
    add(client, producer, [{"name": "wide", "partitions": range(PARTITIONS)}])
    watch.check()
    end(client, producer, commit=True)
    watch.check()
    assert client.offset("wide", PARTITIONS - 1) == 1
