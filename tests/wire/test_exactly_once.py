"""The exactly-once runner on real brokers copies every record once, whenever a worker fails."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiokafka.errors import ProducerFenced

from fencepost.pipelines.batching import Limits
from fencepost.pipelines.exactly_once import ExactlyOnce, Options
from fencepost.pipelines.failures import (
    DataLostError,
    FencedTooOftenError,
    HandlerError,
    RetryBatch,
    RetryPolicy,
)
from fencepost.pipelines.handler import Handler
from fencepost.pipelines.producers import open_producer
from fencepost.pipelines.records import OFFSET, Batch, Output
from fencepost.pipelines.serde import JSON
from tests.support.cluster import READ_COMMITTED, Cluster, unique
from tests.support.own_broker import behind_proxy
from tests.support.waits import until_async
from tests.wire.clients import aio_consumer, aio_producer

pytestmark = pytest.mark.container

SMALL = Limits(max_records=50, max_ms=50)
PARTITIONS = 3


class Bench:
    """Topics filled with numbers, and pipelines that copy them."""

    def __init__(self, bootstrap: str, cluster: Cluster) -> None:
        self.bootstrap = bootstrap
        self.cluster = cluster
        self.source = cluster.create_topic(unique("in"), PARTITIONS)
        self.target = cluster.create_topic(unique("out"), PARTITIONS)
        self.group = unique("group")

    async def fill(self, count: int, *, first: int = 0) -> None:
        async with aio_producer(self.bootstrap, linger_ms=5) as producer:
            for future in [
                await producer.send(
                    self.source,
                    b"%d" % n,
                    b"k%d" % n,
                    partition=n % PARTITIONS,
                    timestamp_ms=1_000 + n,
                    headers=[("n", b"%d" % n)],
                )
                for n in range(first, first + count)
            ]:
                await future

    def copy(self, batch: Batch) -> list[Output]:
        return [
            Output(self.target, r.value, r.key, r.partition, r.headers, r.timestamp_ms)
            for r in batch
        ]

    def pipeline(
        self, handler: Handler | None = None, name: str = "one", **options: Any
    ) -> ExactlyOnce:
        return ExactlyOnce(
            self.bootstrap,
            group=self.group,
            topics=[self.source],
            handler=handler or self.copy,
            transactional_id=f"{self.group}-{name}",
            options=Options(**{"limits": SMALL, "session_timeout_ms": 6_000, **options}),
        )

    def copied(self, partition: int) -> list[int]:
        return [
            int(value or b"")
            for value in self.cluster.values(
                self.target, partition=partition, isolation=READ_COMMITTED
            )
        ]

    def check(self, count: int) -> None:
        """Check that every number was copied once, and in order within each partition."""
        for partition in range(PARTITIONS):
            assert self.copied(partition) == list(range(partition, count, PARTITIONS))

    @contextlib.asynccontextmanager
    async def running(self, *pipelines: ExactlyOnce) -> AsyncIterator[None]:
        async def run(pipeline: ExactlyOnce) -> None:
            async with pipeline:
                await pipeline.run(handle_signals=False)

        tasks = [asyncio.create_task(run(pipeline)) for pipeline in pipelines]
        try:
            yield
        finally:
            for pipeline in pipelines:
                pipeline.stop()
            await asyncio.wait_for(asyncio.gather(*tasks), 60)

    async def all_copied(self, count: int) -> None:
        async def probe() -> bool:
            found = [await asyncio.to_thread(self.copied, p) for p in range(PARTITIONS)]
            return sum(map(len, found)) >= count

        await until_async(probe, f"{count} records copied", deadline_s=60)


@pytest.fixture
def bench(bootstrap: str, cluster: Cluster) -> Bench:
    return Bench(bootstrap, cluster)


async def test_copy_to_the_end_keeps_keys_timestamps_and_headers(bench: Bench) -> None:
    await bench.fill(200)
    async with bench.pipeline() as pipeline:
        await pipeline.run(to_end=True)
    bench.check(200)
    assert pipeline.metrics.records_in == pipeline.metrics.records_out == 200
    assert pipeline.metrics.transactions >= 200 // SMALL.max_records
    async with aio_consumer(bench.bootstrap, bench.target) as consumer:
        record = await consumer.getone()
    number = int(record.value)
    assert record.key == b"k%d" % number
    assert record.timestamp == 1_000 + number
    assert record.headers == (("n", b"%d" % number),)
    # A second run finds no further records.
    async with bench.pipeline() as again:
        await again.run(to_end=True)
    assert again.metrics.records_in == 0


async def test_pipeline_reads_and_writes_several_topics(bench: Bench) -> None:
    other = bench.cluster.create_topic(unique("other"))
    totals = bench.cluster.create_topic(unique("totals"))
    bench.cluster.produce(other, [b"x", b"y"])
    await bench.fill(30)

    async def route(batch: Batch) -> list[Output]:
        kinds = Counter(record.topic for record in batch)
        return [
            *(Output(bench.target, r.value, partition=r.partition) for r in batch),
            *(Output(totals, {"topic": t, "count": n}) for t, n in kinds.items()),
        ]

    def encode(value: Any) -> bytes:
        return value if isinstance(value, bytes) else JSON.encode(value)

    pipeline = ExactlyOnce(
        bench.bootstrap,
        group=bench.group,
        topics=[bench.source, other],
        handler=route,
        transactional_id=bench.group,
        options=Options(limits=SMALL, output_value_serde=type(JSON)("mixed", encode, bytes)),
    )
    async with pipeline:
        await pipeline.run(to_end=True)
    counted: Counter[str] = Counter()
    for value in bench.cluster.values(totals, isolation=READ_COMMITTED):
        said = JSON.load(value)
        counted[said["topic"]] += said["count"]
    assert counted == {bench.source: 30, other: 2}


async def test_second_worker_gets_partitions_and_returns_them_when_it_stops(bench: Bench) -> None:
    await bench.fill(300)
    first, second = bench.pipeline(name="one"), bench.pipeline(name="two")
    async with bench.running(first):
        await bench.all_copied(100)
        async with bench.running(second):
            await until_async(
                lambda: _true(
                    second.is_settled and first.is_settled and second.metrics.transactions == 0
                ),
                "both at work",
            )
            await bench.fill(600, first=300)
            await until_async(
                lambda: _true(second.metrics.records_in > 0), "a share for the second"
            )
        await bench.fill(300, first=900)
        await bench.all_copied(1_200)
    bench.check(1_200)
    assert first.metrics.rebalances >= 1


async def _true(value: bool) -> bool:
    return value


async def test_worker_whose_partitions_were_reassigned_cannot_commit(bench: Bench) -> None:
    """While the worker's transaction is open, the group moves its partitions to another worker."""
    await bench.fill(60)
    inside, release = asyncio.Event(), asyncio.Event()

    async def hold(_: Batch) -> None:
        inside.set()
        await release.wait()

    zombie = bench.pipeline(
        name="zombie", before_commit=hold, revoke_ms=60_000, session_timeout_ms=2_000
    )
    heir = bench.pipeline(name="heir")
    async with bench.running(zombie):
        await asyncio.wait_for(inside.wait(), 60)
        # A stalled process would not send heartbeats either.
        coordinator = zombie._consumer._coordinator
        await coordinator._stop_heartbeat_task()
        async with bench.running(heir):
            # The output cannot be read yet, because the zombie's transaction holds the LSO back.
            await until_async(lambda: _true(heir.metrics.records_in == 60), "the heir's work")
            release.set()
            await until_async(lambda: _true(zombie.metrics.aborts > 0), "its abort", deadline_s=60)
    bench.cluster.settle(bench.target)
    bench.check(60)
    assert zombie.metrics.transactions == 0


def producer_epoch(pipeline: ExactlyOnce) -> int:
    """Return the epoch of the pipeline's producer, −1 before the producer has an epoch."""
    producer = pipeline._producer
    return -1 if producer is None else producer._txn_manager.producer_epoch


async def test_state_is_restored_only_after_the_running_handler_has_ended(bench: Bench) -> None:
    """The group revokes the partitions while a synchronous handler runs in a thread."""
    await bench.fill(60)
    inside, release = threading.Event(), threading.Event()
    restored = asyncio.Event()
    at_work: list[bool] = []
    state = Counter[int]()

    def count(batch: Batch) -> list[Output]:
        first = not inside.is_set()
        inside.set()
        if first:
            release.wait(60)
        state.update(int(record.value) for record in batch)
        return bench.copy(batch)

    def restore(_: object) -> None:
        state.clear()
        at_work.append(inside.is_set() and not release.is_set())
        if len(at_work) > 1:
            restored.set()

    slow = bench.pipeline(count, name="slow", restore=restore, revoke_ms=1)
    async with bench.running(slow):
        await asyncio.to_thread(inside.wait, 30)
        async with bench.running(bench.pipeline(name="other")):
            await until_async(lambda: _true(slow.metrics.rebalances > 0), "a rebalance")
            # ``restore`` must not be called before the handler ends: wait a second for a call.
            await asyncio.wait([asyncio.ensure_future(restored.wait())], timeout=1)
            release.set()
            await bench.all_copied(60)
            await asyncio.wait_for(restored.wait(), 60)
    bench.check(60)
    assert not any(at_work)
    assert max(state.values(), default=1) == 1


async def test_offsets_in_flight_at_a_revocation_miss_the_next_transaction(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """The group revokes the partitions while the transaction's offsets are being sent."""
    txn_offset_commit = 28
    with behind_proxy(request, tmp_path) as (started, proxy), Cluster(started.bootstrap) as cluster:
        bench = Bench(f"127.0.0.1:{proxy.port}", cluster)
        await bench.fill(60)
        proxy.hold(txn_offset_commit)
        slow = bench.pipeline(name="slow", revoke_ms=1)
        async with bench.running(slow):
            await asyncio.to_thread(proxy.holding.wait, 30)
            before = producer_epoch(slow)
            async with bench.running(bench.pipeline(name="other")):
                await until_async(
                    lambda: _true(-1 != producer_epoch(slow) != before), "another epoch"
                )
                proxy.release()
                await bench.fill(60, first=60)
                await bench.all_copied(120)
        bench.check(120)


async def test_idle_pipeline_resets_its_failure_count(
    bench: Bench,
) -> None:
    await bench.fill(30)
    failing = False

    def sometimes(batch: Batch) -> list[Output]:
        nonlocal failing
        failing = not failing
        if failing:
            raise RetryBatch
        return bench.copy(batch)

    # If the failure count were not reset, the pipeline would give up after the second failure.
    policy = RetryPolicy(backoff_ms=1, give_up_ms=1)
    pipeline = bench.pipeline(sometimes, retry=policy)
    async with bench.running(pipeline):
        await bench.all_copied(30)
        for number in range(3):
            pipeline._patience.failed(RetryBatch(), time.monotonic() * 1000)
            await until_async(
                lambda: _true(not pipeline._patience._failures), f"success {number} without work"
            )


async def test_fenced_worker_opens_a_new_producer_and_completes(bench: Bench) -> None:
    await bench.fill(100)
    thrown = False

    async def fence_once(_: Batch) -> None:
        nonlocal thrown
        if not thrown:
            thrown = True
            rival = await open_producer(bench.bootstrap, f"{bench.group}-one", 10_000, {})
            await rival.stop()

    async with bench.pipeline(before_commit=fence_once) as pipeline:
        await pipeline.run(to_end=True)
    bench.check(100)
    assert pipeline.metrics.reopened >= 1
    assert pipeline.metrics.fences >= 1


async def test_worker_fenced_too_often_stops(bench: Bench) -> None:
    await bench.fill(10)

    async def fenced(_: Batch) -> None:
        raise ProducerFenced

    policy = RetryPolicy(backoff_ms=1, max_fences=2)
    async with bench.pipeline(before_commit=fenced, retry=policy) as pipeline:
        with pytest.raises(FencedTooOftenError):
            await pipeline.run(to_end=True)
    assert [bench.copied(p) for p in range(PARTITIONS)] == [[], [], []]


async def test_handler_exception_retries_the_batch_or_ends_the_pipeline(bench: Bench) -> None:
    await bench.fill(50)
    attempts = 0

    def flaky(batch: Batch) -> list[Output]:
        nonlocal attempts
        attempts += 1
        if attempts < 3:
            raise RetryBatch
        return bench.copy(batch)

    async with bench.pipeline(flaky) as pipeline:
        await pipeline.run(to_end=True)
    bench.check(50)

    await bench.fill(3, first=50)

    def broken(_: Batch) -> None:
        raise ZeroDivisionError

    async with bench.pipeline(broken) as pipeline:
        with pytest.raises(HandlerError):
            await pipeline.run(to_end=True)
    bench.check(50)


async def test_dead_letters_are_in_the_same_transaction(bench: Bench) -> None:
    dead = bench.cluster.create_topic(unique("dead"))
    await bench.fill(60)

    def odd_ones_out(batch: Batch) -> list[Output]:
        for record in batch:
            if record.value % 2:
                batch.refuse(record, "odd")
        return [
            Output(bench.target, r.value, partition=r.partition) for r in batch if not r.value % 2
        ]

    async with bench.pipeline(odd_ones_out, value_serde=JSON, dead_letter=dead) as pipeline:
        await pipeline.run(to_end=True)
    assert pipeline.metrics.refused == 30
    values = bench.cluster.values(dead, isolation=READ_COMMITTED)
    assert sorted(int(value or b"") for value in values) == list(range(1, 60, 2))
    async with aio_consumer(bench.bootstrap, dead) as consumer:
        assert OFFSET in dict((await consumer.getone()).headers)


async def test_records_deleted_before_they_were_read_raise_data_lost(bench: Bench) -> None:
    await bench.fill(30)
    async with bench.pipeline() as pipeline:
        await pipeline.run(to_end=True)
    await bench.fill(30, first=30)
    bench.cluster.call(
        "delete_records",
        2,
        topics=[
            {
                "name": bench.source,
                "partitions": [{"partition_index": p, "offset": 15} for p in range(PARTITIONS)],
            }
        ],
        timeout=5_000,
    )
    async with bench.pipeline() as pipeline:
        with pytest.raises(DataLostError):
            await pipeline.run(to_end=True)
