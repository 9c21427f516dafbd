"""Producer ids and epochs across kill -9, and real clients that exhaust their epochs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from fencepost.coordinator.metadata.names import TRANSACTION_STATE
from fencepost.logcore.batch import decode_records
from fencepost.logcore.machine import Record
from fencepost.txn import records
from fencepost.txn.epochs import LAST_CLIENT_EPOCH
from fencepost.txn.state import TransactionMetadata
from tests.support.cluster import READ_COMMITTED, Cluster, unique
from tests.support.daemon import Daemon
from tests.support.kafka import run_tool
from tests.support.targets import SETTINGS
from tests.support.waits import until
from tests.unit.coordinator.services.coordinators import Services
from tests.wire.clients import confluent_producer

BLOCK = 1_000
"""Size of a block of producer ids."""


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    started = Daemon(tmp_path / "data").start()
    yield started
    started.stop()


def fresh(cluster: Cluster) -> int:
    answer = cluster.call(
        "init_producer_id",
        4,
        transactional_id=None,
        transaction_timeout=60_000,
        producer_id=-1,
        producer_epoch=-1,
    )
    assert (answer["error_code"], answer["producer_epoch"]) == ("none", 0)
    return int(answer["producer_id"])


@pytest.mark.slow
def test_producer_ids_stay_unique_across_kills_and_restarts(daemon: Daemon) -> None:
    given: list[int] = []
    # The second process uses up its block exactly, so the third process needs another block.
    for number, (count, is_killed) in enumerate(
        ((3, True), (BLOCK, True), (BLOCK + 1, True), (3, False), (3, True))
    ):
        with Cluster(daemon.bootstrap) as cluster:
            given += [fresh(cluster) for _ in range(count - 1)]
            given.append(cluster.init_producer(unique(f"life-{number}"))[0])
        daemon.kill() if is_killed else daemon.stop()
        daemon.start()
    assert len(set(given)) == len(given) == 2 * BLOCK + 10
    assert all(earlier < later for earlier, later in pairwise(given))


def age(daemon: Daemon, name: str, epoch: int) -> int:
    """Give another epoch to a transactional id of a stopped daemon; return the producer id."""

    async def write() -> int:
        services = await Services(daemon.data_dir, SETTINGS).start()
        index = services.txns.partition_for(name)
        partition = services.logs.partition(TRANSACTION_STATE, index)
        found: TransactionMetadata | None = None
        for header, data in partition.reader.read_all():
            for record in decode_records(data, 0, header):
                decoded = records.decode(Record(record.key or b"", record.value))
                if decoded is not None and decoded.transactional_id == name:
                    found = decoded.txn
        assert found is not None
        old = replace(found, producer_epoch=epoch)
        now_ms = services.clock.now_ms()
        partition.append_records([records.encode(name, old, 2)], now_ms=now_ms)
        await services.stop()
        return found.producer_id

    return asyncio.run(write())


def identities(cluster: Cluster, topic: str) -> list[tuple[int, int]]:
    """Return producer id and epoch of each batch of records."""
    return [
        (batch.producer_id, batch.producer_epoch)
        for batch in cluster.read(topic, isolation=READ_COMMITTED)
    ]


def librdkafka(bootstrap: str, name: str, topic: str) -> None:
    """Run four producers in turn; each producer takes the next epoch."""
    for number in range(4):
        with confluent_producer(bootstrap, transactional_id=name) as producer:
            producer.init_transactions(60)
            producer.begin_transaction()
            producer.produce(topic, b"%d" % number)
            producer.commit_transaction(60)


def java(bootstrap: str, name: str, topic: str) -> None:
    """Run Java's copier; each of its transactions takes the next epoch (KIP-890)."""
    with Cluster(bootstrap) as cluster:
        source = cluster.create_topic(unique("old-in"))
        cluster.produce(source, [b"%d" % number for number in range(4)])
    run_tool(
        "org.apache.kafka.tools.TransactionalMessageCopier",
        *("--broker-list", bootstrap, "--input-topic", source, "--output-topic", topic),
        *("--input-partition", "0", "--consumer-group", unique("old"), "--max-messages", "4"),
        *("--transactional-id", name, "--transaction-size", "1", "--use-group-metadata"),
    )


@pytest.mark.slow  # tests/unit/txn/test_epochs.py has the broker's part
@pytest.mark.parametrize("client", ["librdkafka", "java"])
def test_client_continues_after_its_producer_epochs_are_exhausted(
    daemon: Daemon, client: str, request: pytest.FixtureRequest
) -> None:
    if client == "java":
        request.getfixturevalue("java_tools")
    name = unique("old")
    with Cluster(daemon.bootstrap) as cluster:
        topic = cluster.create_topic(unique("old-out"))
        cluster.init_producer(name)
    daemon.stop()
    old_id = age(daemon, name, LAST_CLIENT_EPOCH - 2)
    daemon.start()
    {"librdkafka": librdkafka, "java": java}[client](daemon.bootstrap, name, topic)
    with Cluster(daemon.bootstrap) as cluster:
        until(lambda: cluster.lso(topic) == cluster.offset(topic), "every transaction has ended")
        assert cluster.values(topic, isolation=READ_COMMITTED) == [b"0", b"1", b"2", b"3"]
        found = identities(cluster, topic)
    assert found[0] == (old_id, LAST_CLIENT_EPOCH - 1)
    assert len(set(found)) == 4
    new_ids = {producer_id for producer_id, _ in found} - {old_id}
    assert len(new_ids) == 1
    assert [epoch for producer_id, epoch in found if producer_id in new_ids] == list(
        range(sum(producer_id in new_ids for producer_id, _ in found))
    )
    with Cluster(daemon.bootstrap) as cluster:
        again = cluster.init_producer(name)
    assert again[0] in new_ids
    assert again[1] > found[-1][1]
