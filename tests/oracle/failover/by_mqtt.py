"""The program with a sensor gateway that sends records over MQTT: see the package.

``MORE`` is the port of the MQTT broker. The test runs a bridge, which writes the published messages
to ``in-NAME``; librdkafka reads and copies them.
"""

from __future__ import annotations

import time
from itertools import count

from aiokafka.partitioner import murmur2

from tests.mqtt.publisher import Publisher
from tests.oracle.failover import program
from tests.oracle.failover.librdkafka import copy, read
from tests.oracle.failover.program import PARTITIONS, at, say

EXACTLY_ONCE = 2


def topic_of(partition: int) -> str:
    """Return an MQTT topic whose name as a record key hashes to ``partition``."""
    names = (f"sensor/{number}" for number in count())
    hashed = ((name, murmur2(name.encode()) & 0x7FFFFFFF) for name in names)
    return next(name for name, digest in hashed if digest % PARTITIONS == partition)


def write() -> None:
    topics = [topic_of(index) for index in range(PARTITIONS)]
    publisher = Publisher(int(program.MORE[0]), EXACTLY_ONCE, with_ids=False)
    while not program.STOP.exists():
        first = at["sent"]
        at["sent"] += PARTITIONS
        values = (b"%d" % (first + index) for index in range(PARTITIONS))
        publisher.publish(list(zip(topics, values, strict=True)), first)
        at["acknowledged"] = publisher.acknowledged
        time.sleep(0.06)
    say(f"SENT {at['sent']}")


if __name__ == "__main__":
    program.work(write, read, copy)
