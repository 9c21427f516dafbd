"""The cost of exactly-once to a pipeline: the runner and plain aiokafka, on the same broker.

Both copy the same topic record by record, and are timed from the start of their clients to the last
commit, including the join. Plain aiokafka is at-least-once: there are no transactions, and offsets
are committed after each batch, which is as large as the runner's transactions.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import aiokafka

from bench.brokers import FENCEPOST, KAFKA, SIDES, Broker, cpu_seconds
from bench.suite import DEFAULTS, Figures, Pair, Suite
from examples.broker import create_topics, fresh, produce, read_topic
from fencepost.pipelines.batching import Limits
from fencepost.pipelines.exactly_once import ExactlyOnce, Options
from fencepost.pipelines.records import Batch, Output

RECORDS, VALUE = 200_000, b"x" * 100
ONCE, PLAIN = "once", "plain"
WARMING, RUNS = 1, 3
"""Runs of each side: first the warm-up runs, then the measured ones."""


async def exactly_once(bootstrap: str, source: str, target: str, size: int) -> float:
    """Copy ``source`` in transactions of ``size`` records; return the time of the last commit.

    The check after that, whether the source has more records, is not part of the copying.
    """
    group = fresh("group")
    committed: list[float] = []

    def copy(batch: Batch) -> list[Output]:
        return [Output(target, record.value, record.key) for record in batch]

    async with ExactlyOnce(
        bootstrap,
        group=group,
        topics=[source],
        handler=copy,
        transactional_id=group,
        options=Options(
            limits=Limits(max_records=size),
            after_commit=lambda _batch: committed.append(time.perf_counter()),
        ),
    ) as pipeline:
        await pipeline.run(to_end=True)
    return committed[-1]


async def at_least_once(bootstrap: str, source: str, target: str, size: int) -> float:
    """Copy with a commit after each ``size`` records; return the time of the last commit."""
    done, committed = 0, 0.0
    async with (
        aiokafka.AIOKafkaConsumer(
            source,
            bootstrap_servers=bootstrap,
            group_id=fresh("group"),
            auto_offset_reset="earliest",
            enable_auto_commit=False,
        ) as consumer,
        aiokafka.AIOKafkaProducer(
            bootstrap_servers=bootstrap, acks="all", linger_ms=5, max_batch_size=256 * 1024
        ) as producer,
    ):
        while done < RECORDS:
            for records in (await consumer.getmany(timeout_ms=200, max_records=size)).values():
                sent = [await producer.send(target, record.value, record.key) for record in records]
                await asyncio.gather(*sent)
                await consumer.commit()
                done += len(records)
                committed = time.perf_counter()
    return committed


async def copied(broker: Broker, side: str, source: str, size: int) -> Figures:
    """Copy once and count. Raises RuntimeError for a lost or duplicated record."""
    target = fresh(side)
    await create_topics(broker.bootstrap, (target, 1))
    copy = exactly_once if side == ONCE else at_least_once
    begin, own, brokers = time.perf_counter(), time.process_time(), cpu_seconds(broker)
    seconds = await copy(broker.bootstrap, source, target, size) - begin
    own, brokers = time.process_time() - own, cpu_seconds(broker) - brokers
    found = [record.key for record in await read_topic(broker.bootstrap, target)]
    if len(found) != RECORDS or len(set(found)) != RECORDS:
        raise RuntimeError(f"{len(found)} records, {len(set(found))} apart, of {RECORDS}")
    return {
        "throughput (records/s)": RECORDS / seconds,
        "CPU time of the client per million records (s)": own / RECORDS * 1e6,
        "CPU time of the broker per million records (s)": brokers / RECORDS * 1e6,
    }


def copying(size: int, on: str = FENCEPOST) -> Callable[[Path], Iterator[tuple[str, Figures]]]:
    """Run both ways in turn and in changing order, ``size`` records a transaction or a commit."""

    def run(home: Path) -> Iterator[tuple[str, Figures]]:
        broker = SIDES[on](home, DEFAULTS)
        broker.start()
        try:
            source = fresh("source")
            asyncio.run(fill(broker.bootstrap, source))
            for number in range(-WARMING, RUNS):
                for side in (ONCE, PLAIN) if number % 2 == 0 else (PLAIN, ONCE):
                    figures = asyncio.run(copied(broker, side, source, size))
                    if number >= 0:
                        yield side, figures
        finally:
            broker.kill()

    return run


async def fill(bootstrap: str, source: str) -> None:
    """Create a topic of one partition with :data:`RECORDS` records with different keys."""
    await create_topics(bootstrap, (source, 1))
    rows = [(b"%d" % number, VALUE, None) for number in range(RECORDS)]
    await produce(bootstrap, source, rows)


PIPELINES = Suite(
    "pipelines",
    f"Copying {RECORDS:,} records of 100 B from one topic to another: the exactly-once runner "
    "beside plain aiokafka, which is at-least-once, on the same broker.",
    (
        Pair("5,000 records per transaction", copying(5_000)),
        Pair("500 records per transaction", copying(500)),
        Pair("5,000 records per transaction, on Apache Kafka", copying(5_000, KAFKA)),
    ),
    sides={ONCE: "runner, exactly once", PLAIN: "plain aiokafka, at least once"},
)
