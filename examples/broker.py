"""What the examples share: a broker to run against, topics, and reading a topic to its end."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRecord, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from fencepost.pipelines.producers import read_committed

START_S = 60
"""Patience with the start of the daemon, in seconds."""


def fresh(stem: str) -> str:
    """A name that no earlier run has used."""
    return f"{stem}-{uuid.uuid4().hex[:8]}"


@contextlib.asynccontextmanager
async def fencepost(settings: tuple[str, ...] = ()) -> AsyncIterator[str]:
    """Run ``fencepost serve`` on a free port with an empty directory; yields its address."""
    with tempfile.TemporaryDirectory(prefix="fencepost-example-") as home:
        log = (Path(home) / "daemon.log").open("wb")
        daemon = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "fencepost", "serve", "--listen", "127.0.0.1:0"),
            *("--data-dir", f"{home}/data", "--config", "group.initial.rebalance.delay.ms=0"),
            *(part for setting in settings for part in ("--config", setting)),
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
        )
        try:
            stdout = daemon.stdout
            line = await asyncio.wait_for(stdout.readline(), START_S) if stdout is not None else b""
            if not line.startswith(b"listening "):
                raise RuntimeError("the daemon did not start")
            yield line.decode().split()[1]
        finally:
            with contextlib.suppress(ProcessLookupError):
                daemon.terminate()
            await daemon.wait()
            log.close()


async def create_topics(bootstrap: str, *topics: tuple[str, int]) -> None:
    """Create topics, each given as (name, partitions)."""
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        # Their records may be older than what a broker keeps by default.
        keep = {"retention.ms": "-1"}
        await admin.create_topics(
            [NewTopic(name, partitions, 1, topic_configs=keep) for name, partitions in topics]
        )
    finally:
        await admin.close()


async def produce(
    bootstrap: str, topic: str, records: list[tuple[bytes, bytes, int | None]]
) -> None:
    """Write (key, value, timestamp in ms or None) records and wait for all of them."""
    async with AIOKafkaProducer(
        bootstrap_servers=bootstrap, enable_idempotence=True, linger_ms=10
    ) as producer:
        waiting = [
            await producer.send(topic, value, key, timestamp_ms=timestamp)
            for key, value, timestamp in records
        ]
        await asyncio.gather(*waiting)


async def read_topic(bootstrap: str, topic: str) -> list[ConsumerRecord]:
    """Every committed record, one partition after the other."""
    async with AIOKafkaConsumer(topic, bootstrap_servers=bootstrap) as consumer:
        partitions = sorted(consumer.partitions_for_topic(topic) or ())
    return [
        record
        for partition in partitions
        async for record in read_committed(bootstrap, TopicPartition(topic, partition))
    ]


def run(doc: str | None, example: Callable[[str], Awaitable[str | None]]) -> int:
    """Run an example from the command line; the exit status is 0 if its check holds.

    The example gets a bootstrap address and returns a complaint, None if all is well.
    """
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--bootstrap", help="a running broker; without it one is started")
    address = parser.parse_args().bootstrap

    async def main() -> str | None:
        if address:
            return await example(address)
        async with fencepost() as started:
            return await example(started)

    complaint = asyncio.run(main())
    print(f"WRONG: {complaint}" if complaint else "checked: as it should be")
    return 1 if complaint else 0
