"""Move topics and a group's offsets in them to another broker, e.g. from Fencepost to Apache Kafka.

The copy holds only the committed records, so offsets differ; each group offset is translated to the
offset of the first record that the group has not seen. Then a worker of the group continues there.

``--bootstrap`` is the old broker, ``--to`` the new one; without an option a Fencepost is started.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Iterable

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from examples.broker import create_topics, fencepost, fresh, produce, read_topic
from fencepost.pipelines.batching import Limits
from fencepost.pipelines.exactly_once import ExactlyOnce, Options
from fencepost.pipelines.producers import read_committed
from fencepost.pipelines.records import Batch, Output

RECORDS, PARTITIONS = 5_000, 3


async def copy_partition(old: str, new: str, place: TopicPartition) -> list[int]:
    """Copy the committed records; return the old offset of each, in the order of the new log."""
    offsets: list[int] = []
    waiting = []
    async with AIOKafkaProducer(
        bootstrap_servers=new, enable_idempotence=True, linger_ms=10
    ) as producer:
        async for record in read_committed(old, place):
            offsets.append(record.offset)
            waiting.append(
                await producer.send(
                    place.topic,
                    record.value,
                    record.key,
                    partition=place.partition,
                    timestamp_ms=record.timestamp,
                    headers=list(record.headers),
                )
            )
        written = await asyncio.gather(*waiting)
    if [metadata.offset for metadata in written] != list(range(len(offsets))):
        raise RuntimeError(f"{place} was not empty, or somebody else writes to it")
    return offsets


async def move_group(
    old: str, new: str, group: str, moved: dict[TopicPartition, list[int]]
) -> dict[TopicPartition, int]:
    """Commit the group's translated offsets on the new broker, and return them."""
    translated: dict[TopicPartition, int] = {}
    async with AIOKafkaConsumer(
        bootstrap_servers=old, group_id=group, enable_auto_commit=False
    ) as there:
        there.assign(list(moved))
        for place, offsets in moved.items():
            committed = await there.committed(place)
            if committed is not None:
                translated[place] = sum(offset < committed for offset in offsets)
    async with AIOKafkaConsumer(
        bootstrap_servers=new, group_id=group, enable_auto_commit=False
    ) as here:
        here.assign(list(moved))
        await here.commit(translated)
    return translated


async def work(bootstrap: str, group: str, source: str, target: str, most: int | None) -> int:
    """Run the group's worker to the end, or until about ``most`` records are done."""

    def copy(batch: Batch) -> Iterable[Output]:
        if most is not None and pipeline.metrics.records_in + len(batch) >= most:
            pipeline.stop()
        return [Output(target, r.value, r.key, r.partition) for r in batch]

    async with ExactlyOnce(
        bootstrap,
        group=group,
        topics=[source],
        handler=copy,
        transactional_id=group,
        options=Options(limits=Limits(max_records=300)),
    ) as pipeline:
        await pipeline.run(to_end=True)
    return pipeline.metrics.records_in


async def example(old: str, new: str) -> str | None:
    """Work half-way on the old broker, move, and continue on the new one."""
    source, target, group = fresh("moving"), fresh("done"), fresh("mover")
    for broker in (old, new):
        await create_topics(broker, (source, PARTITIONS), (target, PARTITIONS))
    await produce(old, source, [(b"%d" % n, b"%d" % n, n + 1) for n in range(RECORDS)])
    done = await work(old, group, source, target, RECORDS // 2)
    moved: dict[TopicPartition, list[int]] = {}
    for topic in (source, target):
        for partition in range(PARTITIONS):
            place = TopicPartition(topic, partition)
            offsets = await copy_partition(old, new, place)
            if topic == source:
                moved[place] = offsets
    translated = await move_group(old, new, group, moved)
    rest = await work(new, group, source, target, None)
    print(f"{done} done before the move, {rest} after it; offsets {list(translated.values())}")
    seen = sorted(int(record.value) for record in await read_topic(new, target))
    if done + rest != RECORDS or not 0 < done < RECORDS:
        return f"{done} + {rest} is not {RECORDS}"
    return None if seen == list(range(RECORDS)) else "records were lost or doubled by the move"


async def main() -> int:
    """Start missing brokers, and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bootstrap")
    parser.add_argument("--to")
    arguments = parser.parse_args()
    async with contextlib.AsyncExitStack() as stack:
        old = arguments.bootstrap or await stack.enter_async_context(fencepost())
        new = arguments.to or await stack.enter_async_context(fencepost())
        complaint = await example(old, new)
    print(f"WRONG: {complaint}" if complaint else "checked: as it should be")
    return 1 if complaint else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
