"""Producer ids and sequences: a batch that is sent twice is appended once."""

from __future__ import annotations

from tests.support.batches import batch
from tests.support.cluster import Cluster, unique
from tests.wire.clients import aio_producer, confluent_producer, kp_producer


async def test_idempotent_clients_write_in_order(bootstrap: str, cluster: Cluster) -> None:
    topic = cluster.create_topic(unique("idem"), 3)
    wanted = [b"%d" % i for i in range(200)]
    with confluent_producer(bootstrap, enable_idempotence=True) as producer:
        for value in wanted:
            producer.produce(topic, value, partition=0)
    async with aio_producer(bootstrap, enable_idempotence=True) as producer:
        for value in wanted:
            await producer.send(topic, value, partition=1)
        await producer.flush()
    with kp_producer(bootstrap, enable_idempotence=True) as producer:
        for value in wanted:
            producer.send(topic, value, partition=2)
        producer.flush()
    for partition in range(3):
        assert cluster.values(topic, partition=partition) == wanted
        stamps = {b.producer_id for b in cluster.read(topic, partition=partition)}
        assert len(stamps) == 1
        assert stamps != {-1}


def test_init_producer_id_returns_distinct_ids(cluster: Cluster) -> None:
    given = [cluster.init_producer() for _ in range(5)]
    assert len({pid for pid, _ in given}) == 5
    assert {epoch for _, epoch in given} == {0}


def test_duplicate_batch_is_acknowledged_with_its_first_offset(cluster: Cluster) -> None:
    topic = cluster.create_topic(unique("dup"))
    pid, epoch = cluster.init_producer()

    def send(sequence: int, size: int = 2) -> tuple[str, int]:
        data = batch([b"v"] * size, producer_id=pid, producer_epoch=epoch, sequence=sequence)
        part = cluster.produce(topic, data)
        return part["error_code"], part["base_offset"]

    assert [send(sequence) for sequence in range(0, 12, 2)] == [
        ("none", offset) for offset in range(0, 12, 2)
    ]
    # The broker remembers the last five batches of a producer.
    assert [send(sequence) for sequence in range(2, 12, 2)] == [
        ("none", offset) for offset in range(2, 12, 2)
    ]
    assert send(0)[0] == "out_of_order_sequence_number"
    assert cluster.offset(topic) == 12


def test_sequence_gap_is_refused(cluster: Cluster) -> None:
    topic = cluster.create_topic(unique("gap"))
    pid, epoch = cluster.init_producer()

    def send(sequence: int, producer_epoch: int = epoch) -> str:
        data = batch([b"v"], producer_id=pid, producer_epoch=producer_epoch, sequence=sequence)
        error: str = cluster.produce(topic, data)["error_code"]
        return error

    assert send(0) == "none"
    assert send(2) == "out_of_order_sequence_number"
    assert send(1) == "none"
    assert send(5, epoch + 1) == "out_of_order_sequence_number"
    assert send(0, epoch + 1) == "none"
    assert send(2) == "invalid_producer_epoch"
    assert cluster.offset(topic) == 3


def test_unknown_producer_may_start_at_any_sequence(cluster: Cluster) -> None:
    topic = cluster.create_topic(unique("anywhere"))
    pid, epoch = cluster.init_producer()
    data = batch([b"v"], producer_id=pid, producer_epoch=epoch, sequence=77)
    assert cluster.produce(topic, data)["error_code"] == "none"


def test_sequence_wraps_to_zero_after_the_maximum(cluster: Cluster) -> None:
    topic = cluster.create_topic(unique("wrap"))
    pid, epoch = cluster.init_producer()
    for sequence, size in ((2**31 - 3, 2), (2**31 - 1, 2), (1, 1)):
        data = batch([b"v"] * size, producer_id=pid, producer_epoch=epoch, sequence=sequence)
        assert cluster.produce(topic, data)["error_code"] == "none", sequence
    assert cluster.offset(topic) == 5
