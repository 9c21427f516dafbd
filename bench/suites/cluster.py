"""Three brokers: the cost of replication, and the lag of a follower. For failover see ``faults``.

The clusters are of Fencepost, of Apache Kafka, and of both.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import threading
import time
from collections.abc import Callable, Mapping

from confluent_kafka import Producer

from bench.brokers import CLUSTERS, Broker, Kafkas, Make, Members, Mixed, cpu_seconds, led_by_each
from bench.clients import VALUE, create_topic, fill, until
from bench.suite import DEFAULTS, Figures, Suite, Workload
from bench.suites.txn import ONE_RECORD, one_record

SETTINGS = {
    **DEFAULTS,
    "min.insync.replicas": "2",
    "offsets.topic.replication.factor": "3",
    "transaction.state.log.replication.factor": "3",
    "transaction.state.log.min.isr": "2",
}
"""The usual settings of a cluster of three, which tolerates the loss of one broker."""

RECORDS = 200_000
LAG_S, LOOK_S = 8.0, 0.1
"""How long records are produced, and how often the follower's lag is read."""

SETTLE_S, IDLE_S = 10.0, 30.0
"""The pause before an idle cluster is measured, and the length of the measurement."""

VICTIM = 2
"""A broker that is not the controller on either side."""

DEADLINE_S = 60.0


Nodes = Members | Kafkas | Mixed


def nodes(broker: Broker) -> Nodes:
    """Return the broker as a cluster. Raises TypeError for a single one."""
    if not isinstance(broker, Nodes):
        raise TypeError(f"{broker.name} is a single broker")
    return broker


def produce(partitions: int) -> Callable[[Broker], Figures]:
    """Measure records of 1 KiB, acks=all, on three replicas; MB/s of payload."""

    def run(broker: Broker) -> Figures:
        cluster = nodes(broker)
        assigned = cluster.assignment(partitions) if isinstance(cluster, Mixed) else None
        topic = create_topic(broker.bootstrap, partitions, replicas=3, assignment=assigned)
        fill(broker.bootstrap, topic, RECORDS // 10)  # warms a JVM up
        begin = cpu_seconds(cluster)
        seconds = fill(broker.bootstrap, topic, RECORDS)
        megabytes = RECORDS * len(VALUE) / 1e6
        spent = cpu_seconds(cluster) - begin
        return {
            "throughput (MB/s)": megabytes / seconds,
            "CPU time of the cluster per GB (ms)": spent / megabytes * 1e6,
        }

    return run


def produce_mixed(broker: Broker) -> Figures:
    """Do :func:`produce` with one partition and then with six, in one cluster."""
    return {
        f"produce to {count}, {figure}": value
        for partitions, count in ((1, "1 partition"), (6, "6 partitions"))
        for figure, value in produce(partitions)(broker).items()
    }


def follower(rate: float) -> Callable[[Broker], Figures]:
    """Measure how far a follower's file lags while its leader gets ``rate`` MB/s, acks=1."""

    def run(broker: Broker) -> Figures:
        cluster = nodes(broker)
        topic = create_topic(broker.bootstrap, 1, assignment=[[2, 3]])
        producer = Producer(
            {
                "bootstrap.servers": broker.bootstrap,
                "acks": 1,
                "linger.ms": 5,
                "batch.size": 1_000_000,
                "queue.buffering.max.messages": 2_000_000,
                "queue.buffering.max.kbytes": 400_000,
            }
        )
        sizes = [functools.partial(_stored, cluster, number, topic) for number in (2, 3)]
        lags: list[int] = []
        over = threading.Event()

        def look() -> None:
            while not over.wait(LOOK_S):
                behind, ahead = sizes[1](), sizes[0]()
                lags.append(ahead - behind)

        watch = threading.Thread(target=look)
        watch.start()
        sent, begin = 0, time.perf_counter()
        while (passed := time.perf_counter() - begin) < LAG_S:
            with contextlib.suppress(BufferError):
                for _ in range(min(5000, int(rate * 1e6 * passed / len(VALUE)) - sent)):
                    producer.produce(topic, VALUE)
                    sent += 1
            producer.poll(0.001)
        if producer.flush(DEADLINE_S):
            raise TimeoutError("records are not acknowledged")
        end = time.perf_counter()
        over.set()
        watch.join()
        until(lambda: sizes[1]() == sizes[0](), "the follower has all", DEADLINE_S)
        return {
            "produce throughput (MB/s)": sent * len(VALUE) / 1e6 / (end - begin),
            "median lag (MiB)": statistics.median(lags) / (1 << 20),
            "largest lag (MiB)": max(lags) / (1 << 20),
            "time from the last acknowledgement to equal logs (s)": time.perf_counter() - end,
        }

    return run


def _stored(cluster: Nodes, number: int, topic: str) -> int:
    """Return the bytes of records that a broker has of the topic's first partition."""
    folder = cluster.node(number).data_dir / f"{topic}-0"
    return sum(path.stat().st_size for path in folder.glob("*.log"))


def idle(broker: Broker) -> Figures:
    """Measure the processor time of an idle broker, and of all processes together."""
    cluster = nodes(broker)
    create_topic(broker.bootstrap, 12, replicas=3)
    time.sleep(SETTLE_S)
    victim = cluster.node(VICTIM)
    begin, of_one, of_all = time.perf_counter(), cpu_seconds(victim), cpu_seconds(cluster)
    time.sleep(IDLE_S)
    passed = time.perf_counter() - begin
    return {
        "CPU usage of one broker (% of a core)": (cpu_seconds(victim) - of_one) / passed * 100,
        "CPU usage of all processes (% of a core)": (cpu_seconds(cluster) - of_all) / passed * 100,
    }


def start(broker: Broker) -> Figures:
    """Stop all brokers in order, start them at once; measure until all acknowledge a record.

    After a kill, a start would wait for the end of the former session, 9 s for either product.
    """
    cluster = nodes(broker)
    topic = create_topic(broker.bootstrap, 1, replicas=3)
    fill(broker.bootstrap, topic, 1)
    for node in cluster.last_the_controller:
        if node.child is not None:
            node.child.terminate()
    begin = time.perf_counter()
    cluster.start()
    listening = time.perf_counter() - begin
    fill(broker.bootstrap, topic, 1)
    return {
        "time until all brokers listen (s)": listening,
        "time until all acknowledge a record (s)": time.perf_counter() - begin,
    }


def _workload(
    name: str, run: Callable[[Broker], Figures], sides: Mapping[str, Make] = CLUSTERS
) -> Workload:
    return Workload(name, run, SETTINGS, sides=sides, is_pinged=run is not idle, fresh=True)


CLUSTER = Suite(
    "cluster",
    "Three brokers on one machine, with three replicas, acks=all and min.insync.replicas=2 unless "
    "a row says otherwise. Fencepost's controller is a process of its own; Apache Kafka's "
    "controller is in its first broker. A mixed cluster has brokers of both products and Apache "
    "Kafka's controller in a process of its own; the brokers of the column's product lead all "
    "partitions.",
    (
        _workload("cluster of one product, produce to 1 partition", produce(1)),
        _workload("cluster of one product, produce to 6 partitions", produce(6)),
        _workload("cluster of 1 Kafka and 2 Fencepost brokers", produce_mixed, led_by_each("JPP")),
        _workload("cluster of 2 Kafka and 1 Fencepost brokers", produce_mixed, led_by_each("JJP")),
        _workload("follower of a leader that gets 150 MB/s, acks=1", follower(150)),
        _workload(ONE_RECORD.name, functools.partial(one_record, replicas=3)),
        _workload("idle cluster", idle),
        _workload("start of a cluster after a clean stop", start),
    ),
)
