"""Loads flights into the topic: up to November by an idempotent producer, December over MQTT."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import aiomqtt
from aiokafka import AIOKafkaProducer

from examples.delays.truth import LIVE_FROM, Record, records

FLIGHTS, ENRICHED, HOURS = "flights", "flights-enriched", "carrier-hours"
PARTITIONS = 6

END_OF_TIME = "2014-06-01T00:00:00Z"
"""The time of the record that closes the last windows; all flights are earlier."""


def split(directory: Path) -> tuple[list[Record], list[Record]]:
    """Return the flights to load, and the flights that arrive while the pipeline runs."""
    everything = list(records(directory))
    first = next(i for i, record in enumerate(everything) if str(record["time"]) >= LIVE_FROM)
    return everything[:first], everything[first:]


def encoded(record: Record) -> bytes:
    """Return a flight as bytes of a record and of an MQTT message."""
    return json.dumps(record, separators=(",", ":")).encode()


ROUTES = f"""\
message_id = "json:id"
[[route]]
filter = "flights/+"
topic = "{FLIGHTS}"
key = "{{1}}"
qos = 1
"""
"""The bridge's route: the carrier becomes the key, and the flight's id tells a redelivered message
from a new one."""


async def publish(port: int, flights: Iterable[Record], told: Callable[[int], None]) -> None:
    """Publish ``flights`` with QoS 1, each under its carrier's topic."""
    async with aiomqtt.Client("127.0.0.1", port, identifier="airport") as airport:
        for count, record in enumerate(flights, 1):
            await airport.publish(f"flights/{record['carrier']}", encoded(record), qos=1)
            if count % 500 == 0:
                told(count)


async def close_windows(bootstrap: str) -> None:
    """Send a record that closes all windows: it is counted nowhere, but moves the watermark."""
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, enable_idempotence=True) as producer:
        await producer.send_and_wait(FLIGHTS, encoded({"time": END_OF_TIME}), b"")
