"""Count words exactly once: running counts in a compacted topic, read back after a crash."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from aiokafka import TopicPartition

from examples.broker import create_topics, fresh, produce, read_topic, run
from fencepost.pipelines.batching import Limits
from fencepost.pipelines.exactly_once import ExactlyOnce, Options
from fencepost.pipelines.failures import RetryBatch
from fencepost.pipelines.producers import read_committed
from fencepost.pipelines.records import Batch, Output
from fencepost.pipelines.serde import JSON, TEXT

TEXT_FILE = Path(__file__).parent.parent / "LICENSE"


async def example(bootstrap: str) -> str | None:
    """Count the words of the licence; every third batch fails once."""
    lines, counts, group = fresh("lines"), fresh("counts"), fresh("counter")
    await create_topics(bootstrap, (lines, 1), (counts, 1))
    text = TEXT_FILE.read_text(encoding="utf-8").splitlines()
    await produce(
        bootstrap, lines, [(b"%d" % n, line.encode(), None) for n, line in enumerate(text)]
    )
    state: Counter[str] = Counter()
    calls = 0

    async def restore(_: frozenset[TopicPartition]) -> None:
        state.clear()
        async for record in read_committed(bootstrap, TopicPartition(counts, 0)):
            state[record.key.decode()] = JSON.load(record.value)

    def count(batch: Batch) -> list[Output]:
        nonlocal calls
        calls += 1
        changed = [word for record in batch for word in record.value.lower().split()]
        state.update(changed)
        if calls % 3 == 0:
            raise RetryBatch  # the state is wrong now; restore puts it right
        return [Output(counts, state[word], word.encode()) for word in dict.fromkeys(changed)]

    async with ExactlyOnce(
        bootstrap,
        group=group,
        topics=[lines],
        handler=count,
        transactional_id=group,
        options=Options(
            limits=Limits(max_records=40),
            value_serde=TEXT,
            output_value_serde=JSON,
            restore=restore,
        ),
    ) as pipeline:
        await pipeline.run(to_end=True)
    found = {r.key.decode(): JSON.load(r.value) for r in await read_topic(bootstrap, counts)}
    truth = Counter(word for line in text for word in line.lower().split())
    for word, times in truth.most_common(3):
        print(f"{word:>10} {times:>5} counted {found.get(word)}")
    return None if found == dict(truth) else "the counts differ from the file's"


if __name__ == "__main__":
    sys.exit(run(__doc__, example))
