"""A sensor gateway that publishes real weather and flights, and repeats unacknowledged messages."""

from __future__ import annotations

import csv
import itertools
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import paho.mqtt.client as paho
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from examples.flights.data import fetch, flights
from tests.support.waits import until

Message = tuple[str, bytes]
"""MQTT topic and payload. The ``id`` in the payload is the number of the message."""

IN_FLIGHT = 500


def messages(directory: Path, count: int) -> Iterator[Message]:
    """Yield the first ``count`` messages: hourly weather of three airports, then flights."""
    fetch(directory)

    def readings() -> Iterator[tuple[str, dict[str, str]]]:
        with (directory / "weather.csv").open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                yield f"weather/{row['origin']}/hourly", row
        for row in flights(directory):
            yield f"flights/{row['origin']}/{row['carrier']}", row

    for number, (topic, row) in enumerate(itertools.islice(readings(), count)):
        yield topic, json.dumps({"id": number, **row}).encode()


class Publisher:
    """A paho client in its own thread, which reconnects and resends unacknowledged messages."""

    def __init__(self, port: int, qos: int, *, with_ids: bool) -> None:
        self._qos = qos
        self._with_ids = with_ids
        self._lock = threading.Lock()
        self._waiting: set[int] = set()
        self.acknowledged = 0
        self._client = paho.Client(
            paho.CallbackAPIVersion.VERSION2, "gateway", protocol=paho.MQTTv5
        )
        self._client.on_publish = self._on_publish
        self._client.max_inflight_messages_set(IN_FLIGHT)
        self._client.reconnect_delay_set(1, 1)
        properties = Properties(PacketTypes.CONNECT)
        properties.SessionExpiryInterval = 3_600
        self._client.connect("127.0.0.1", port, clean_start=False, properties=properties)
        self._client.loop_start()

    def _on_publish(self, *_: object) -> None:
        with self._lock:
            self.acknowledged += 1

    def publish(self, batch: list[Message], first: int) -> None:
        """Send a batch, and wait until the MQTT broker has acknowledged all its messages."""
        goal = self.acknowledged + len(batch)
        for number, (topic, payload) in enumerate(batch, first):
            properties = Properties(PacketTypes.PUBLISH)
            if self._with_ids:
                properties.UserProperty = ("message-id", f"gateway/{number}")
            self._client.publish(topic, payload, self._qos, properties=properties)
        until(lambda: self.acknowledged >= goal, f"{goal} acknowledged", deadline_s=60)

    def close(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()
