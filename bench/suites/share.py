"""Share groups: records through one consumer and ten, and the time of an acknowledgement."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable

from confluent_kafka import ShareConsumer
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)

from bench.brokers import Broker, cpu_seconds
from bench.clients import create_topic, fill, until
from bench.suite import Figures, Suite, Workload
from tests.support import requests
from tests.support.cluster import GROUP, Cluster, unique
from tests.support.share import ACCEPT, Member, acquired, parts_of

PARTITIONS = 10
WARM, MEASURED = 100_000, 1_000_000
"""Records that all consumers together receive before and during the measurement."""
WARM_ACKS, ACKS = 2_000, 4_000
RECORD_LIMIT = 1
"""ShareAcquireMode: not more records than requested."""


def _starts_at_the_beginning(broker: Broker, group: str) -> None:
    entry = ConfigEntry(
        "share.auto.offset.reset", "earliest", incremental_operation=AlterConfigOpType.SET
    )
    resource = ConfigResource(ResourceType.GROUP, group, incremental_configs=[entry])
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    admin.incremental_alter_configs([resource])[resource].result(30)


def consuming(members: int) -> Callable[[Broker], Figures]:
    """Measure ``members`` share consumers that accept each record with their next poll."""

    def run(broker: Broker) -> Figures:
        topic, group = create_topic(broker.bootstrap, PARTITIONS), unique("bench")
        _starts_at_the_beginning(broker, group)
        fill(broker.bootstrap, topic, WARM + MEASURED)
        received = [0] * members
        times = [0.0, 0.0]
        ends = threading.Event()

        def consume(number: int) -> None:
            consumer = ShareConsumer({"bootstrap.servers": broker.bootstrap, "group.id": group})
            consumer.subscribe([topic])
            while not ends.is_set():
                received[number] += len(list(consumer.poll(0.1)))
            consumer.close()

        threads = [threading.Thread(target=consume, args=(number,)) for number in range(members)]
        for thread in threads:
            thread.start()
        try:
            until(lambda: sum(received) >= WARM, "the first records", 120)
            times[0], processor, first = time.perf_counter(), cpu_seconds(broker), sum(received)
            until(lambda: sum(received) >= WARM + MEASURED, "all records", 120)
            times[1], processor = time.perf_counter(), cpu_seconds(broker) - processor
        finally:
            ends.set()
            for thread in threads:
                thread.join()
        if sum(received) != WARM + MEASURED:
            raise RuntimeError(f"{sum(received)} records of {WARM + MEASURED}")
        count = WARM + MEASURED - first
        return {
            "throughput (records/s)": count / (times[1] - times[0]),
            "CPU time of the broker per record (µs)": processor / count * 1e6,
        }

    return run


def acknowledging(broker: Broker) -> Figures:
    """Measure ShareAcknowledge of one record at a time, by raw requests on one connection."""
    topic, group = create_topic(broker.bootstrap, 1), unique("bench")
    fill(broker.bootstrap, topic, WARM_ACKS + ACKS)
    with Cluster(broker.bootstrap) as cluster:
        cluster.coordinator(group, GROUP)
        alter = requests.alter_share_group_offsets(group, topic, {0: 0})

        def is_altered() -> bool:
            answer = cluster.call("alter_share_group_offsets", 0, **alter)
            return bool(answer["error_code"] == "none")

        until(is_altered, "the start offset", 30)
        topic_id, member = cluster.topic_id(topic), Member(cluster, group)
        samples: list[float] = []
        processor = 0.0
        while len(samples) < WARM_ACKS + ACKS:
            answer = member.fetch(
                {topic_id: {0: []}}, share_acquire_mode=RECORD_LIMIT, max_records=1, batch_size=1
            )
            part = parts_of(answer).get(0)
            if part is None or not acquired(part):
                continue
            ((first, last, _),) = acquired(part)
            if len(samples) == WARM_ACKS:
                processor = cpu_seconds(broker)
            begin = time.perf_counter()
            done = member.acknowledge({topic_id: {0: [(first, last, ACCEPT)]}})
            samples.append(time.perf_counter() - begin)
            if parts_of(done)[0]["error_code"] != "none":
                raise RuntimeError(str(done))
        processor = cpu_seconds(broker) - processor
    cuts = statistics.quantiles(samples[WARM_ACKS:], n=100)
    return {
        "median response time (ms)": cuts[49] * 1e3,
        "p99 response time (ms)": cuts[98] * 1e3,
        "CPU time of the broker, including the fetch of the record (µs)": processor / ACKS * 1e6,
    }


SHARE = Suite(
    "share",
    "Share consumers of confluent-kafka read records of 1 KiB in 10 partitions; the suite sends "
    "the acknowledgements of single records itself. Unmeasured before each workload: "
    f"{WARM:,} records or {WARM_ACKS:,} acknowledgements.",
    (
        Workload("1 share consumer", consuming(1)),
        Workload("10 share consumers", consuming(10)),
        Workload("acknowledgement of one record", acknowledging),
    ),
)
