"""Weather stations publish with QoS 2, the bridge is killed, and every reading is there once.

A reading carries a number, by which the bridge recognises a redelivery even if the MQTT broker has
lost its state.
"""

from __future__ import annotations

import asyncio
import csv
import itertools
import json
import sys
from collections import Counter
from pathlib import Path

import aiomqtt

from examples.broker import create_topics, fresh, read_topic, run
from examples.flights.data import fetch
from examples.mqtt_broker import mqtt_broker

READINGS = 3_000
CACHE = Path(".cache/flights")


async def start_bridge(bootstrap: str, port: int, topic: str) -> asyncio.subprocess.Process:
    """Start ``python -m fencepost.pipelines.mqtt``."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "fencepost.pipelines.mqtt", "--bootstrap", bootstrap),
        *("--mqtt", f"127.0.0.1:{port}", "--mqtt-version", "3.1.1"),
        *("--route", f"weather/+/hourly={topic}", "--client-id", f"bridge-{topic}"),
        *("--message-id", "json:id"),
        stderr=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
    )


async def at_work(bridge: asyncio.subprocess.Process) -> None:
    """Wait until the bridge reports that it works."""
    async with asyncio.timeout(30):
        while bridge.stdout is not None and (line := await bridge.stdout.readline()):
            if b"bridge at work" in line:
                return
    raise RuntimeError("the bridge did not start")


async def example(bootstrap: str) -> str | None:
    """Publish real weather, kill the bridge half-way, compare."""
    return await ingest(bootstrap, None)


async def ingest(bootstrap: str, broker: str | None, readings: int = READINGS) -> str | None:
    """Run the example with the MQTT broker at path ``broker``, or with the installed one."""
    fetch(CACHE)
    topic = fresh("weather")
    await create_topics(bootstrap, (topic, 1))
    with (CACHE / "weather.csv").open(encoding="utf-8", newline="") as file:
        rows = list(itertools.islice(csv.DictReader(file), readings))
    async with mqtt_broker(broker) as port:
        bridge = await start_bridge(bootstrap, port, topic)
        await at_work(bridge)
        async with aiomqtt.Client("127.0.0.1", port, identifier="stations") as stations:
            for number, row in enumerate(rows):
                payload = json.dumps({"id": number, **row})
                await stations.publish(f"weather/{row['origin']}/hourly", payload, qos=2)
                if number == readings // 2:
                    bridge.kill()
                    await bridge.wait()
                    bridge = await start_bridge(bootstrap, port, topic)
        try:
            async with asyncio.timeout(60):
                found: list[int] = []
                while len(set(found)) < readings:
                    found = [json.loads(r.value)["id"] for r in await read_topic(bootstrap, topic)]
        finally:
            bridge.terminate()
            await bridge.wait()
    doubled = sum(times - 1 for times in Counter(found).values())
    print(f"{len(set(found))} of {readings} readings, {doubled} doubled, bridge killed once")
    return None if sorted(found) == list(range(readings)) else "readings were lost or doubled"


if __name__ == "__main__":
    sys.exit(run(__doc__, example))
