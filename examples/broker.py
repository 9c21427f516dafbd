"""Common parts of the examples: a broker, topics, and reading a topic to its end."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import tempfile
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRecord, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from examples.processes import Daemon
from fencepost.pipelines.producers import read_committed

GATHERED = 10_000
"""The number of records to send before waiting for all of their acknowledgements."""


def fresh(stem: str) -> str:
    """Return a name that no earlier run has used."""
    return f"{stem}-{uuid.uuid4().hex[:8]}"


@contextlib.asynccontextmanager
async def fencepost(settings: Sequence[str] = ()) -> AsyncIterator[str]:
    """Run ``fencepost serve`` on a free port with an empty directory; yields its address."""
    with tempfile.TemporaryDirectory(prefix="fencepost-example-") as home:
        daemon = Daemon(Path(home), settings)
        with daemon.port:
            try:
                await daemon.start()
                yield daemon.bootstrap
            finally:
                await daemon.stop()


KEEP = {"retention.ms": "-1"}
"""Settings for topics whose records may be older than a broker's default retention."""


async def create_topics(
    bootstrap: str, *topics: tuple[str, int], configs: Mapping[str, str] = KEEP
) -> None:
    """Create topics, each given as (name, partitions)."""
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        await admin.create_topics(
            [NewTopic(name, count, 1, topic_configs=dict(configs)) for name, count in topics]
        )
    finally:
        await admin.close()


async def produce(
    bootstrap: str,
    topic: str,
    records: Iterable[tuple[bytes, bytes, int | None]],
    told: Callable[[int], object] = lambda _: None,
) -> None:
    """Write records, (key, value, timestamp in ms or None), and wait until all are acknowledged.

    ``told`` is called from time to time with the number of written records.
    """
    waiting: list[asyncio.Future[object]] = []
    async with AIOKafkaProducer(
        bootstrap_servers=bootstrap, enable_idempotence=True, linger_ms=10, max_batch_size=1 << 18
    ) as producer:
        for sent, (key, value, timestamp) in enumerate(records, 1):
            waiting.append(await producer.send(topic, value, key, timestamp_ms=timestamp))
            if len(waiting) == GATHERED:
                await asyncio.gather(*waiting)
                waiting.clear()
                told(sent)
        await asyncio.gather(*waiting)


async def everything(
    bootstrap: str, topic: str, isolation_level: str
) -> AsyncIterator[ConsumerRecord]:
    """Yield all records that a consumer gets from a topic, from its start to its current end."""
    async with AIOKafkaConsumer(
        topic,
        bootstrap_servers=bootstrap,
        isolation_level=isolation_level,
        auto_offset_reset="earliest",
        enable_auto_commit=False,
        max_partition_fetch_bytes=1 << 22,
    ) as consumer:
        waiting = set(consumer.assignment())
        ends = await consumer.end_offsets(sorted(waiting))
        while waiting:
            for source, records in (await consumer.getmany(timeout_ms=200)).items():
                for record in records:
                    if record.offset < ends[source]:
                        yield record
            for source in tuple(waiting):
                if await consumer.position(source) >= ends[source]:
                    waiting.discard(source)


async def read_topic(bootstrap: str, topic: str) -> list[ConsumerRecord]:
    """Return every committed record, one partition after the other."""
    async with AIOKafkaConsumer(topic, bootstrap_servers=bootstrap) as consumer:
        partitions = sorted(consumer.partitions_for_topic(topic) or ())
    return [
        record
        for partition in partitions
        async for record in read_committed(bootstrap, TopicPartition(topic, partition))
    ]


def run(
    doc: str | None,
    example: Callable[[str], Awaitable[str | None]],
    settings: Sequence[str] = (),
) -> int:
    """Run an example from the command line; the exit status is 0 if its check holds.

    The example gets a bootstrap address, and returns a complaint, or None if all is well. If the
    command starts a broker for it, the broker has ``settings``, each KEY=VALUE.
    """
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--bootstrap", help="a running broker; without it one is started")
    address = parser.parse_args().bootstrap

    async def main() -> str | None:
        if address:
            return await example(address)
        async with fencepost(settings) as started:
            return await example(started)

    complaint = asyncio.run(main())
    print(f"WRONG: {complaint}" if complaint else "checked: as it should be")
    return 1 if complaint else 0
