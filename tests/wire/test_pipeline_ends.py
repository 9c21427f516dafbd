"""SIGTERM or SIGINT ends a pipeline in time, whatever it waits for. Output is exactly-once."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import pytest

from fencepost.pipelines.exactly_once import ExactlyOnce
from fencepost.pipelines.failures import RetryBatch, RetryPolicy, StoppedError
from fencepost.pipelines.records import Batch, Output
from fencepost.pipelines.stopping import CLEAN_UP_S, STOP_MS
from tests.support.cluster import Cluster
from tests.support.own_broker import OwnBroker, behind_proxy, own_broker
from tests.support.proxy import LosingProxy
from tests.support.waits import until_async, until_true
from tests.wire.test_exactly_once import Bench

END_S = 3.0
"""The pipeline must end within this time, which includes ``STOP_MS`` and ``CLEAN_UP_S``."""

APIS = {
    "Produce": 0,
    "Fetch": 1,
    "ListOffsets": 2,
    "Metadata": 3,
    "OffsetFetch": 9,
    "FindCoordinator": 10,
    "JoinGroup": 11,
    "SyncGroup": 14,
    "CreateTopics": 19,
    "InitProducerId": 22,
    "AddPartitionsToTxn": 24,
    "AddOffsetsToTxn": 25,
    "EndTxn": 26,
    "TxnOffsetCommit": 28,
}
"""The requests of a running pipeline. It sends CreateTopics if a topic is missing."""

RECORDS = 30


def test_stop_and_clean_up_limits_fit_into_the_promised_time() -> None:
    assert STOP_MS / 1000 + CLEAN_UP_S < END_S


@pytest.fixture(scope="module")
def proxied(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[OwnBroker, LosingProxy]]:
    with behind_proxy(request, tmp_path_factory.mktemp("ends")) as found:
        yield found


@pytest.fixture
async def bench(proxied: tuple[OwnBroker, LosingProxy]) -> AsyncIterator[Bench]:
    started, proxy = proxied
    with Cluster(started.bootstrap) as cluster:
        made = Bench(f"127.0.0.1:{proxy.port}", cluster)
        await made.fill(RECORDS)
        yield made
        proxy.release()


@asynccontextmanager
async def ended_by(number: int, pipeline: ExactlyOnce) -> AsyncIterator[None]:
    """Run the pipeline within the block. Then send a signal, after which it must end in time."""

    async def run() -> None:
        async with pipeline:
            await pipeline.run()

    running = asyncio.create_task(run())
    yield
    assert not running.done()
    began = time.monotonic()
    os.kill(os.getpid(), number)
    await asyncio.wait_for(running, 60)
    assert time.monotonic() - began < END_S


async def all_is_copied_once(bench: Bench) -> None:
    async with bench.pipeline() as again:
        await again.run(to_end=True, handle_signals=False)
    bench.check(RECORDS)


SIGNALS = signal.SIGTERM, signal.SIGINT


@pytest.mark.slow
@pytest.mark.parametrize(("number", "api"), list(zip(itertools.cycle(SIGNALS), APIS)))
async def test_pipeline_stops_in_time_while_a_response_is_missing(
    bench: Bench, proxied: tuple[OwnBroker, LosingProxy], api: str, number: int
) -> None:
    proxy = proxied[1]

    def handler(batch: Batch) -> list[Output]:
        missing = [Output("no-such-topic", b"")] if api == "CreateTopics" else []
        return bench.copy(batch) + missing

    pipeline = bench.pipeline(handler)
    connect = pipeline._connect

    async def connected() -> None:
        await connect()
        proxy.hold(APIS[api])

    pipeline._connect = connected  # type: ignore[method-assign]
    async with ended_by(number, pipeline):
        assert await asyncio.to_thread(proxy.holding.wait, 60)
    proxy.release()
    await all_is_copied_once(bench)


def waits_for_a_topic(bench: Bench, at_work: asyncio.Event) -> ExactlyOnce:
    def handler(_: Batch) -> list[Output]:
        loop.call_soon_threadsafe(at_work.set)
        return [Output("no-such-topic", b"")]

    loop = asyncio.get_running_loop()
    return bench.pipeline(handler, topic_wait_ms=600_000)


def waits_for_another_attempt(bench: Bench, at_work: asyncio.Event) -> ExactlyOnce:
    async def handler(_: Batch) -> list[Output]:
        at_work.set()
        raise RetryBatch

    return bench.pipeline(handler, retry=RetryPolicy(600_000, 600_000))


def waits_for_its_handler(bench: Bench, at_work: asyncio.Event) -> ExactlyOnce:
    async def handler(_: Batch) -> list[Output]:
        at_work.set()
        await asyncio.Event().wait()
        return []

    return bench.pipeline(handler)


def waits_for_state(bench: Bench, at_work: asyncio.Event) -> ExactlyOnce:
    async def restore(_: object) -> None:
        at_work.set()
        await asyncio.Event().wait()

    return bench.pipeline(restore=restore)


def waits_before_its_commit(bench: Bench, at_work: asyncio.Event) -> ExactlyOnce:
    async def hook(_: object) -> None:
        at_work.set()
        await asyncio.Event().wait()

    return bench.pipeline(before_commit=hook)


@pytest.mark.parametrize(
    ("number", "made"),
    [
        (signal.SIGTERM, waits_for_a_topic),
        (signal.SIGINT, waits_for_a_topic),
        (signal.SIGINT, waits_for_another_attempt),
        (signal.SIGTERM, waits_for_its_handler),
        (signal.SIGINT, waits_for_state),
        (signal.SIGTERM, waits_before_its_commit),
    ],
)
async def test_pipeline_stops_in_time_while_it_waits(
    bench: Bench, made: Callable[[Bench, asyncio.Event], ExactlyOnce], number: int
) -> None:
    at_work = asyncio.Event()
    async with ended_by(number, made(bench, at_work)):
        await asyncio.wait_for(at_work.wait(), 60)
    await all_is_copied_once(bench)


async def test_transaction_that_completes_within_the_stop_time_is_committed(bench: Bench) -> None:
    at_work = asyncio.Event()

    async def hook(_: object) -> None:
        at_work.set()
        await pipeline.is_stopping.wait()

    pipeline = bench.pipeline(before_commit=hook)
    async with ended_by(signal.SIGTERM, pipeline):
        await asyncio.wait_for(at_work.wait(), 60)
    assert pipeline.metrics.transactions == 1
    assert pipeline.metrics.aborts == 0
    await all_is_copied_once(bench)


async def test_transaction_aborted_at_a_stop_does_not_hold_back_the_lso(bench: Bench) -> None:
    at_work = asyncio.Event()
    pipeline = waits_before_its_commit(bench, at_work)
    async with ended_by(signal.SIGTERM, pipeline):
        await asyncio.wait_for(at_work.wait(), 60)
    assert pipeline.metrics.transactions == 0
    # Apache Kafka responds before the markers are written.
    await until_true(
        lambda: all(
            bench.cluster.lso(bench.target, partition)
            == bench.cluster.offset(bench.target, partition)
            for partition in range(3)
        ),
        "the markers of the aborted transaction",
    )


async def test_pipeline_stops_in_time_while_the_broker_is_down(
    request: pytest.FixtureRequest, tmp_path: object
) -> None:
    with own_broker(request, tmp_path / "own") as broker, Cluster(broker.bootstrap) as cluster:
        own = Bench(broker.bootstrap, cluster)
        await own.fill(RECORDS)
        pipeline = own.pipeline()

        async def is_lost() -> bool:
            connections = pipeline._consumer._client._conns.values()
            return not any(connection.connected() for connection in connections)

        async with ended_by(signal.SIGTERM, pipeline):
            await own.all_copied(RECORDS)
            await asyncio.to_thread(broker.kill)
            await until_async(is_lost, "the pipeline has noticed")


async def test_stop_while_connecting_raises_stopped_in_time() -> None:
    pipeline = ExactlyOnce(
        "127.0.0.1:1",
        group="g",
        topics=["t"],
        handler=lambda _: None,
        transactional_id="t",
    )
    starting = asyncio.create_task(pipeline.__aenter__())
    began = time.monotonic()
    asyncio.get_running_loop().call_soon(pipeline.stop)
    with pytest.raises(StoppedError, match="before it had connected"):
        await asyncio.wait_for(starting, 60)
    assert time.monotonic() - began < END_S
