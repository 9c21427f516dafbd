"""Load every flight into the topic ``flights`` with an idempotent producer, keyed by carrier."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgpack
from aiokafka import AIOKafkaProducer

from examples.flights.data import flights

TOPIC = "flights"


async def load(bootstrap: str, directory: Path, progress: Callable[[int], object]) -> int:
    """Send all flights and wait until each is acknowledged; returns how many there were."""
    producer = AIOKafkaProducer(
        bootstrap_servers=bootstrap,
        enable_idempotence=True,
        linger_ms=20,
        max_batch_size=256 * 1024,
    )
    sent = 0
    waiting: list[asyncio.Future[object]] = []
    async with producer:
        for flight_id, row in enumerate(flights(directory)):
            value = msgpack.packb({"id": flight_id, **row})
            waiting.append(await producer.send(TOPIC, value, key=row["carrier"].encode()))
            if len(waiting) == 10_000:
                await asyncio.gather(*waiting)
                sent += len(waiting)
                progress(sent)
                waiting.clear()
        await asyncio.gather(*waiting)
    sent += len(waiting)
    progress(sent)
    return sent
