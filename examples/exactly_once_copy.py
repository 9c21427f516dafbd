"""Copy a topic exactly once, with a worker that fails half-way and another that continues."""

from __future__ import annotations

import sys

from examples.broker import create_topics, fresh, produce, read_topic, run
from fencepost.pipelines.batching import Limits
from fencepost.pipelines.exactly_once import ExactlyOnce, Options
from fencepost.pipelines.failures import HandlerError
from fencepost.pipelines.records import Batch, Output

RECORDS, PARTITIONS = 10_000, 3


async def example(bootstrap: str) -> str | None:
    """Fill, copy with a crash on the way, compare."""
    source, target, group = fresh("orders"), fresh("copy"), fresh("copier")
    await create_topics(bootstrap, (source, PARTITIONS), (target, PARTITIONS))
    await produce(
        bootstrap, source, [(b"%d" % (n % 100), b"order %d" % n, n + 1) for n in range(RECORDS)]
    )
    crashed = False

    def copy(batch: Batch) -> list[Output]:
        nonlocal crashed
        if not crashed and any(record.offset > RECORDS // PARTITIONS // 2 for record in batch):
            crashed = True
            raise MemoryError("half-way")
        return [
            Output(target, r.value, r.key, r.partition, r.headers, r.timestamp_ms) for r in batch
        ]

    for attempt in (1, 2):
        async with ExactlyOnce(
            bootstrap,
            group=group,
            topics=[source],
            handler=copy,
            transactional_id=group,
            options=Options(limits=Limits(max_records=500)),
        ) as pipeline:
            try:
                await pipeline.run(to_end=True)
            except HandlerError as error:
                print(f"attempt {attempt} failed after {pipeline.metrics.records_in}: {error}")
            else:
                print(f"attempt {attempt} copied the remaining {pipeline.metrics.records_in}")
    before = [(r.key, r.value, r.timestamp) for r in await read_topic(bootstrap, source)]
    after = [(r.key, r.value, r.timestamp) for r in await read_topic(bootstrap, target)]
    if not crashed or len(after) != RECORDS:
        return f"{len(after)} of {RECORDS} records, crashed: {crashed}"
    return None if before == after else "the copy is not the original"


if __name__ == "__main__":
    sys.exit(run(__doc__, example))
