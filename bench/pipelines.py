"""What exactly-once costs a pipeline, and how fast MQTT messages become Kafka records.

Run by itself, ``python -m bench.pipelines``: figures of the same daemon in one run. The runner
copies a topic exactly once; plain aiokafka copies it at least once (no transaction, offsets
committed after each batch of the same size). Both are timed from the start of their clients to the
last commit, joining the group included.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator

import aiokafka
import paho.mqtt.client as paho

from examples.broker import create_topics, fencepost, fresh, produce
from examples.mqtt_broker import mqtt_broker
from pipelines.batching import Limits
from pipelines.exactly_once import ExactlyOnce, Options
from pipelines.mqtt.bridge import Bridge
from pipelines.mqtt.routes import Mapped, Route
from pipelines.mqtt.session import Address
from pipelines.records import Batch, Output

RECORDS, VALUE, BATCH = 50_000, b"x" * 100, 5_000
MESSAGES = 5_000

Figures = dict[str, float]


async def exactly_once(bootstrap: str, source: str) -> float:
    """Records per second of the runner."""
    target, group = fresh("once"), fresh("group")
    await create_topics(bootstrap, (target, 1))

    def copy(batch: Batch) -> list[Output]:
        return [Output(target, record.value, record.key) for record in batch]

    begin = time.perf_counter()
    async with ExactlyOnce(
        bootstrap,
        group=group,
        topics=[source],
        handler=copy,
        transactional_id=group,
        options=Options(limits=Limits(max_records=BATCH)),
    ) as pipeline:
        await pipeline.run(to_end=True)
        return RECORDS / (time.perf_counter() - begin)


async def at_least_once(bootstrap: str, source: str) -> float:
    """Records per second of consumer, producer, and a commit after each batch."""
    target, group = fresh("plain"), fresh("group")
    await create_topics(bootstrap, (target, 1))
    done = 0
    begin = time.perf_counter()
    async with (
        aiokafka.AIOKafkaConsumer(
            source,
            bootstrap_servers=bootstrap,
            group_id=group,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
        ) as consumer,
        aiokafka.AIOKafkaProducer(
            bootstrap_servers=bootstrap, acks="all", linger_ms=5, max_batch_size=256 * 1024
        ) as producer,
    ):
        while done < RECORDS:
            for records in (await consumer.getmany(timeout_ms=200, max_records=BATCH)).values():
                sent = [await producer.send(target, one.value, one.key) for one in records]
                await asyncio.gather(*sent)
                await consumer.commit()
                done += len(records)
        return RECORDS / (time.perf_counter() - begin)


@contextlib.asynccontextmanager
async def bridging(bootstrap: str, port: int, qos: int, topic: str) -> AsyncIterator[Bridge]:
    """A bridge in this process."""
    bridge = Bridge(
        bootstrap, Address("127.0.0.1", port, topic), Mapped((Route("bench/#", topic, qos=qos),))
    )
    task = asyncio.create_task(bridge.run(handle_signals=False))
    try:
        while not bridge.is_connected:  # noqa: ASYNC110 - it tells nobody of its change
            await asyncio.sleep(0.02)
        yield bridge
    finally:
        bridge.stop()
        await task


async def mqtt(bootstrap: str, port: int, qos: int) -> float:
    """Messages per second from the first publish to the last commit."""
    topic = fresh(f"qos{qos}")
    await create_topics(bootstrap, (topic, 1))
    async with bridging(bootstrap, port, qos, topic) as bridge:
        client = paho.Client(paho.CallbackAPIVersion.VERSION2, protocol=paho.MQTTv5)
        client.max_inflight_messages_set(500)
        client.connect("127.0.0.1", port)
        client.loop_start()
        begin = time.perf_counter()
        for _ in range(MESSAGES):
            client.publish("bench/sensor", VALUE, qos)
        while bridge.counters.written < MESSAGES:  # noqa: ASYNC110 - the same
            await asyncio.sleep(0.005)
        seconds = time.perf_counter() - begin
        client.disconnect()
        client.loop_stop()
    return MESSAGES / seconds


async def run() -> Figures:
    """All figures of one daemon."""
    async with fencepost() as bootstrap:
        source = fresh("source")
        await create_topics(bootstrap, (source, 1))
        await produce(bootstrap, source, [(b"key", VALUE, None)] * RECORDS)
        plain = await at_least_once(bootstrap, source)
        once = await exactly_once(bootstrap, source)
        figures = {
            "runner, exactly once: records/s": once,
            "plain aiokafka, at least once: records/s": plain,
            "exactly once / at least once": once / plain,
        }
        async with mqtt_broker() as port:
            for qos in (1, 2):
                figures[f"MQTT QoS {qos} end to end: messages/s"] = await mqtt(bootstrap, port, qos)
    return {name: round(value, 2) for name, value in figures.items()}


if __name__ == "__main__":
    json.dump(asyncio.run(run()), sys.stdout, indent=2)
    print()
