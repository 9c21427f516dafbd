"""Clients beside the cleaner: the effect of compaction on other clients."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Iterator

from bench.brokers import Broker, cpu_seconds
from bench.clients import Burst, framed
from bench.ping import PAUSE_S, ping
from bench.suite import DEFAULTS, Figures, Suite, Workload
from bench.suites.log import batch
from tests.support.cluster import Cluster, unique

KEYS, TIMES, EACH = 200_000, 4, 400
"""The number of keys, writes of each key, and records of 100 bytes in a batch."""

DONE_AT = 0.5
"""The share of the log that remains when a round has compacted most of it."""

DEADLINE_S = 300.0

_EAGER = {**DEFAULTS, "log.cleaner.backoff.ms": "100"}
_TOPIC = {"cleanup.policy": "compact", "segment.bytes": str(16 << 20)}


def beside(broker: Broker) -> Figures:
    """Ping from the moment when the cleaner may begin until half of the log is gone."""
    with Cluster(broker.bootstrap) as cluster:
        held_back = {**_TOPIC, "min.cleanable.dirty.ratio": "1.0"}
        topic = cluster.create_topic(unique("compacted"), 1, held_back)
        burst = Burst(broker.bootstrap, 1)
        burst.run([[_produce(topic, records) for records in _records()] * TIMES])
        burst.close()
        written = _size(cluster, topic)
        processor, begin = cpu_seconds(broker), time.perf_counter()
        change = {"name": "min.cleanable.dirty.ratio", "config_operation": 0, "value": "0.01"}
        resource = {"resource_type": 2, "resource_name": topic, "configs": [change]}
        cluster.call("incremental_alter_configs", 1, resources=[resource])
        waits = list(_waits(broker, cluster, topic, written))
        seconds = time.perf_counter() - begin
        processor = cpu_seconds(broker) - processor
    return {
        "median ping of another client (ms)": statistics.median(waits),
        "p99 ping of another client (ms)": statistics.quantiles(waits, n=100)[98],
        "time until half of the log is removed (s)": seconds,
        "CPU time of the broker until half of the log is removed (s)": processor,
    }


def _waits(broker: Broker, cluster: Cluster, topic: str, written: int) -> Iterator[float]:
    """Yield how long each ping waits, in milliseconds."""
    host, _, port = broker.bootstrap.rpartition(":")
    deadline = time.monotonic() + DEADLINE_S
    with socket.create_connection((host, int(port)), 60) as connected:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ping(connected)
        while _size(cluster, topic) > written * DONE_AT:
            for _ in range(50):
                yield ping(connected)
                time.sleep(PAUSE_S)
            if time.monotonic() > deadline:
                raise TimeoutError(f"not compacted within {DEADLINE_S} s")


def _size(cluster: Cluster, topic: str) -> int:
    asked = [{"topic": topic, "partitions": [0]}]
    told = cluster.call("describe_log_dirs", 1, topics=asked)["results"][0]
    return int(told["topics"][0]["partitions"][0]["partition_size"])


def _records() -> list[bytes]:
    return [batch(EACH, 80, first) for first in range(0, KEYS, EACH)]


def _produce(topic: str, records: bytes) -> bytes:
    data = {"name": topic, "partition_data": [{"index": 0, "records": records}]}
    return framed("produce", 8, acks=-1, timeout=30_000, topic_data=[data])


CLEANER = Suite(
    "cleaner",
    f"The log cleaner compacts {KEYS * TIMES:,} records of 100 bytes with {KEYS:,} keys, while "
    "another client sends pings.",
    (Workload("compaction of a log", beside, _EAGER, fresh=True),),
)
