"""The data path with librdkafka and with Java's own performance tools."""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from confluent_kafka import Producer

from bench.apart import STAMP_BYTES, reader, stamp
from bench.brokers import Broker, cpu_seconds, resident_mib
from bench.clients import VALUE, create_topic, drain, fill
from bench.suite import Figures, Local, Suite, Workload
from tests.support.daemon import Daemon
from tests.support.kafka import Kafka, run_tool

RECORDS = 300_000
"""About 300 MB: some seconds on a slow machine, entirely in the page cache."""

PRODUCED, CONSUMED = "produce throughput (MB/s)", "consume throughput (MB/s)"
CPU_PRODUCED = "CPU time of the broker per GB produced (ms)"
CPU_CONSUMED = "CPU time of the broker per GB consumed (ms)"

WARM_S, LATENCY_S = 3, 6
"""Seconds of records at an even pace: to warm up both sides, and to measure."""


def starts_and_rest(broker: Broker) -> Figures:
    """Measure each kind of start, and the memory at rest after the second one.

    The three kinds of start have separate figures, because after a kill Apache Kafka's broker waits
    until the controller has expired the former process's session.
    """
    if not isinstance(broker, Daemon | Kafka) or broker.child is None:
        raise TypeError(f"{broker.name} is not one process with one directory")
    figures: Figures = {}

    def start(kind: str) -> None:
        begin = time.perf_counter()
        broker.start()
        figures[f"time to start, {kind} (ms)"] = (time.perf_counter() - begin) * 1e3

    broker.kill()
    shutil.rmtree(broker.data_dir)
    start("with an empty directory")
    broker.child.terminate()
    start("after a clean stop")
    figures["memory when idle (MiB)"] = resident_mib(broker)
    broker.kill()
    start("after kill -9")
    return figures


def librdkafka(partitions: int) -> Callable[[Broker], Figures]:
    """Produce and consume 1 KiB records over ``partitions`` partitions, MB/s of payload."""

    def run(broker: Broker) -> Figures:
        topic = create_topic(broker.bootstrap, partitions)
        megabytes = RECORDS * len(VALUE) / 1e6
        begin = cpu_seconds(broker)
        written = fill(broker.bootstrap, topic, RECORDS)
        middle = cpu_seconds(broker)
        read = drain(broker.bootstrap, topic, partitions, RECORDS)
        end = cpu_seconds(broker)
        return {
            PRODUCED: megabytes / written,
            CONSUMED: megabytes / read,
            CPU_PRODUCED: (middle - begin) / megabytes * 1e6,
            CPU_CONSUMED: (end - middle) / megabytes * 1e6,
        }

    return run


def end_to_end(rate: int) -> Callable[[Broker], Figures]:
    """Measure from ``produce`` (acks=all, 1 KiB) to a consumer, at ``rate`` records a second.

    The clock sets the pace: the producer does not wait for a broker that falls behind.
    """

    def run(broker: Broker) -> Figures:
        topic = create_topic(broker.bootstrap, 1)
        warm, count = WARM_S * rate, LATENCY_S * rate
        failed: list[object] = []
        producer = Producer(
            {"bootstrap.servers": broker.bootstrap, "acks": "all", "linger.ms": 0}
            | {"on_delivery": lambda error, _: error and failed.append(error)}
        )
        producer.list_topics(topic, timeout=10)
        with reader(broker.bootstrap, topic, warm, count) as delays:
            processor, begin = 0.0, time.perf_counter()
            for number in range(warm + count):
                if number == warm:
                    processor = cpu_seconds(broker)
                while (early := begin + number / rate - time.perf_counter()) > 0:
                    producer.poll(0)
                    time.sleep(early)
                producer.produce(topic, stamp() + VALUE[STAMP_BYTES:])
            producer.flush(60)
            if failed:
                raise RuntimeError(f"{len(failed)} records failed, the first with {failed[0]}")
            samples = delays()
            processor = cpu_seconds(broker) - processor
        return {
            "median latency (ms)": statistics.median(samples),
            "p99 latency (ms)": statistics.quantiles(samples, n=100)[98],
            "CPU time of the broker per record (µs)": processor / count * 1e6,
        }

    return run


def java(partitions: int) -> Callable[[Broker], Figures]:
    """Run ProducerPerformance and ConsumerPerformance with their defaults and larger batches."""

    def run(broker: Broker) -> Figures:
        topic = create_topic(broker.bootstrap, partitions)
        begin = cpu_seconds(broker)
        said = run_tool(
            "org.apache.kafka.tools.ProducerPerformance",
            *("--topic", topic, "--num-records", str(RECORDS), "--record-size", str(len(VALUE))),
            *("--throughput", "-1", "--bootstrap-server", broker.bootstrap),
            *("--command-property", "acks=all", "batch.size=262144", "linger.ms=5"),
        )
        middle = cpu_seconds(broker)
        produced = re.findall(r"\(([0-9.]+) MB/sec\)", said)[-1]
        said = run_tool(
            "org.apache.kafka.tools.ConsumerPerformance",
            *("--topic", topic, "--num-records", str(RECORDS), "--group", uuid.uuid4().hex),
            *("--bootstrap-server", broker.bootstrap, "--timeout", "30000"),
        )
        end = cpu_seconds(broker)
        header, row = (line for line in said.splitlines() if line.count(",") >= 9)
        names = [name.strip() for name in header.split(",")]
        consumed = row.split(",")[names.index("fetch.MB.sec")]
        mebi = (1 << 20) / 1e6  # the tools count 1,048,576 bytes
        gigabytes = RECORDS * len(VALUE) / 1e9
        return {
            PRODUCED: float(produced) * mebi,
            CONSUMED: float(consumed) * mebi,
            CPU_PRODUCED: (middle - begin) / gigabytes * 1e3,
            CPU_CONSUMED: (end - middle) / gigabytes * 1e3,
        }

    return run


TESTS = 200
TEST_FILE = f"""
import pytest


@pytest.mark.parametrize("number", range({TESTS}))
def test_orders_are_read(kafka, number):
    orders = kafka.topic("orders", partitions=3)
    kafka.produce(orders, b"tea", ("alice", b"coffee"))
    assert {{record.value for record in kafka.records(orders)}} == {{b"tea", b"coffee"}}
"""
"""Each test has a broker, creates a topic, writes two records and reads them."""


def tests_with_the_fixture(home: Path) -> Figures:
    """Measure a pytest of :data:`TEST_FILE`, with only our plugin: from the command to its end."""
    (home / "test_orders.py").write_text(TEST_FILE, encoding="utf-8")
    command = (sys.executable, "-m", "pytest", "-q", "-p", "fencepost.testing.plugin", str(home))
    begin = time.perf_counter()
    ran = subprocess.run(
        command,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        cwd=home,
        capture_output=True,
        text=True,
        check=True,
    )
    seconds = time.perf_counter() - begin
    if f"{TESTS} passed" not in ran.stdout:
        raise RuntimeError(ran.stdout)
    return {f"time of {TESTS} tests (s)": seconds}


IMPORTS = 15


def asyncio_import(_home: Path) -> Figures:
    """Measure ``import asyncio`` in a new process, to which a start may be compared."""
    samples = []
    for _ in range(IMPORTS):
        begin = time.perf_counter()
        subprocess.run((sys.executable, "-c", "import asyncio"), check=True)
        samples.append(time.perf_counter() - begin)
    return {"median run time (ms)": statistics.median(samples) * 1e3}


START = Suite(
    "start",
    "The time from the command until the broker serves, and the broker's memory when it is idle. "
    "A start with an empty directory also formats the storage. Each of the tests has its own "
    "broker from the fixture `kafka`, creates a topic, writes two records and reads them.",
    (
        Workload("broker without topics", starts_and_rest, fresh=True),
        Local("process that only imports asyncio", asyncio_import),
        Local("pytest with the fixture kafka", tests_with_the_fixture),
    ),
)

LIBRDKAFKA_16 = Workload("librdkafka, 16 partitions", librdkafka(16))
LATENCY_AT_1000 = Workload(
    "producer to consumer, 1,000 records/s", end_to_end(1_000), is_pinged=False
)

DATA = Suite(
    "data",
    "confluent-kafka with acks=all, 300,000 records of 1 KiB; the throughput counts the values of "
    "the records. A latency is the time from `produce`, with `linger.ms=0` and one partition, "
    "until a consumer in another process has the record.",
    (
        Workload("librdkafka, 1 partition", librdkafka(1)),
        LIBRDKAFKA_16,
        LATENCY_AT_1000,
        Workload("producer to consumer, 10,000 records/s", end_to_end(10_000), is_pinged=False),
    ),
)

JAVA = Suite(
    "java",
    "Apache Kafka's ProducerPerformance (acks=all) and ConsumerPerformance, 300,000 records of 1 "
    "KiB. The JVM of the client warms up within the run and shares the machine with the broker.",
    (
        Workload("Java client, 1 partition", java(1)),
        Workload("Java client, 16 partitions", java(16)),
    ),
)
