"""Two thousand partitions open at once."""

from __future__ import annotations

import time

from bench.brokers import Broker, open_files, resident_mib
from bench.clients import Burst, create_topic, framed
from bench.suite import Figures, Suite, Workload
from tests.support.batches import batch

PARTITIONS = 2_000
LIMIT_MIB = 512


def many(broker: Broker) -> Figures:
    """Every partition written to, ten batches each; then a kill and a start with all of them.

    Raises RuntimeError above :data:`LIMIT_MIB`.
    """
    rest, files = resident_mib(broker), open_files(broker)
    topic = create_topic(broker.bootstrap, PARTITIONS)
    frames = [
        framed(
            "produce",
            8,
            acks=-1,
            timeout=30_000,
            topic_data=[
                {
                    "name": topic,
                    "partition_data": [{"index": index, "records": batch([b"x" * 1000])}],
                }
            ],
        )
        for _ in range(10)
        for index in range(PARTITIONS)
    ]
    burst = Burst(broker.bootstrap, 4)
    # Three syncs make a partition that is used for the first time survive power loss.
    burst.run([frames[place::4] for place in range(4)], deadline_s=400)
    burst.close()
    held = resident_mib(broker)
    if held > LIMIT_MIB:
        raise RuntimeError(f"{held:.0f} MiB; the limit is {LIMIT_MIB}")
    each = open_files(broker) - files
    broker.kill()
    begin = time.perf_counter()
    broker.start()
    return {
        "memory MiB": held,
        "memory a partition KiB": (held - rest) * 1024 / PARTITIONS,
        "open files a partition": each / PARTITIONS,
        "start after a kill s": time.perf_counter() - begin,
    }


PARTITIONS_SUITE = Suite(
    "partitions",
    f"A topic of 2,000 partitions, all written to; more than {LIMIT_MIB} MiB would be an error.",
    (Workload("2,000 partitions", many, on_kafka=False),),
)
