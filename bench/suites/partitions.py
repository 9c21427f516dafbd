"""Two thousand partitions open at once."""

from __future__ import annotations

import time
from collections.abc import Mapping

from confluent_kafka import Consumer, TopicPartition

from bench.brokers import Broker, cpu_seconds, open_files, resident_mib
from bench.clients import Burst, create_topic, framed
from bench.suite import ALONE, Figures, Suite, Workload
from fencepost.logcore.batch import LogRecord, encode_batch
from tests.support.daemon import Daemon

PARTITIONS = 2_000
LIMIT_MIB = 512

BATCHES = 10
"""Batches of 1 KB in each partition: enough for both of its indexes to be in use."""

DEADLINE_S = 300.0
"""The time limit for a start or a stop: long, to get a figure even if it is bad."""


def many(broker: Broker) -> Figures:
    """Write to every partition; then measure a clean stop, a kill, and a start after each.

    Raises RuntimeError if the memory ever exceeds :data:`LIMIT_MIB`, and for a lost record.
    """
    if not isinstance(broker, Daemon):
        raise TypeError(f"{broker.name} is not measured here")
    rest, files = resident_mib(broker), open_files(broker)
    topic = create_topic(broker.bootstrap, PARTITIONS)
    write = _rounds(topic)
    burst = Burst(broker.bootstrap, 4)
    first = burst.run(_shares(write), deadline_s=DEADLINE_S)
    for _ in range(BATCHES - 1):
        burst.run(_shares(write), deadline_s=DEADLINE_S)
    burst.close()
    held, each = resident_mib(broker), open_files(broker) - files
    figures = {
        "memory after a write to each (MiB)": held,
        "memory per partition (KiB)": (held - rest) * 1024 / PARTITIONS,
        "open files per partition (files)": each / PARTITIONS,
        "time to write a first batch to each (s)": first,
    }
    broker.kill()
    figures |= _started(broker, "kill -9")
    begin = time.perf_counter()
    broker.stop(deadline_s=DEADLINE_S)
    figures["time of a clean stop (s)"] = time.perf_counter() - begin
    figures |= _started(broker, "a clean stop")
    _check(broker, topic)
    for name, value in figures.items():
        if name.endswith(" (MiB)") and value > LIMIT_MIB:
            raise RuntimeError(f"{name}: {value:.0f}; the limit is {LIMIT_MIB}")
    return figures


def _started(broker: Daemon, after: str) -> Figures:
    """Start; return the seconds until clients can connect, the processor time and the memory."""
    begin = time.perf_counter()
    broker.start(deadline_s=DEADLINE_S)
    return {
        f"time to start after {after} (s)": time.perf_counter() - begin,
        f"CPU time to start after {after} (s)": cpu_seconds(broker),
        f"memory after {after} and a start (MiB)": resident_mib(broker),
    }


def _rounds(topic: str) -> list[bytes]:
    """Return one Produce request per partition, with the present time because of retention."""
    now_ms = int(time.time() * 1000)
    records = bytes(encode_batch([LogRecord(0, now_ms, None, b"x" * 1000)]))
    return [
        framed("produce", 8, acks=-1, timeout=30_000, topic_data=[_data(topic, index, records)])
        for index in range(PARTITIONS)
    ]


def _data(topic: str, index: int, records: bytes) -> Mapping[str, object]:
    return {"name": topic, "partition_data": [{"index": index, "records": records}]}


def _shares(frames: list[bytes]) -> list[list[bytes]]:
    return [frames[place::4] for place in range(4)]


def _check(broker: Daemon, topic: str) -> None:
    """Raise RuntimeError if any partition lacks records."""
    consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": "bench"})
    try:
        for index in range(PARTITIONS):
            low, high = consumer.get_watermark_offsets(TopicPartition(topic, index), timeout=30)
            if (low, high) != (0, BATCHES):
                raise RuntimeError(f"partition {index} has offsets {low} to {high}")
    finally:
        consumer.close()


PARTITIONS_SUITE = Suite(
    "partitions",
    f"A topic of 2,000 partitions, all written to; more than {LIMIT_MIB} MiB would be an error.",
    (Workload("2,000 partitions", many, sides=ALONE, fresh=True),),
)
