"""How outputs become batches: their order, partitions, sizes and failures, on real brokers."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
from collections.abc import AsyncIterator

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.errors import MessageSizeTooLargeError
from aiokafka.partitioner import DefaultPartitioner

from fencepost.pipelines.producers import close_producer, open_producer, send_all
from fencepost.pipelines.records import Output
from fencepost.pipelines.serde import BYTES
from tests.support.cluster import READ_COMMITTED, Cluster, unique
from tests.wire.clients import aio_consumer

PARTITIONS = 3
LIMIT = 100_000
"""max.request.size of the producer under test; its batches hold 16 KiB."""


@contextlib.asynccontextmanager
async def transaction(bootstrap: str) -> AsyncIterator[AIOKafkaProducer]:
    """Yield a producer inside a transaction, which is committed at the end."""
    options = {"max_batch_size": 16 * 1024, "max_request_size": LIMIT}
    producer = await open_producer(bootstrap, unique("id"), 60_000, options)
    try:
        await producer.begin_transaction()
        yield producer
        await producer.commit_transaction()
    finally:
        await close_producer(producer)


async def write(bootstrap: str, *outputs: Output) -> None:
    async with transaction(bootstrap) as producer:
        await send_all(producer, outputs, BYTES, BYTES)


def written(cluster: Cluster, topic: str, partition: int) -> list[bytes | None]:
    """Return the committed values of a partition, once it has the transaction's markers."""
    cluster.settle(topic)
    return cluster.values(topic, partition=partition, isolation=READ_COMMITTED)


@pytest.fixture
def topic(cluster: Cluster) -> str:
    return cluster.create_topic(unique("out"), PARTITIONS)


async def test_batches_keep_order_keys_and_partitions(
    bootstrap: str, cluster: Cluster, topic: str
) -> None:
    """Several hundred KB fill batches of 16 KiB; Java's partitioner chooses the partitions."""
    keys = [b"key %d" % (number % 20) for number in range(3_000)]
    outputs = [Output(topic, b"%08d" % n + b"x" * 100, key) for n, key in enumerate(keys)]
    await write(bootstrap, *outputs)
    expected: dict[int, list[bytes]] = {part: [] for part in range(PARTITIONS)}
    for output in outputs:
        target = DefaultPartitioner()(output.key, list(expected), list(expected))
        expected[target].append(output.value)
    assert all(expected.values())
    for part, values in expected.items():
        assert written(cluster, topic, part) == values


async def test_records_keep_key_headers_partition_and_timestamp(bootstrap: str, topic: str) -> None:
    headers = (("a", b"1"), ("a", b"2"))
    sent = [
        Output(topic, b"all", b"k", 1, headers, 1_000),
        Output(topic, None, b"tombstone", 1, timestamp_ms=2_000),
        Output(topic, b"no key", None, 1, timestamp_ms=3_000),
        Output(topic, b"", b"", 1, timestamp_ms=4_000),
        Output(topic, None, None, 1, timestamp_ms=5_000),
    ]
    await write(bootstrap, *sent)
    async with aio_consumer(bootstrap, topic, auto_offset_reset="earliest") as consumer:
        found = [await asyncio.wait_for(consumer.getone(), 60) for _ in sent]
    assert [(r.value, r.key, r.partition, tuple(r.headers), r.timestamp) for r in found] == [
        (o.value, o.key, o.partition, o.headers, o.timestamp_ms) for o in sent
    ]


async def test_records_without_a_key_fill_a_batch_before_the_partition_changes(
    bootstrap: str, cluster: Cluster, topic: str
) -> None:
    count = 4_000
    await write(bootstrap, *(Output(topic, b"%08d" % n + b"x" * 100) for n in range(count)))
    found = [
        sorted(int(value[:8]) for value in written(cluster, topic, part) if value)
        for part in range(PARTITIONS)
    ]
    assert sorted(itertools.chain(*found)) == list(range(count))
    assert len([part for part in found if part]) > 1
    changes = sum(later != one + 1 for part in found for one, later in itertools.pairwise(part))
    # A batch has about 150 records.
    assert changes < count / 100


async def test_outputs_to_several_topics_or_none_are_written(
    bootstrap: str, cluster: Cluster, topic: str
) -> None:
    other = cluster.create_topic(unique("other"))
    await write(bootstrap)
    await write(bootstrap, Output(topic, b"1", None, 0), Output(other, b"2"), Output(other, b"3"))
    assert written(cluster, topic, 0) == [b"1"]
    assert written(cluster, other, 0) == [b"2", b"3"]


async def test_record_may_be_as_large_as_max_request_size(
    bootstrap: str, cluster: Cluster, topic: str
) -> None:
    """A record larger than a batch gets its own batch; the order of the records is kept."""
    overhead = 30
    large = b"x" * (LIMIT - overhead)
    await write(bootstrap, *(Output(topic, value, None, 0) for value in (b"1", large, b"3")))
    assert written(cluster, topic, 0) == [b"1", large, b"3"]
    async with transaction(bootstrap) as producer:
        with pytest.raises(MessageSizeTooLargeError, match="more than max_request_size, 100000"):
            await send_all(producer, [Output(topic, b"x" * LIMIT, None, 1)], BYTES, BYTES)
    assert written(cluster, topic, 1) == []


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (Output("", b"v", None, PARTITIONS), f"asks for partition {PARTITIONS} of .* has 3"),
        (Output("", b"v", None, -1), "asks for partition -1"),
    ],
)
async def test_invalid_output_is_refused_with_a_reason(
    bootstrap: str, topic: str, wrong: Output, reason: str
) -> None:
    output = Output(topic, wrong.value, wrong.key, wrong.partition)
    async with transaction(bootstrap) as producer:
        with pytest.raises(ValueError, match=reason):
            await send_all(producer, [Output(topic, b"first"), output], BYTES, BYTES)


async def test_first_batch_failure_is_raised_and_every_future_retrieved(
    bootstrap: str, cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """All batches are too large for the topic; no future may keep an exception unretrieved."""
    small = cluster.create_topic(unique("small"), 2, {"max.message.bytes": "5000"})
    outputs = [Output(small, b"x" * 9_000, None, n % 2) for n in range(10)]
    producer = await open_producer(bootstrap, unique("id"), 60_000, {"max_batch_size": 16 * 1024})
    try:
        await producer.begin_transaction()
        with pytest.raises(MessageSizeTooLargeError):
            await send_all(producer, outputs, BYTES, BYTES)
        await producer.abort_transaction()
    finally:
        await close_producer(producer)
    gc.collect()
    assert "never retrieved" not in caplog.text
    assert written(cluster, small, 0) == []
