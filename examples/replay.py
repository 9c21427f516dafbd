"""Replay from a point in time: a group is reset by timestamp, and continues from there."""

from __future__ import annotations

import sys

from aiokafka import AIOKafkaConsumer, TopicPartition

from examples.broker import create_topics, fresh, produce, read_topic, run
from fencepost.pipelines.exactly_once import ExactlyOnce
from fencepost.pipelines.records import Batch, Output

HOUR_MS, BEGIN_MS = 3_600_000, 1_357_016_400_000  # 1 January 2013, 5:00 UTC
HOURS, PARTITIONS = 240, 2


async def example(bootstrap: str) -> str | None:
    """Process ten days, reset the group to the seventh, process again."""
    source, target, group = fresh("hours"), fresh("seen"), fresh("replayer")
    await create_topics(bootstrap, (source, PARTITIONS), (target, 1))
    await produce(
        bootstrap,
        source,
        [(b"%d" % hour, b"%d" % hour, BEGIN_MS + hour * HOUR_MS) for hour in range(HOURS)],
    )

    def note(batch: Batch) -> list[Output]:
        return [Output(target, record.value, record.key) for record in batch]

    async def process() -> int:
        async with ExactlyOnce(
            bootstrap, group=group, topics=[source], handler=note, transactional_id=group
        ) as pipeline:
            await pipeline.run(to_end=True)
        return pipeline.metrics.records_in

    first = await process()
    since = 6 * 24
    async with AIOKafkaConsumer(
        bootstrap_servers=bootstrap, group_id=group, enable_auto_commit=False
    ) as consumer:
        places = [TopicPartition(source, partition) for partition in range(PARTITIONS)]
        consumer.assign(places)
        ends = await consumer.end_offsets(places)
        found = await consumer.offsets_for_times(dict.fromkeys(places, BEGIN_MS + since * HOUR_MS))
        await consumer.commit(
            {place: at.offset if (at := found[place]) else ends[place] for place in places}
        )
    again = await process()
    print(f"{first} at first, {again} again from the seventh day on")
    seen = sorted(int(record.value) for record in await read_topic(bootstrap, target))
    wanted = sorted([*range(HOURS), *range(since, HOURS)])
    return None if seen == wanted else "not exactly the hours since then were replayed"


if __name__ == "__main__":
    sys.exit(run(__doc__, example))
