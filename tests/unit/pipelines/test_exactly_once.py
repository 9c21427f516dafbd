"""A pipeline starts and stops while the broker is down, starts, or disconnects."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path

import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka.errors import KafkaConnectionError

from fencepost import Broker
from fencepost.pipelines.exactly_once import ExactlyOnce, Options
from fencepost.pipelines.failures import GaveUpError, RetryPolicy
from fencepost.pipelines.producers import close_consumer
from tests.support.cluster import Cluster
from tests.support.waits import until_async


def pipeline(bootstrap: str, **retry: int) -> ExactlyOnce:
    return ExactlyOnce(
        bootstrap,
        group="waiting",
        topics=["input"],
        handler=lambda _: None,
        transactional_id="waiting-1",
        options=Options(retry=RetryPolicy(backoff_ms=20, max_backoff_ms=20, **retry)),
    )


async def test_start_without_a_broker_fails_after_start_ms() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(GaveUpError, match="no progress for 300 ms") as caught:
        async with pipeline(f"127.0.0.1:{port}", start_ms=300):
            pass
    assert isinstance(caught.value.__cause__, KafkaConnectionError)


async def test_start_is_retried_until_the_broker_is_available(tmp_path: Path) -> None:
    hung_up = 0

    def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal hung_up
        hung_up += 1
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    starting = asyncio.create_task(pipeline(address).__aenter__())
    async with contextlib.AsyncExitStack() as stack:

        async def is_refused_twice() -> bool:
            return hung_up >= 2

        await until_async(is_refused_twice, "two attempts", deadline_s=60)
        server.close()
        await server.wait_closed()
        await stack.enter_async_context(Broker(tmp_path, listen=address))
        started = await asyncio.wait_for(starting, 60)
        stack.push_async_exit(started.__aexit__)
        started.stop()
        await started.run(handle_signals=False)


async def test_consumer_closes_cleanly_after_the_broker_stopped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """aiokafka's own stop raises CancelledError while its fetch pauses after a lost connection."""
    async with Broker(tmp_path) as broker:
        with Cluster(broker.bootstrap) as cluster:
            await asyncio.to_thread(cluster.create_topic, "input")
        consumer = AIOKafkaConsumer(
            "input", bootstrap_servers=broker.bootstrap, retry_backoff_ms=5_000
        )
        await consumer.start()
        await consumer.getmany(timeout_ms=100)

    async def is_lost() -> bool:
        return "Failed fetch messages" in caplog.text

    await until_async(is_lost, "a lost fetch", deadline_s=60)
    await close_consumer(consumer)
