"""Background work on the worst batches blocks neither the loop nor other threads."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from functools import partial

import pytest

from fencepost.coordinator.runtime.background import Pace
from fencepost.coordinator.runtime.shard_load import replay_log
from fencepost.groups.machine import GroupMachine
from fencepost.groups.records import OffsetCommitValue, offset_commit
from fencepost.logcore.batch import LogRecord, encode_batch
from fencepost.logcore.compaction import unthrottled
from fencepost.logcore.compression import Codec
from fencepost.logcore.config import LogConfig
from fencepost.logcore.partition import Partition
from tests.support.clock import ManualClock
from tests.support.memory_disk import MemoryDisk
from tests.support.partitions import append_batch
from tests.support.stalls import LockWatch, watched_loop
from tests.support.worst_batches import (
    FIRST_MS,
    MAX_MESSAGE_BYTES,
    batch_of,
    keyed_records,
    most_bytes,
)

KEYED, COMMITS = 500_000, 100_000
NOW_MS = FIRST_MS + 1_000_000
TRIES = 3
"""The number of attempts: work may seem too long on a busy machine."""

CODECS = pytest.mark.parametrize("codec", list(Codec)[1:], ids=lambda codec: codec.name.lower())
COMPACTED = LogConfig(
    cleanup_policy=frozenset({"compact"}),
    max_message_bytes=MAX_MESSAGE_BYTES,
    flush_messages=1 << 60,
)


def opened() -> Partition:
    disk = MemoryDisk()
    disk.make_directory("/data")
    return Partition.open(
        disk,
        "/data/t-0",
        topic="t",
        index=0,
        topic_id=uuid.UUID(int=7),
        config=COMPACTED,
        clock=ManualClock(NOW_MS),
        clean=True,
    )


def check_lock(work: Callable[[], Callable[[], object]]) -> None:
    """Run work in a thread, up to ``TRIES`` times, until it always releases the lock soon."""
    watches: list[LockWatch] = []
    while not watches or (len(watches) < TRIES and not watches[-1].is_short):
        thread = threading.Thread(target=work(), name="work")
        with LockWatch() as watch:
            thread.start()
            thread.join()
        watches.append(watch)
    shortest = min(watches, key=lambda candidate: candidate.longest_ms)
    assert shortest.is_short, f"{shortest.where} kept the lock for {shortest.longest_ms:.0f} ms"


@pytest.mark.slow
@CODECS
def test_compaction_of_many_records_releases_the_interpreter_lock(codec: Codec) -> None:
    batch = batch_of(keyed_records(KEYED), KEYED, codec)
    figures = []

    def prepared() -> Callable[[], None]:
        partition = opened()
        append_batch(partition, batch, now_ms=NOW_MS)
        partition.flushes.roll(NOW_MS)
        partition.flushes.run(NOW_MS)
        dirty = partition.cleanup.dirty_range(None, NOW_MS)
        compaction = partition.cleanup.plan_compaction(dirty, now_ms=NOW_MS)
        assert compaction is not None

        def compact() -> None:
            compaction.map_keys(unthrottled)
            while compaction.clean_next(unthrottled):
                assert partition.cleanup.install_cleaned(compaction)
            figures.append(compaction.figures)

        return compact

    check_lock(prepared)
    assert {(figure.records_read, figure.records_kept) for figure in figures} == {(KEYED, 1)}


@pytest.mark.slow
@CODECS
def test_compaction_of_large_records_releases_the_interpreter_lock(codec: Codec) -> None:
    batch, ends = most_bytes(codec), []

    def prepared() -> Callable[[], None]:
        partition = opened()
        append_batch(partition, batch, now_ms=NOW_MS)
        partition.flushes.roll(NOW_MS)
        partition.flushes.run(NOW_MS)
        dirty = partition.cleanup.dirty_range(None, NOW_MS)
        compaction = partition.cleanup.plan_compaction(dirty, now_ms=NOW_MS)
        assert compaction is not None

        def compact() -> None:
            compaction.map_keys(unthrottled)
            ends.append(compaction.clean_next(unthrottled))

        return compact

    check_lock(prepared)
    assert ends == [True] * len(ends) != []


@pytest.mark.slow
@CODECS
async def test_shard_is_loaded_from_a_large_batch_in_short_turns(codec: Codec) -> None:
    value = OffsetCommitValue(5, -1, "", NOW_MS)
    commits = [offset_commit("g", "t", at % 1_000, value) for at in range(COMMITS)]
    records = [LogRecord(at, NOW_MS, commit.key, commit.value) for at, commit in enumerate(commits)]
    partition = opened()
    append_batch(partition, encode_batch(records, codec=codec), now_ms=NOW_MS)
    watches = []
    while not watches or (len(watches) < TRIES and not watches[-1].is_short):
        with watched_loop() as watch:
            end = await replay_log(partition, GroupMachine(), Pace(), lambda _: True)
        assert end == COMMITS
        watches.append(watch)
    min(watches, key=lambda candidate: candidate.cpu.judged_ms).check()


@pytest.mark.slow
@CODECS
def test_follower_appends_the_worst_batch_in_a_short_turn(codec: Codec) -> None:
    check_follower(batch_of(keyed_records(KEYED), KEYED, codec), KEYED)
    check_follower(most_bytes(codec), 100)


def check_follower(batch: bytes, count: int) -> None:
    partitions: list[Partition] = []

    def prepared() -> Callable[[], object]:
        partitions.append(opened())
        return partial(partitions[-1].append_as_follower, batch, 0)

    check_lock(prepared)
    assert {partition.log_end_offset for partition in partitions} == {count}
