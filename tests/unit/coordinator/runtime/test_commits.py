"""Callbacks run in order when records are committed, or when they can no longer be committed."""

from __future__ import annotations

import asyncio

import pytest

from fencepost.coordinator.runtime.commits import Commits
from fencepost.logcore.errors import StorageError
from fencepost.logcore.machine import Record
from fencepost.logcore.partition import Partition
from tests.support.metadata_changes import create_topic
from tests.support.stalls import watched_loop
from tests.support.waits import until_true
from tests.unit.coordinator.services.coordinators import storage

RECORD = Record(b"k", b"v")
FLUSHED = {"log.flush.interval.messages": "1"}


class Bench:
    """The partitions ``shared`` (with another replica) and ``alone``, and the run callbacks."""

    def __init__(self, directory, config=None) -> None:
        self.storage = storage(directory, config)
        create_topic(self.storage.metadata, "t", 2, {})
        self.shared = self.storage.logs.partition("t", 0)
        self.alone = self.storage.logs.partition("t", 1)
        self.shared.marks.replicate(0)
        self.commits: Commits = self.storage.commits
        self.called: list[str] = []

    def append(self, partition: Partition) -> None:
        partition.append_records([RECORD], now_ms=1)

    def wait(self, name: str, *partitions: Partition) -> bool:
        return self.commits.after(partitions or (self.shared,), lambda: self.called.append(name))

    def move(self, high_watermark: int) -> None:
        self.shared.marks.move_high_watermark(high_watermark)
        self.shared.marks.notify()

    async def turn(self) -> list[str]:
        await asyncio.sleep(0)
        return self.called


@pytest.fixture
async def bench(tmp_path):
    workbench = Bench(tmp_path)
    yield workbench
    await workbench.storage.flusher.close()
    workbench.storage.logs.close()


async def test_callback_runs_once_high_watermark_reaches_log_end_of_its_call(bench):
    assert not bench.wait("empty")
    bench.append(bench.shared)
    assert bench.shared.high_watermark == 0
    assert bench.wait("first")
    bench.append(bench.shared)
    assert bench.wait("second")
    bench.move(1)
    assert bench.called == []  # not during the notification: a callback may append
    assert await bench.turn() == ["first"]
    bench.move(2)
    assert await bench.turn() == ["first", "second"]
    assert not bench.wait("nothing is held")
    assert not bench.shared.marks._listeners


async def test_callback_added_after_a_commit_does_not_overtake_waiting_ones(bench):
    bench.append(bench.shared)
    bench.wait("first")
    bench.move(1)
    assert bench.wait("second")
    assert await bench.turn() == ["first", "second"]


async def test_callback_for_several_partitions_waits_for_all_of_them(tmp_path):
    bench = Bench(tmp_path, FLUSHED)
    bench.append(bench.shared)
    bench.append(bench.alone)
    assert bench.wait("both", bench.alone, bench.shared)
    await bench.storage.flusher.drain()
    assert (bench.alone.high_watermark, bench.called) == (1, [])
    bench.move(1)
    assert await bench.turn() == ["both"]
    bench.storage.logs.close()


async def test_callbacks_run_without_commit_after_leadership_is_lost(bench):
    bench.append(bench.shared)
    bench.wait("first")
    bench.commits.give_up(bench.shared)
    bench.wait("second")
    assert await bench.turn() == ["first"]
    assert bench.shared.high_watermark == 0


@pytest.mark.parametrize(
    "end", [Partition.mark_deleted, lambda partition: partition.marks.fail(StorageError("bad"))]
)
async def test_callbacks_run_when_their_log_is_deleted_or_fails(bench, end):
    bench.append(bench.shared)
    bench.wait("first")
    bench.wait("second")
    end(bench.shared)
    assert await bench.turn() == ["first", "second"]
    assert not bench.wait("nothing can come")


async def test_callback_runs_when_replication_of_its_partition_ends(bench):
    bench.append(bench.shared)
    bench.wait("first")
    bench.shared.marks.end_replication()
    bench.shared.marks.notify()
    assert await bench.turn() == ["first"]


async def test_drain_runs_all_waiting_callbacks(bench):
    bench.append(bench.shared)
    bench.wait("first")
    await bench.commits.drain()
    assert await bench.turn() == ["first"]


async def test_failed_callback_does_not_prevent_the_next_one(bench):
    bench.append(bench.shared)
    bench.commits.after((bench.shared,), lambda: 1 / 0)
    bench.wait("second")
    bench.move(1)
    await until_true(lambda: bench.called == ["second"], "the other call")


async def test_committed_future_completes_with_the_high_watermark(bench):
    assert bench.commits.committed((bench.shared,)) is None
    bench.append(bench.shared)
    future = bench.commits.committed((bench.shared,))
    bench.move(1)
    async with asyncio.timeout(10):
        await future


async def test_flushed_end_of_leader_excludes_unflushed_records(tmp_path):
    """The leader's high watermark waits for the flushes that ``flush.messages`` requires."""
    bench = Bench(tmp_path, FLUSHED)
    ends: list[int] = []
    bench.shared.marks.on_flushed_end = ends.append
    bench.append(bench.shared)
    assert (bench.shared.marks.flushed_end, bench.shared.log_end_offset, ends) == (0, 1, [])
    await bench.storage.flusher.drain()
    assert (bench.shared.marks.flushed_end, bench.shared.high_watermark, ends) == (1, 0, [1])
    bench.storage.logs.close()


async def test_many_waiting_callbacks_run_in_slices(bench):
    count = 20_000
    for number in range(count):
        if number % 1_000 == 0:
            bench.append(bench.shared)
        bench.wait(str(number))
    assert bench.commits.waiting == count
    with watched_loop() as watch:
        bench.move(bench.shared.log_end_offset)
        await until_true(lambda: len(bench.called) == count, "all are called")
    watch.check()
    assert bench.called == [str(number) for number in range(count)]
