"""Transactions: one record each, consume-transform-produce, and many ids at once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from confluent_kafka import Consumer

from bench.apart import init_ms, transactional
from bench.brokers import FENCEPOST, Broker, cpu_seconds, resident_mib
from bench.clients import (
    VALUE,
    Burst,
    create_topic,
    expect_no_error,
    fill,
    framed,
    until,
)
from bench.suite import ALONE, DEFAULTS, Figures, Suite, Workload
from tests.support import requests
from tests.support.batches import batch
from tests.support.cluster import TRANSACTION, Cluster, unique

SECONDS = 8.0
"""How long a workload without an end of its own runs."""

FRESH = 20
"""The number of new clients, one after the other."""

PREPARED = 1_000

IDS = 10_000
TIMEOUT_MS = 600_000
"""The timeout of the open transactions: longer than the measurement."""


def _latencies(seconds: list[float]) -> Figures:
    return {
        "median duration (ms)": statistics.median(seconds) * 1e3,
        "p99 duration (ms)": statistics.quantiles(seconds, n=100)[98] * 1e3,
    }


def one_record(broker: Broker, *, replicas: int = 1) -> Figures:
    """Measure transactions of one record, one after the other."""
    topic = create_topic(broker.bootstrap, 1, replicas=replicas)
    producer = transactional(broker.bootstrap, topic)
    producer.init_transactions(30)
    samples: list[float] = []
    processor, end = cpu_seconds(broker), time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        begin = time.perf_counter()
        producer.begin_transaction()
        producer.produce(topic, VALUE)
        producer.commit_transaction(30)
        samples.append(time.perf_counter() - begin)
    processor = (cpu_seconds(broker) - processor) / len(samples)
    samples = samples[len(samples) // 10 :]  # the first tenth warms up
    return {
        "rate (transactions/s)": len(samples) / sum(samples),
        **_latencies(samples),
        "CPU time of the broker per transaction (µs)": processor * 1e6,
    }


def init(broker: Broker, *, to_all: bool = False) -> Figures:
    """Measure ``init_transactions`` of new ids in new processes, the first on an unused broker."""
    bootstrap = broker.bootstrap
    samples = [init_ms(bootstrap, f"bench-{number}", to_all=to_all) for number in range(FRESH)]
    ordered = sorted(samples)
    quantiles = {
        f"{name} (ms)": ordered[round((FRESH - 1) * share / 100)]
        for share, name in (
            (0, f"shortest of the {FRESH} times"),
            (25, f"25th percentile of the {FRESH} times"),
            (50, f"median of the {FRESH} times"),
            (75, f"75th percentile of the {FRESH} times"),
            (100, f"longest of the {FRESH} times"),
        )
    }
    return {"time of the first client (ms)": samples[0], **quantiles}


def init_to_all(broker: Broker) -> Figures:
    """Do :func:`init` with clients that connect to every broker at once."""
    return init(broker, to_all=True)


def consume_transform_produce(size: int) -> Callable[[Broker], Figures]:
    """Measure consume-transform-produce with offsets, ``size`` records a transaction."""

    def run(broker: Broker) -> Figures:
        bootstrap = broker.bootstrap
        source, target = create_topic(bootstrap, 1), create_topic(bootstrap, 1)
        fill(bootstrap, source, 400_000)
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
        producer = transactional(bootstrap, target)
        producer.init_transactions(30)
        messages = consumer.consume(1, timeout=30)
        if not messages:
            raise TimeoutError("no record after 30 s")
        spent = dict.fromkeys(("consume", "produce", "send the offsets", "commit"), 0.0)
        done = transactions = 0
        processor = cpu_seconds(broker)
        begin = end = time.perf_counter()
        while end < begin + SECONDS:
            messages = consumer.consume(size, timeout=2)
            if not messages:
                break  # all records are read, and waiting for more does not count
            now = _lap(spent, "consume", end)
            producer.begin_transaction()
            for message in messages:
                producer.produce(target, message.value()[::-1])
            now = _lap(spent, "produce", now)
            producer.send_offsets_to_transaction(
                consumer.position(consumer.assignment()), consumer.consumer_group_metadata()
            )
            now = _lap(spent, "send the offsets", now)
            producer.commit_transaction(30)
            end = _lap(spent, "commit", now)
            done += len(messages)
            transactions += 1
        seconds = end - begin
        processor = cpu_seconds(broker) - processor
        consumer.close()
        return {
            "throughput (records/s)": done / seconds,
            "CPU time of the broker per transaction (ms)": processor / transactions * 1e3,
        } | {
            f"client's time to {phase}, per transaction (ms)": seconds / transactions * 1e3
            for phase, seconds in spent.items()
        }

    return run


def _lap(spent: dict[str, float], phase: str, since: float) -> float:
    now = time.perf_counter()
    spent[phase] += now - since
    return now


def two_phase(broker: Broker) -> Figures:
    """Measure transactions of one record that a successor finds prepared and commits (KIP-939).

    Raw requests on one connection: the owner's InitProducerId and Produce, and then the successor's
    InitProducerId with KeepPreparedTxn and its EndTxn, of which the time counts.
    """
    topic, name = create_topic(broker.bootstrap, 1), unique("bench")
    samples: list[float] = []
    with Cluster(broker.bootstrap) as cluster:
        cluster.coordinator(name, TRANSACTION)

        def claim(*, keep: bool) -> tuple[int, int]:
            asked = requests.init_producer_id(name, enable2_pc=True, keep_prepared_txn=keep)
            answer = cluster.ask("init_producer_id", 6, asked)
            expect_no_error(answer)
            return answer["producer_id"], answer["producer_epoch"]

        for _ in range(PREPARED):
            owner = claim(keep=False)
            data = batch(
                [VALUE],
                producer_id=owner[0],
                producer_epoch=owner[1],
                sequence=0,
                transactional=True,
            )
            expect_no_error(cluster.produce(topic, data, version=12, transactional_id=name))
            begin = time.perf_counter()
            successor = claim(keep=True)
            expect_no_error(cluster.ask("end_txn", 5, requests.end_txn(name, successor)))
            samples.append(time.perf_counter() - begin)
        if cluster.lso(topic) != 2 * PREPARED:
            raise RuntimeError(f"last stable offset {cluster.lso(topic)} after {PREPARED} commits")
    samples = samples[len(samples) // 10 :]  # the first tenth warms up
    return _latencies(samples)


def open_ids(broker: Broker) -> Figures:
    """Measure 10,000 ids with an open transaction each, and a start with them after kill -9."""
    topic = create_topic(broker.bootstrap, 1)
    with Cluster(broker.bootstrap) as cluster:
        cluster.coordinator("bench-0", TRANSACTION)
        rest = resident_mib(broker)
        burst = Burst(broker.bootstrap, 8)
        made = added = 0.0
        known: dict[str, int] = {}
        for _ in range(20):  # requests refused by a coordinator that loads are sent again
            missing = {f"bench-{number}" for number in range(IDS)} - known.keys()
            made += _each(burst, [_init_frame(name) for name in sorted(missing)])
            known = _listed(cluster)
            if len(known) == IDS:
                break
        for _ in range(20):
            waiting = known.keys() - _listed(cluster, ongoing=True).keys()
            if not waiting:
                break
            added += _each(burst, [_add_frame(name, known[name], topic) for name in waiting])
        burst.close()
        until(lambda: len(_listed(cluster, ongoing=True)) == IDS, "every transaction is open")
        grown = resident_mib(broker) - rest
    broker.kill()
    begin = time.perf_counter()
    broker.start()
    with Cluster(broker.bootstrap) as cluster:
        until(lambda: len(_listed(cluster, ongoing=True)) == IDS, "all are open again")
        recovered = time.perf_counter() - begin
    figures = {
        "rate of InitProducerId (requests/s)": IDS / made,
        "rate of AddPartitionsToTxn (requests/s)": IDS / added,
        "time from the restart after kill -9 until all are listed (s)": recovered,
    }
    if broker.name == FENCEPOST:
        figures["memory (MiB)"] = grown
    return figures


def _each(burst: Burst, frames: list[bytes]) -> float:
    return burst.run([frames[place::8] for place in range(8)])


def _init_frame(name: str) -> bytes:
    return framed(
        "init_producer_id",
        4,
        transactional_id=name,
        transaction_timeout=TIMEOUT_MS,
        producer_id=-1,
        producer_epoch=-1,
    )


def _add_frame(name: str, producer_id: int, topic: str) -> bytes:
    return framed(
        "add_partitions_to_txn",
        3,
        v3_and_below_transactional_id=name,
        v3_and_below_producer_id=producer_id,
        v3_and_below_producer_epoch=0,
        v3_and_below_topics=[{"name": topic, "partitions": [0]}],
    )


def _listed(cluster: Cluster, *, ongoing: bool = False) -> dict[str, int]:
    """Return producer ids by transactional id, of all or of ids with an open transaction."""
    listed = cluster.call("list_transactions", 0)["transaction_states"]
    return {
        transaction["transactional_id"]: transaction["producer_id"]
        for transaction in listed
        if not ongoing or transaction["transaction_state"] == "Ongoing"
    }


TWO_PHASE = {**DEFAULTS, "transaction.two.phase.commit.enable": "true"}
"""Apache Kafka 4.4 refuses KeepPreparedTxn, so the two-phase commits have no figures of it."""


def _pipeline(records: str, size: int) -> Workload:
    return Workload(
        f"consume-transform-produce, {records} per transaction", consume_transform_produce(size)
    )


ONE_RECORD = Workload("transactions of one record", one_record)
PIPELINE_OF_100 = _pipeline("100 records", 100)

TXN = Suite(
    "txn",
    "Transactions with confluent-kafka, one after the other; a record has 1 KiB. The two-phase "
    "commits and the open transactions are made by requests that the suite sends directly.",
    (
        ONE_RECORD,
        Workload(f"init_transactions of {FRESH} clients", init, is_pinged=False, fresh=True),
        Workload(
            f"init_transactions of {FRESH} clients, enable.sparse.connections=false",
            init_to_all,
            is_pinged=False,
            fresh=True,
        ),
        _pipeline("1 record", 1),
        PIPELINE_OF_100,
        _pipeline("10,000 records", 10_000),
        Workload("commit of a prepared transaction", two_phase, TWO_PHASE, sides=ALONE, fresh=True),
        Workload("10,000 open transactions", open_ids, fresh=True),
    ),
)
