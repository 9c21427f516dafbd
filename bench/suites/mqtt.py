"""The rate of MQTT messages to Kafka records: Mosquitto, a bridge in this process, a broker."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

import paho.mqtt.client as paho

from bench.brokers import Broker, cpu_seconds
from bench.suite import Figures, Suite, Workload
from examples.broker import create_topics, fresh, read_topic
from examples.mqtt_broker import mqtt_broker
from fencepost.pipelines.mqtt.bridge import Bridge
from fencepost.pipelines.mqtt.routes import Mapped, Route
from fencepost.pipelines.mqtt.session import Address

MESSAGES, WARMING = 20_000, 2_000
PADDING = b"x" * 90
DEADLINE_S = 300.0


@contextlib.asynccontextmanager
async def bridging(bootstrap: str, port: int, qos: int, topic: str) -> AsyncIterator[Bridge]:
    """Run a bridge in this process."""
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


async def written(bridge: Bridge, count: int) -> None:
    """Wait until the bridge has committed ``count`` messages. TimeoutError after five minutes."""
    deadline = time.monotonic() + DEADLINE_S
    while bridge.counters.written < count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{bridge.counters.written} messages of {count}")
        await asyncio.sleep(0.005)


async def end_to_end(broker: Broker, qos: int) -> Figures:
    """Publish, wait for the last commit, and count. RuntimeError for lost or duplicate messages."""
    topic = fresh(f"qos{qos}")
    await create_topics(broker.bootstrap, (topic, 1))
    async with mqtt_broker() as port, bridging(broker.bootstrap, port, qos, topic) as bridge:
        client = paho.Client(paho.CallbackAPIVersion.VERSION2, protocol=paho.MQTTv5)
        client.max_inflight_messages_set(500)
        client.connect("127.0.0.1", port)
        client.loop_start()
        for number in range(WARMING):
            client.publish("bench/sensor", b"%09d " % number + PADDING, qos)
        await written(bridge, WARMING)
        begin, brokers = time.perf_counter(), cpu_seconds(broker)
        for number in range(WARMING, WARMING + MESSAGES):
            client.publish("bench/sensor", b"%09d " % number + PADDING, qos)
        await written(bridge, WARMING + MESSAGES)
        seconds, brokers = time.perf_counter() - begin, cpu_seconds(broker) - brokers
        client.disconnect()
        client.loop_stop()
    found = [record.value for record in await read_topic(broker.bootstrap, topic)]
    expected = WARMING + MESSAGES
    if len(found) != expected or len(set(found)) != expected:
        raise RuntimeError(f"{len(found)} records, {len(set(found))} apart, of {expected}")
    return {
        "throughput (messages/s)": MESSAGES / seconds,
        "CPU time of the broker per 1,000 messages (ms)": brokers / MESSAGES * 1e6,
    }


def bridge(qos: int) -> Callable[[Broker], Figures]:
    """Return a workload with one subscription at that quality of service."""
    return lambda broker: asyncio.run(end_to_end(broker, qos))


MQTT = Suite(
    "mqtt",
    "MQTT messages of 100 B through Mosquitto and the bridge, from the first publish to the last "
    "commit. Publisher and bridge share a process.",
    (
        Workload("MQTT with QoS 1", bridge(1), fresh=True),
        Workload("MQTT with QoS 2", bridge(2), fresh=True),
    ),
)
