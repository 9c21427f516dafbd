"""A user's pipeline: ``fill``, ``copy`` (exactly once, to the end of the input) and ``verify``.

The folder ``groups`` beside this file belongs to the user.
"""

from __future__ import annotations

import asyncio
import os
import sys

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

import groups
from fencepost.pipelines import ExactlyOnce
from fencepost.pipelines.records import Batch, Output

BOOTSTRAP = os.environ["FENCEPOST_BOOTSTRAP"]
WORDS = [b"%d" % number for number in range(60)]
INPUT, OUTPUT = TopicPartition("words", 0), TopicPartition("loud", 0)


async def fill() -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=BOOTSTRAP)
    await admin.start()
    await admin.create_topics([NewTopic(topic.topic, 1, 1) for topic in (INPUT, OUTPUT)])
    await admin.close()
    async with AIOKafkaProducer(bootstrap_servers=BOOTSTRAP) as producer:
        for word in WORDS:
            await producer.send_and_wait(INPUT.topic, word)


def shout(batch: Batch) -> list[Output]:
    assert groups.OWNER == "the user"
    return [Output(OUTPUT.topic, bytes(record.value) + b"!") for record in batch]


async def copy() -> None:
    async with ExactlyOnce(
        BOOTSTRAP,
        group="shouters",
        topics=[INPUT.topic],
        handler=shout,
        transactional_id="shouter-1",
    ) as pipeline:
        await pipeline.run(to_end=True)


async def verify() -> None:
    read = []
    async with AIOKafkaConsumer(
        bootstrap_servers=BOOTSTRAP, isolation_level="read_committed"
    ) as consumer:
        consumer.assign([OUTPUT])
        await consumer.seek_to_beginning(OUTPUT)
        end = (await consumer.end_offsets([OUTPUT]))[OUTPUT]
        while await consumer.position(OUTPUT) < end:
            for records in (await consumer.getmany(timeout_ms=100)).values():
                read += [record.value for record in records]
    assert read == [word + b"!" for word in WORDS], read


if __name__ == "__main__":
    asyncio.run({"fill": fill, "copy": copy, "verify": verify}[sys.argv[1]]())
