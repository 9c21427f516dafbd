"""What is measured: each workload takes a bootstrap address and returns its figures.

All of them use confluent-kafka (librdkafka), the fastest client there is for Python, so that the
client hides as little of the broker as possible.
"""

from __future__ import annotations

import statistics
import time
import uuid
from collections.abc import Callable

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

Figures = dict[str, float]

VALUE = bytes(range(256)) * 4
"""1 KiB of payload."""


def create_topic(bootstrap: str, partitions: int) -> str:
    """A new topic of ``partitions`` partitions, ready to be written."""
    name = f"bench-{uuid.uuid4().hex[:12]}"
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(name, partitions, 1)])[name].result(30)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        topic = admin.list_topics(name, timeout=5).topics[name]
        if len(topic.partitions) == partitions and all(
            partition.leader >= 0 for partition in topic.partitions.values()
        ):
            return name
    raise TimeoutError(name)


def _fill(bootstrap: str, topic: str, records: int) -> float:
    """Produce ``records`` of 1 KiB with acks=all; returns the seconds until all are acked."""
    failed: list[object] = []
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "acks": "all",
            "linger.ms": 5,
            "batch.size": 1_000_000,
            "queue.buffering.max.messages": 200_000,
        }
    )
    producer.list_topics(topic, timeout=10)
    begin = time.perf_counter()
    for _ in range(records):
        while True:
            try:
                producer.produce(
                    topic, VALUE, on_delivery=lambda error, _: error and failed.append(error)
                )
                break
            except BufferError:
                producer.poll(0.05)
    producer.flush(60)
    seconds = time.perf_counter() - begin
    if failed:
        raise RuntimeError(f"{len(failed)} records failed, the first with {failed[0]}")
    return seconds


def _drain(bootstrap: str, topic: str, partitions: int, records: int) -> float:
    """Read ``records`` from the beginning; returns the seconds from the first to the last."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": uuid.uuid4().hex,
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "fetch.max.bytes": 52_428_800,
            "max.partition.fetch.bytes": 10_485_760,
            "queued.min.messages": 1_000_000,
        }
    )
    consumer.assign([TopicPartition(topic, index, 0) for index in range(partitions)])
    got, begin = 0, 0.0
    try:
        while got < records:
            messages = consumer.consume(10_000, timeout=30)
            if not messages:
                raise TimeoutError(f"{got} of {records} records after 30 s")
            begin = begin or time.perf_counter()
            got += len(messages)
        return time.perf_counter() - begin
    finally:
        consumer.close()


def throughput(partitions: int) -> Callable[[str], Figures]:
    """Produce and consume 1 KiB records over ``partitions`` partitions, MB/s of payload."""

    def run(bootstrap: str) -> Figures:
        records = 300_000
        topic = create_topic(bootstrap, partitions)
        megabytes = records * len(VALUE) / 1e6
        written = _fill(bootstrap, topic, records)
        read = _drain(bootstrap, topic, partitions, records)
        return {"produce MB/s": megabytes / written, "consume MB/s": megabytes / read}

    return run


def one_record_transactions(bootstrap: str) -> Figures:
    """Transactions of one record, one after the other."""
    topic = create_topic(bootstrap, 1)
    producer = Producer({"bootstrap.servers": bootstrap, "transactional.id": topic, "linger.ms": 0})
    begin = time.perf_counter()
    producer.init_transactions(30)
    init = time.perf_counter() - begin
    samples: list[float] = []
    end = time.perf_counter() + 8
    while time.perf_counter() < end:
        begin = time.perf_counter()
        producer.begin_transaction()
        producer.produce(topic, VALUE)
        producer.commit_transaction(30)
        samples.append(time.perf_counter() - begin)
    samples = samples[len(samples) // 10 :]  # the first tenth warms up
    return {
        "transactions/s": len(samples) / sum(samples),
        "median ms": statistics.median(samples) * 1e3,
        "p99 ms": statistics.quantiles(samples, n=100)[98] * 1e3,
        "init_transactions ms": init * 1e3,
    }


def consume_transform_produce(size: int) -> Callable[[str], Figures]:
    """Consume, change, produce, send offsets: ``size`` records a transaction, for eight seconds."""

    def run(bootstrap: str) -> Figures:
        source, target = create_topic(bootstrap, 1), create_topic(bootstrap, 1)
        _fill(bootstrap, source, 200_000)
        consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": target,
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "isolation.level": "read_committed",
            }
        )
        consumer.subscribe([source])
        producer = Producer(
            {"bootstrap.servers": bootstrap, "transactional.id": target, "linger.ms": 0}
        )
        producer.init_transactions(30)
        done, begin, end = 0, 0.0, float("inf")
        while time.perf_counter() < end:
            messages = consumer.consume(size, timeout=10)
            if not begin:
                begin = time.perf_counter()
                end = begin + 8
            if not messages:
                break
            producer.begin_transaction()
            for message in messages:
                producer.produce(target, message.value()[::-1])
            producer.send_offsets_to_transaction(
                consumer.position(consumer.assignment()), consumer.consumer_group_metadata()
            )
            producer.commit_transaction(30)
            done += len(messages)
        seconds = time.perf_counter() - begin
        consumer.close()
        return {"records/s": done / seconds}

    return run


def offset_commits(bootstrap: str) -> Figures:
    """Synchronous offset commits, one after the other."""
    topic = create_topic(bootstrap, 1)
    _fill(bootstrap, topic, 1)
    consumer = Consumer(
        {"bootstrap.servers": bootstrap, "group.id": topic, "enable.auto.commit": False}
    )
    consumer.assign([TopicPartition(topic, 0, 0)])
    consumer.commit(offsets=[TopicPartition(topic, 0, 0)], asynchronous=False)
    begin, commits = time.perf_counter(), 0
    while time.perf_counter() < begin + 4:
        consumer.commit(offsets=[TopicPartition(topic, 0, commits % 2)], asynchronous=False)
        commits += 1
    seconds = time.perf_counter() - begin
    consumer.close()
    return {"commits/s": commits / seconds}


WORKLOADS: dict[str, Callable[[str], Figures]] = {
    "1 KiB records, 1 partition": throughput(1),
    "1 KiB records, 16 partitions": throughput(16),
    "one-record transactions": one_record_transactions,
    "consume-transform-produce, 100 records a transaction": consume_transform_produce(100),
    "offset commits": offset_commits,
}
