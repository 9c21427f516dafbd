"""Every client reads the records that any of the clients has written."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import NamedTuple

import aiokafka
import confluent_kafka
import kafka
import pytest
from kafka.errors import MessageSizeTooLargeError

from tests.support.batches import batches
from tests.support.cluster import EARLIEST, LATEST, Cluster, unique
from tests.support.waits import until_async
from tests.wire.clients import (
    aio_consumer,
    aio_producer,
    confluent_consumer,
    confluent_producer,
    drain,
    kp_consumer,
    kp_producer,
)

NOW_MS = time.time_ns() // 1_000_000 - 60_000


class Sent(NamedTuple):
    key: bytes | None
    value: bytes | None
    timestamp_ms: int
    headers: tuple[tuple[str, bytes], ...]


RECORDS = (
    Sent(b"k1", b"plain", NOW_MS, ()),
    Sent(None, b"no key", NOW_MS + 5, (("trace", b"\x00\xff"),)),
    Sent(b"k2", None, NOW_MS + 1, (("a", b"1"), ("a", b"2"), ("\u00fc", b""))),
    Sent(b"", b"", NOW_MS + 9, ()),
    Sent(b"big", b"0123456789abcdef" * 4096, NOW_MS + 7, ()),
    Sent(b"\xf0\x9f\xa6\x94", "smörgåsbord 🦔".encode(), NOW_MS + 2, ()),
)


async def write_aiokafka(bootstrap: str, topic: str, codec: str, records: Sequence[Sent]) -> None:
    # With a linger time, aiokafka puts all records into one batch.
    async with aio_producer(
        bootstrap,
        compression_type=None if codec == "none" else codec,
        linger_ms=20,
        max_batch_size=1 << 20,
        acks="all",
    ) as producer:
        futures = [
            await producer.send(
                topic,
                r.value,
                r.key,
                partition=0,
                timestamp_ms=r.timestamp_ms,
                headers=list(r.headers),
            )
            for r in records
        ]
        for future in futures:
            await future


async def write_confluent(bootstrap: str, topic: str, codec: str, records: Sequence[Sent]) -> None:
    errors = []
    with confluent_producer(
        bootstrap, compression_type=codec, linger_ms=20, acks="all"
    ) as producer:
        for r in records:
            producer.produce(
                topic,
                r.value,
                r.key,
                partition=0,
                timestamp=r.timestamp_ms,
                headers=list(r.headers),
                on_delivery=lambda error, _: error and errors.append(error),
            )
    assert not errors


async def write_kafka_python(
    bootstrap: str, topic: str, codec: str, records: Sequence[Sent]
) -> None:
    with kp_producer(
        bootstrap, compression_type=None if codec == "none" else codec, linger_ms=20
    ) as producer:
        futures = [
            producer.send(
                topic,
                r.value,
                r.key,
                partition=0,
                timestamp_ms=r.timestamp_ms,
                headers=list(r.headers),
            )
            for r in records
        ]
        for future in futures:
            future.get(60)


async def read_aiokafka(bootstrap: str, topic: str, count: int) -> list[Sent]:
    got: list[Sent] = []
    async with aio_consumer(bootstrap) as consumer:
        consumer.assign([aiokafka.TopicPartition(topic, 0)])
        while len(got) < count:
            m = await consumer.getone()
            got.append(Sent(m.key, m.value, m.timestamp, tuple(m.headers)))
    return got


async def read_confluent(bootstrap: str, topic: str, count: int) -> list[Sent]:
    with confluent_consumer(bootstrap) as consumer:
        consumer.assign([confluent_kafka.TopicPartition(topic, 0, 0)])
        return [
            Sent(m.key(), m.value(), m.timestamp()[1], tuple(m.headers() or ()))
            for m in drain(consumer, count)
        ]


async def read_kafka_python(bootstrap: str, topic: str, count: int) -> list[Sent]:
    got: list[Sent] = []
    with kp_consumer(bootstrap, consumer_timeout_ms=10_000) as consumer:
        consumer.assign([kafka.TopicPartition(topic, 0)])
        for m in consumer:
            got.append(Sent(m.key, m.value, m.timestamp, tuple(m.headers)))
            if len(got) == count:
                break
    return got


WRITERS = {
    "aiokafka": write_aiokafka,
    "confluent": write_confluent,
    "kafka-python": write_kafka_python,
}
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
# kafka-python has snappy, lz4 and zstd only with packages that are not installed here.
PURE_PYTHON_CODECS = ("none", "gzip")


@pytest.mark.parametrize(
    ("writer", "codec"),
    [(w, c) for w in WRITERS for c in CODECS if w != "kafka-python" or c in PURE_PYTHON_CODECS],
)
async def test_every_client_reads_records_of_every_other_client(
    bootstrap: str, cluster: Cluster, writer: str, codec: str
) -> None:
    topic = cluster.create_topic(unique("roundtrip"))
    await WRITERS[writer](bootstrap, topic, codec, RECORDS)

    assert await read_aiokafka(bootstrap, topic, len(RECORDS)) == list(RECORDS)
    assert await read_confluent(bootstrap, topic, len(RECORDS)) == list(RECORDS)
    if codec in PURE_PYTHON_CODECS:
        assert await read_kafka_python(bootstrap, topic, len(RECORDS)) == list(RECORDS)


@pytest.mark.parametrize("codec", CODECS)
async def test_broker_recompresses_to_the_topics_compression_type(
    bootstrap: str, cluster: Cluster, codec: str
) -> None:
    setting = "uncompressed" if codec == "none" else codec
    topic = cluster.create_topic(unique("recompress"), configs={"compression.type": setting})
    await write_confluent(bootstrap, topic, "none" if codec != "none" else "gzip", RECORDS)

    assert await read_confluent(bootstrap, topic, len(RECORDS)) == list(RECORDS)
    stored = {b.attributes & 7 for b in batches(cluster.fetch(topic)["records"])}
    assert stored == {CODECS.index(codec)}


async def test_log_append_time_replaces_the_clients_timestamps(
    bootstrap: str, cluster: Cluster
) -> None:
    topic = cluster.create_topic(
        unique("append-time"), configs={"message.timestamp.type": "LogAppendTime"}
    )
    async with aio_producer(bootstrap) as producer:
        sent = await producer.send_and_wait(topic, b"v", timestamp_ms=NOW_MS)
    with confluent_consumer(bootstrap) as consumer:
        consumer.assign([confluent_kafka.TopicPartition(topic, 0, 0)])
        (message,) = drain(consumer, 1)
    kind, timestamp_ms = message.timestamp()
    assert kind == confluent_kafka.TIMESTAMP_LOG_APPEND_TIME
    assert timestamp_ms != NOW_MS
    assert sent.timestamp == timestamp_ms
    assert sent.timestamp_type == 1


async def test_list_offsets_by_timestamp_returns_the_first_later_record(
    bootstrap: str, cluster: Cluster
) -> None:
    topic = cluster.create_topic(unique("by-time"))
    for step in range(5):
        await write_aiokafka(
            bootstrap,
            topic,
            "none",
            [Sent(None, b"v", NOW_MS + step * 1000 + i, ()) for i in (0, 1)],
        )
    partition = aiokafka.TopicPartition(topic, 0)
    async with aio_consumer(bootstrap) as consumer:

        async def find(timestamp_ms: int) -> tuple[int, int] | None:
            found = (await consumer.offsets_for_times({partition: timestamp_ms}))[partition]
            return found and (found.offset, found.timestamp)

        assert await find(0) == (0, NOW_MS)
        assert await find(NOW_MS) == (0, NOW_MS)
        assert await find(NOW_MS + 1) == (1, NOW_MS + 1)
        assert await find(NOW_MS + 2) == (2, NOW_MS + 1000)
        assert await find(NOW_MS + 4001) == (9, NOW_MS + 4001)
        assert await find(NOW_MS + 4002) is None
        assert await consumer.beginning_offsets([partition]) == {partition: 0}
        assert await consumer.end_offsets([partition]) == {partition: 10}

    with kp_consumer(bootstrap) as consumer:
        asked = kafka.TopicPartition(topic, 0)
        found = consumer.offsets_for_times({asked: NOW_MS + 1500})[asked]
        assert (found.offset, found.timestamp) == (4, NOW_MS + 2000)

    answer = cluster.call(
        "list_offsets",
        7,
        replica_id=-1,
        topics=[
            {
                "name": topic,
                "partitions": [{"partition_index": 0, "timestamp": -3, "current_leader_epoch": -1}],
            }
        ],
    )
    assert answer["topics"][0]["partitions"][0]["offset"] == 9


async def test_seek_into_a_batch_returns_the_record_at_the_offset(
    bootstrap: str, cluster: Cluster
) -> None:
    topic = cluster.create_topic(unique("seek"))
    await write_confluent(
        bootstrap, topic, "lz4", [Sent(None, b"%d" % i, NOW_MS, ()) for i in range(100)]
    )
    partition = aiokafka.TopicPartition(topic, 0)
    async with aio_consumer(bootstrap) as consumer:
        consumer.assign([partition])
        for start in (57, 0, 99, 1):
            consumer.seek(partition, start)
            message = await consumer.getone()
            assert (message.offset, message.value) == (start, b"%d" % start)


async def test_record_larger_than_the_fetch_limit_is_still_delivered(
    bootstrap: str, cluster: Cluster
) -> None:
    topic = cluster.create_topic(unique("large"))
    value = bytes(700_000)
    await write_aiokafka(bootstrap, topic, "none", [Sent(None, value, NOW_MS, ())] * 2)
    async with aio_consumer(
        bootstrap, max_partition_fetch_bytes=1000, fetch_max_bytes=2000
    ) as consumer:
        consumer.assign([aiokafka.TopicPartition(topic, 0)])
        assert [len((await consumer.getone()).value) for _ in range(2)] == [len(value)] * 2


async def test_record_larger_than_max_message_bytes_is_refused(
    bootstrap: str, cluster: Cluster
) -> None:
    topic = cluster.create_topic(unique("too-large"), configs={"max.message.bytes": "1000"})
    with kp_producer(bootstrap, enable_idempotence=False) as producer:
        with pytest.raises(MessageSizeTooLargeError):
            producer.send(topic, bytes(2000), partition=0).get(60)
        assert producer.send(topic, bytes(500), partition=0).get(60).offset == 0
    assert cluster.offset(topic) == 1


@pytest.mark.parametrize("acks", [0, 1, "all"])
async def test_records_are_written_with_every_acks_setting(
    bootstrap: str, cluster: Cluster, acks: int | str
) -> None:
    topic = cluster.create_topic(unique("acks"))
    async with aio_producer(bootstrap, acks=acks) as producer:
        for i in range(20):
            await producer.send(topic, b"%d" % i, partition=0)
        await producer.flush()
    got = await read_aiokafka(bootstrap, topic, 20)
    assert [r.value for r in got] == [b"%d" % i for i in range(20)]


async def test_records_of_a_key_stay_in_one_partition_and_in_order(
    bootstrap: str, cluster: Cluster
) -> None:
    topic = cluster.create_topic(unique("keys"), 4)
    with confluent_producer(bootstrap) as producer:
        for i in range(400):
            producer.produce(topic, b"%d" % i, b"key-%d" % (i % 16))
    seen: dict[bytes, list[int]] = {}
    homes: dict[bytes, set[int]] = {}
    async with aio_consumer(bootstrap) as consumer:
        consumer.assign([aiokafka.TopicPartition(topic, p) for p in range(4)])
        for _ in range(400):
            m = await consumer.getone()
            seen.setdefault(m.key, []).append(int(m.value))
            homes.setdefault(m.key, set()).add(m.partition)
    assert len(seen) == 16
    assert all(order == sorted(order) and len(order) == 25 for order in seen.values())
    assert all(len(partitions) == 1 for partitions in homes.values())


async def test_waiting_fetch_is_completed_by_the_next_append(
    bootstrap: str, cluster: Cluster
) -> None:
    topic = cluster.create_topic(unique("long-poll"))
    with Cluster(bootstrap) as waiting:
        waiting.send(
            "fetch",
            11,
            replica_id=-1,
            max_wait=20_000,
            min_bytes=1,
            max_bytes=1 << 20,
            session_epoch=-1,
            topics=[
                {
                    "topic": topic,
                    "partitions": [
                        {
                            "partition": 0,
                            "fetch_offset": 0,
                            "partition_max_bytes": 1 << 20,
                            "current_leader_epoch": -1,
                        }
                    ],
                }
            ],
        )
        cluster.produce(topic, [b"wake"])
        # The connection's deadline is the fetch's maximum wait, so a response after the full wait
        # is too late.
        part = waiting.receive()["responses"][0]["partitions"][0]
    assert [b.values for b in batches(part["records"])] == [(b"wake",)]


async def test_consumer_without_offset_starts_at_its_reset_policy(
    bootstrap: str, cluster: Cluster
) -> None:
    topic = cluster.create_topic(unique("reset"))
    await write_confluent(bootstrap, topic, "none", RECORDS)
    assert cluster.offset(topic, at=EARLIEST) == 0
    assert cluster.offset(topic, at=LATEST) == len(RECORDS)
    async with aio_consumer(bootstrap, auto_offset_reset="latest") as consumer:
        partition = aiokafka.TopicPartition(topic, 0)
        consumer.assign([partition])
        assert await consumer.position(partition) == len(RECORDS)
        # An offset beyond the log end is out of range, so the reset policy moves the position to
        # the end.
        consumer.seek(partition, 1000)
        pending = asyncio.ensure_future(consumer.getone())

        async def is_reset() -> bool:
            return bool(await consumer.position(partition) == len(RECORDS))

        await until_async(is_reset, "reset to the end")
        await write_confluent(bootstrap, topic, "none", [Sent(None, b"next", NOW_MS, ())])
        message = await pending
        assert message.value == b"next"
